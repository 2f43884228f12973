"""Peak memory of four roles on one base against four models: python benchmarks/memory.py [--updates 2] [--model FOLDER]

Both sides are the same job on SmolLM2-135M-Instruct in float32 (the same prompts, batch sizes and lengths, gradient
checkpointing on, as is usual when memory is short), each in its own process:

    four models   full fine-tuning, a frozen copy as reference, a separate critic and reward model
    one base      LoRA policy, critic and reward as adapters, the base without adapters as reference

Prints the peak resident memory of both, imports included, and their ratio; exits with 1 if it is over 0.35.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

PROMISE = 0.35
KINDS = ("four models", "one base")
PROMPTS = ("How was the weather today?", "Tell me about your dog.", "What did you have for lunch?", "I lost my keys.")


def main() -> int:
    """Runs both sides and compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct (default: made from its package)")
    parser.add_argument("--side", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measured(given.side, str(given.model), given.updates)))
        return 0

    from tether.demo.model import prepare_model
    from tether.demo.run import cache_folder

    model = given.model or prepare_model(cache_folder())
    peaks = {}
    for kind in KINDS:
        command = [sys.executable, __file__, "--side", kind, "--model", str(model), "--updates", str(given.updates)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])
        print(f"{kind}: {peaks[kind] / 2**30:.2f} GiB", flush=True)
    ratio = peaks["one base"] / peaks["four models"]
    print(f"one base / four models: {ratio:.2f} (at most {PROMISE})")
    return 0 if ratio <= PROMISE else 1


def measured(kind: str, model: str, updates: int) -> int:
    """Peak resident bytes of this process after a short run."""
    from tether import RunConfig, train_policy

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
        judge = str(Path(folder) / "judge")
        shared = kind == "one base"
        subprocess.run([sys.executable, "-c", JUDGE, model, judge, str(int(shared))], check=True)
        result = train_policy(
            RunConfig(
                model={"path": model, "dtype": "float32", **({"lora": {"r": 16}} if shared else {})},
                value={"kind": "adapter" if shared else "model"},
                rewards=[{"type": "adapter" if shared else "model", "path": judge}],
                data={"prompts": str(prompts)},
                sampling={"response_length": 48},
                ppo={"num_ppo_epochs": 1},
                train={
                    "max_steps": updates,
                    "rollout_batch_size": 16,
                    "micro_batch_size": 8,
                    "bf16": False,
                    "gradient_checkpointing": True,
                },
                output_dir=str(Path(folder) / "out"),
            )
        )
    if result.interrupted is not None:
        raise SystemExit(130)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


JUDGE = """
import sys
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model, folder, shared = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(model)
judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=tokenizer.pad_token_id)
if shared:
    judge = get_peft_model(judge, LoraConfig(task_type=TaskType.SEQ_CLS, r=16, target_modules="all-linear"))
judge.save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""
"""Writes a reward model with a random head, in a separate process so that its memory is not counted."""


if __name__ == "__main__":
    sys.exit(main())
