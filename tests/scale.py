"""The memory table of docs/scale.md, computed as ``tether plan --processes=8`` computes it: python -m tests.scale."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.tiny import tiny_tokenizer
from tether.config.schema import RunConfig
from tether.report.text import byte_size
from tether.train.plan import ENGINES, estimate_memory, model_config, plan_roles

PROCESSES = 8
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
"""Of the models of Qwen2.5 that are called so."""
TRAINED = {
    "full, separate critic": {"value": {"kind": "model"}},
    "LoRA; policy, reference, critic on one base": {"model": {"lora": {}}},
}
LONGEST = 512
"""Tokens of a prompt, and of an answer."""
COLUMNS = ("one GPU", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "FSDP2, never gathered")


def config_of(folder: Path, shape: str, trained: str) -> RunConfig:
    """The run whose memory is estimated."""
    hidden, intermediate, layers, heads, key_value_heads, vocabulary, tied = SHAPES[shape]
    settings = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    raw = {
        "model": {"path": str(folder)},
        "rewards": [{"type": "http", "url": "http://127.0.0.1:8000/score"}],
        "data": {"prompts": "prompts.jsonl"},
        "sampling": {"response_length": LONGEST},
        "train": {
            "max_steps": 1, "rollout_batch_size": 512, "micro_batch_size": 4, "gradient_checkpointing": True,
            "bf16": True,
        },
        "output_dir": "out",
    }  # fmt: skip
    for section, changes in TRAINED[trained].items():
        raw[section] = raw.get(section, {}) | changes
    return RunConfig.model_validate(raw).resolved(bf16=True)


def row(shape: str, trained: str) -> list[str]:
    """Peak memory of a process over all phases: alone, and of eight under each engine."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), shape, trained)
        roles, of = plan_roles(config, tiny_tokenizer()), model_config(config.model.path, config)
        alone = estimate_memory(config, roles, of, LONGEST)
        spread = [estimate_memory(config, roles, of, LONGEST, PROCESSES, how) for how in ENGINES.values()]
        train = config.train.model_copy(update={"ds3_gather_for_generation": False})
        layers = config.model_copy(update={"train": train})
        spread.append(estimate_memory(layers, roles, of, LONGEST, PROCESSES, ENGINES["FSDP2"]))
        return [byte_size(max(phases.values())) for phases in (alone, *spread)]


def table() -> list[str]:
    """The table in Markdown."""
    lines = [f"| model | trained | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for trained in TRAINED:
        for shape in SHAPES:
            if shape != "72B" or trained.startswith("LoRA"):
                lines.append(f"| {shape} | {trained} | {' | '.join(row(shape, trained))} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
