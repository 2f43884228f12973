"""The base of an adapter that is trained on a GGUF model, which a run de-quantizes and keeps in its own folder."""

from __future__ import annotations

import torch

from tether.config.schema import RunConfig
from tether.models.gguf import gguf_source
from tether.models.loading import load_causal_lm
from tether.models.paths import BASE
from tether.models.saving import atomic_folder
from tether.models.tokenizer import load_tokenizer


def is_from_gguf(config: RunConfig) -> bool:
    """Whether a run trains an adapter on a GGUF model, which is then saved as the base that the adapter names."""
    return config.model.lora is not None and gguf_source(config.model.path) is not None


def with_base(config: RunConfig) -> RunConfig:
    """The configuration with ``model.path`` replaced by the folder that ``write_base`` wrote, if it exists."""
    base = config.output_dir / BASE
    if not is_from_gguf(config) or not base.is_dir():
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(base), "revision": None})})


def write_base(config: RunConfig, *, is_kept: bool) -> None:
    """Writes the GGUF model of a run as a plain model folder in float32: the base that a saved adapter names.

    Args:
        is_kept: whether an existing folder already belongs to this run.
    """
    model, folder = config.model, config.output_dir / BASE
    if is_kept and folder.is_dir():
        return
    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    with atomic_folder(folder) as partial:
        load_causal_lm(model.path, dtype=torch.float32, **options).save_pretrained(partial)
        load_tokenizer(model.path, **options).save_pretrained(partial)
