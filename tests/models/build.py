"""Configurations, folders and roles for the tests of models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny import Kind, save_tiny
from tether.config.schema import RunConfig
from tether.data.collate import collate
from tether.models.build import build_roles
from tether.models.loading import load_tokenizer
from tether.models.roles import ModelRoles
from tether.types import MicroBatch

DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
QUERIES = [[5, 7, 8, 9], [8], [5, 11, 12, 13, 14, 6, 7]]
RESPONSES = [[9, 10, 2], [11, 12, 13, 14, 2], [20, 21, 22, 23]]


def micro_batch() -> MicroBatch:
    """Three rollouts of unequal lengths, padding on both sides."""
    return collate(QUERIES, RESPONSES)


def run_config(path: Path | str, *, lora: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A run from ``path``; ``sections`` are merged into it, key by key."""
    raw: dict[str, Any] = {
        "model": {"path": str(path)} | ({} if lora is None else {"lora": lora}),
        "rewards": [{"type": "function", "path": "rewards.py", "name": "reward"}],
        "data": {"prompts": "prompts.jsonl"},
        "train": {"max_steps": 1},
        "output_dir": "out",
    }
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(raw)


def roles_of(config: RunConfig, *, autocast_dtype: torch.dtype | None = None) -> ModelRoles:
    """Roles on the CPU."""
    tokenizer = load_tokenizer(config.model.path)
    return build_roles(config, tokenizer, device="cpu", autocast_dtype=autocast_dtype)


def save_model(folder: Path, kind: Kind = "llama", **options: Any) -> Path:
    """A tiny model whose configuration asks for a dropout of .3 everywhere."""
    save_tiny(folder, kind, **options)
    edit_json(folder / "config.json", lambda config: config.update(dict.fromkeys(DROPOUTS, 0.3)))
    return folder


def save_adapter(
    folder: Path, base: Path, *, reward: bool = False, seed: int = 1, tokenizer: bool = False, **settings: Any
) -> Path:
    """An adapter far from its start, as PEFT saves it: of a language model, or of a sequence classifier."""
    auto, kind = (AutoModelForSequenceClassification, "SEQ_CLS") if reward else (AutoModelForCausalLM, "CAUSAL_LM")
    model = auto.from_pretrained(base, **({"num_labels": 1} if reward else {}))
    lora = peft.LoraConfig(task_type=kind, lora_dropout=0.3, **{"r": 4, "target_modules": "all-linear"} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = wrapped(model, lora)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.data = torch.randn_like(parameter) * 0.3
    adapted.save_pretrained(folder, save_embedding_layers=False)
    if tokenizer:
        load_tokenizer(str(base)).save_pretrained(folder)
    return folder


def wrapped(model: torch.nn.Module, settings: peft.LoraConfig) -> peft.PeftModel:
    """PEFT's own wrapper; what it warns of is its business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, settings)


def plain_adapted(auto: type, base: Path, adapter: Path, **options: Any) -> peft.PeftModel:
    """The adapter on its base as a user of PEFT loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(auto.from_pretrained(base, **options), adapter).eval()


def edit_json(file: Path, change: Any) -> None:
    """Rewrites a JSON file after ``change`` did its work on it."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def checksums(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters(remove_duplicate=False)}
