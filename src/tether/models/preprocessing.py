"""Files that a multimodal model needs besides weights and tokenizer, to be loaded by ``AutoProcessor`` or vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from tether.models.gguf import gguf_source
from tether.models.paths import downloaded, own_weights

TEMPLATE = "chat_template.json"
"""Chat template file of processors saved by older releases; it takes precedence over the tokenizer's template."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", TEMPLATE)


def read_processor(path: str, shape: PreTrainedConfig, *, revision: str | None = None) -> dict[str, bytes]:
    """Reads the processor's files, by name, of the model in ``path`` or of its adapter's base; none for a text-only
    model.

    Args:
        shape: the configuration of the model that they will be saved with.

    Raises:
        ModelError: the model cannot be reached.
    """
    if shape.get_text_config() is shape or gguf_source(path) is not None:
        return {}
    folder = downloaded(*own_weights(path, revision), PROCESSOR_FILES)
    return {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}


def write_processor(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files beside model and tokenizer in ``folder``, except a chat template if the tokenizer has one."""
    own = files.keys() - ({TEMPLATE} if (folder / "chat_template.jinja").is_file() else set())
    for name in own:
        (folder / name).write_bytes(files[name])
