"""Reward models as LLaMA-Factory saves them: a language model, full or as an adapter, and its value head in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.models.build import plain_adapted, save_adapter, save_model
from tests.tiny import Kind

HEAD = {"v_head.summary.weight": torch.linspace(-1, 1, 16)[None], "v_head.summary.bias": torch.tensor([0.25])}


def save_value_head(
    folder: Path, kind: Kind = "llama", *, form: Literal["full", "adapter"] = "full", pickled: bool = False, **options
) -> Path:
    """A folder ``reward`` under ``folder`` with tokenizer; the base of an adapter goes beside it."""
    reward = folder / "reward"
    if form == "full":
        save_model(reward, kind, **options)
    else:
        save_adapter(reward, save_model(folder / "base", kind, **options), tokenizer=True)
    if pickled:
        torch.save(HEAD, reward / "value_head.bin")
    else:
        save_file(HEAD, reward / "value_head.safetensors", metadata={"format": "pt"})
    return reward


@torch.no_grad()
def plain_value(reward: Path, ids: list[int]) -> float:
    """The head's value at the last token, as TRL's value-head model computes it, with transformers and PEFT alone."""
    if (reward / "adapter_config.json").exists():
        model = plain_adapted(AutoModelForCausalLM, reward.parent / "base", reward)
    else:
        model = AutoModelForCausalLM.from_pretrained(reward).eval()
    state = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    return (state @ HEAD["v_head.summary.weight"][0] + HEAD["v_head.summary.bias"]).item()
