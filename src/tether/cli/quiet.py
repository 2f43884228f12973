"""Controls what libraries may print under the command line. The package itself never touches logging or warnings."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress

_CHATTY = r"(accelerate|datasets|huggingface_hub|peft|torch|transformers|trl)(\..*)?"


def quieten(*, debug: bool) -> None:
    """Sets up logging for a command; silences the libraries' progress bars and chatter unless ``debug``.

    Must run before they are imported, since they read the environment then. The user's own settings are kept.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[_Stderr()], format="%(message)s")
    logging.getLogger("tether").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("tether.rewards.files").setLevel(logging.WARNING)  # of users' own files, like any other library
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if debug:
        return
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=_CHATTY)
    # transformers' trainer counts micro-batches by itself, and under ZeRO Accelerate warns that its own count differs
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)


class _Stderr(logging.Handler):
    """Writes to the current ``sys.stderr``, which a live display replaces, without characters that could act on a
    terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        from tether.report.text import visible  # a warning can contain text of a model or a client

        with suppress(OSError):  # nobody is left to read it, and a run continues without
            print(visible(self.format(record)), file=sys.stderr)
