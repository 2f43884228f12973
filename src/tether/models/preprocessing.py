"""What a model with eyes or ears needs beside weights and tokenizer, to be opened by ``AutoProcessor`` or by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from tether.models.gguf import gguf_source
from tether.models.paths import downloaded, own_weights

TEMPLATE = "chat_template.json"
"""Where a processor of an older release has its chat template; it is read before the tokenizer's."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", TEMPLATE)


def read_processor(path: str, shape: PreTrainedConfig, *, revision: str | None = None) -> dict[str, bytes]:
    """The files of the processor beside the model in ``path``, or beside the base of the adapter there, by name; none
    of a model that reads text alone.

    Args:
        shape: the configuration of the model that they are to be saved with.

    Raises:
        ModelError: it cannot be reached.
    """
    if shape.get_text_config() is shape or gguf_source(path) is not None:
        return {}
    folder = downloaded(*own_weights(path, revision), PROCESSOR_FILES)
    return {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}


def write_processor(files: Mapping[str, bytes], folder: Path) -> None:
    """Puts the files beside the model and tokenizer in ``folder``; a template is the tokenizer's where it has one."""
    own = files.keys() - ({TEMPLATE} if (folder / "chat_template.jinja").is_file() else set())
    for name in own:
        (folder / name).write_bytes(files[name])
