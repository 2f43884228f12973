"""Tether and TRL 1.12.0 side by side on SmolLM2-135M, two cores: python benchmarks/peers.py [--jobs NAME …] [-o FOLDER]

Both get the same prompts, judge, lengths, batches, updates, learning rate and type of weights, each in its own process,
TRL in its own environment (.peers/trl-1.12, created the first time). The first update of each is not counted. Prints
episodes per second and peak memory (resident, imports included) of both, their ratios, and the mean scores of the first
and the last update, which show that the work was the same; writes all to peers.json, and exits with 1 if a ratio is
worse than promised:

    job      what                                                                       episodes/s   memory
    full     full fine-tuning, a critic of its own, float32, 16 × exactly 48 tokens     ≥ 1.6        ≤ .70
    bf16     the same in pure bfloat16                                                  ≥ 1.6        ≤ .70
    epochs   the same with 4 epochs                                                     ≥ 1.5        ≤ .70
    ragged   answers that end by themselves, up to 128 tokens, 64 episodes              ≥ 2.5        ≤ .50
             (asked for one short sentence: 11 to 128 tokens, 61 on average)
    lora     four roles on one base, against TRL with a LoRA policy                     ≥ 3.0        ≤ .35
    head     the same with the critic a head on the policy                              ≥ 3.0        ≤ .35
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

from benchmarks.peers.environment import say, trl_python  # noqa: E402
from benchmarks.peers.job import Job, Outcome, SideFailed, write_job  # noqa: E402

CHANGES: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16": {"bfloat16": True},
    "epochs": {"epochs": 4},
    "ragged": {"episodes": 64, "decoded": 64, "tokens": 128, "ends": True},
    "lora": {"lora": True},
    "head": {"lora": True, "critic": "head"},
}
PROMISES = {
    "full": (1.6, 0.70),
    "bf16": (1.6, 0.70),
    "epochs": (1.5, 0.70),
    "ragged": (2.5, 0.50),
    "lora": (3.0, 0.35),
    "head": (3.0, 0.35),
}
"""Minimum ratio of episodes per second to TRL's, and maximum ratio of peak memory to TRL's."""
SUBJECTS = ("the weather", "my dog", "a long walk", "dinner", "the train to work", "an old friend", "the sea", "music")
SHORT = "Answer in one short sentence."
"""The system prompt for answers that end by themselves; with other prompts this model's rarely do within 128 tokens."""
SIDES = ("tether", "trl")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Everything is in folders: nothing waits for a network."""

JUDGE = """
import sys
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model, full, adapter = sys.argv[1:]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(model)
pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=pad)
judge.save_pretrained(full)
lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=16, target_modules="all-linear")
get_peft_model(judge, lora).save_pretrained(adapter)
for folder in (full, adapter):
    tokenizer.save_pretrained(folder)
"""
"""One judge with a random head, as a whole model and as an equivalent adapter."""


def main() -> int:
    """Runs the jobs on both sides; returns 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--updates", type=int, default=3, help="number of updates; the first is not counted")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, on both sides")
    parser.add_argument("--model", type=Path, help="folder of the policy (default: SmolLM2-135M, from its package)")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-peers"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    model, folder = given.model or smollm2(), given.output.resolve()
    results, faults = {}, []
    print(f"{'job':8} {'side':8} {'episodes/s':>10} {'GiB':>6} {'score, first and last':>23}")
    for name in given.jobs:
        shared = material(model, folder, ends=CHANGES[name].get("ends", False))
        job = Job(**shared, updates=given.updates, threads=given.threads, **CHANGES[name])
        sides = {side: outcome(side, job, folder / f"{name}-{side}") for side in given.sides}
        for side, seen in sides.items():
            speed = seen.episodes_per_second(job)
            first, *_, last = seen.scores
            print(f"{name:8} {side:8} {speed:10.3f} {seen.peak_gib:6.2f} {first:11.3f} {last:11.3f}", flush=True)
        results[name] = {side: asdict(seen) for side, seen in sides.items()}
        (given.output / "peers.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        if len(sides) == len(SIDES):
            ours, theirs = sides["tether"], sides["trl"]
            speed = ours.episodes_per_second(job) / theirs.episodes_per_second(job)
            memory = ours.peak_gib / theirs.peak_gib
            print(f"{name:8} {'ratio':8} {speed:10.2f} {memory:6.2f}", flush=True)
            faults += broken(name, speed, memory)
    for fault in faults:
        say(f"broken: {fault}")
    return 1 if faults else 0


def broken(name: str, speed: float, memory: float) -> list[str]:
    """The promises that a job breaks.

    Args:
        speed: ratio of episodes per second to TRL's.
        memory: ratio of peak memory to TRL's.
    """
    least, most = PROMISES[name]
    faults = [] if speed >= least else [f"{name}: {speed:.2f} times TRL's episodes per second, promised {least}"]
    return faults if memory <= most else [*faults, f"{name}: {memory:.2f} of TRL's memory, promised {most}"]


def outcome(side: str, job: Job, folder: Path, *, limit: float | None = None) -> Outcome:
    """Runs a side on a job, in its own process.

    Args:
        limit: maximum number of seconds.

    Raises:
        SideFailed: it ended with an error, or took longer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task, result = folder / "job.json", folder / "outcome.json"
    write_job(Job(**asdict(job) | {"folder": str(folder / "run")}), task)
    python = trl_python() if side == "trl" else sys.executable
    quiet = {"OMP_NUM_THREADS": str(job.threads), "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    command, said = [python, "-m", f"benchmarks.peers.{side}_ppo", task, result], folder / "log.txt"
    with said.open("w", encoding="utf-8") as log:
        options = {"env": os.environ | OFFLINE | quiet, "stdout": log, "stderr": subprocess.STDOUT}
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=limit, **options).returncode
        except subprocess.TimeoutExpired as error:
            raise SideFailed(f"{side} took over {limit:.0f} s; its log is {said}") from error
    if code:
        raise SideFailed(f"{side} failed; {said} ends with:\n{said.read_text(encoding='utf-8')[-2000:]}")
    return Outcome(**json.loads(result.read_text(encoding="utf-8")))


def material(model: Path, folder: Path, *, ends: bool = False) -> dict[str, str]:
    """Prompts of unequal length and both forms of the judge, written to ``folder`` unless they exist.

    Args:
        ends: whether the prompts are a chat that asks for short answers, in the model's template.
    """
    prompts = folder / ("chats.jsonl" if ends else "prompts.jsonl")
    judge, adapter = folder / "judge", folder / "judge-adapter"
    texts = [
        f"{'Please be kind and patient. ' * (i % 5)}Tell me {'a little ' * (i // 8 % 3)}about {subject}. "
        for i, subject in enumerate(SUBJECTS * 8)
    ]
    if ends:
        from transformers import AutoTokenizer

        written = AutoTokenizer.from_pretrained(model).apply_chat_template
        chats = [[{"role": "system", "content": SHORT}, {"role": "user", "content": text.strip()}] for text in texts]
        texts = [written(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    if not adapter.exists():
        subprocess.run([sys.executable, "-c", JUDGE, model, judge, adapter], env=os.environ | OFFLINE, check=True)
    return {
        "model": str(model),
        "judge": str(judge),
        "judge_adapter": str(adapter),
        "prompts": str(prompts),
        "folder": str(folder),
    }


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, made from its package."""
    from tether.demo.model import prepare_model
    from tether.demo.run import cache_folder

    return prepare_model(cache_folder())


if __name__ == "__main__":
    sys.exit(main())
