"""Configurations, folders and roles for the tests of models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    GenerationConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.tiny import BOS, EOS, PAD, VOCAB_SIZE, Kind, save_tiny, tiny_tokenizer
from tether.config.schema import RunConfig
from tether.data.collate import collate
from tether.models.build import build_roles
from tether.models.roles import ModelRoles
from tether.models.tokenizer import load_tokenizer
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


def save_seeing(folder: Path) -> Path:
    """A tiny Gemma 3 with eyes, untied, whose text model has settings of its own, and a tokenizer without images."""
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {"head_dim": 8, "num_key_value_heads": 1, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None, "initializer_range": 0.3}
    config = Gemma3Config(
        text_config=shared | text | ends,
        vision_config=shared | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=VOCAB_SIZE - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_two_trunks(folder: Path) -> Path:
    """A tiny Qwen 3.5 with eyes, whose language model is its text model alone, and whose classifier has all of it."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    linear = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    linear |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "vocab_size": VOCAB_SIZE}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(
        text_config=text | linear | layers | ends | {"rope_parameters": rope, "initializer_range": 0.3},
        vision_config=vision | {"num_position_embeddings": 16},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3_5ForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def of_kind(folder, kind, name, **shape):
    """A folder that says it holds a model of another kind; its weights are not looked at."""
    save_tiny(folder)
    said = {"model_type": kind, "architectures": [name], "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(said | shape))
    return str(folder)
