"""Tether on a job: python -m benchmarks.peers.tether_ppo JOB.json OUTCOME.json"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.peers.job import SETTINGS, Job, Outcome, read_job, resident_peak
from benchmarks.whole import whole_run
from tether.config.schema import RunConfig


class Meter(TrainerCallback):
    """Notes the time at the end of every update."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The first update begins."""
        self.stamps.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """An update is over."""
        self.stamps.append(time.perf_counter())


def config_of(job: Job) -> RunConfig:
    """The job as Tether's configuration: with LoRA, four roles on one base."""
    lora = {"r": SETTINGS["rank"], "alpha": SETTINGS["alpha"]}
    return RunConfig.model_validate(
        {
            "model": {"path": job.model, "dtype": "bfloat16" if job.bfloat16 else "float32"}
            | ({"lora": lora} if job.lora else {}),
            "value": {"kind": "head"}
            if job.critic == "head"
            else {"kind": "adapter" if job.lora else "model", "init": "reward"},
            "rewards": [
                {"type": "adapter", "path": job.judge_adapter}
                if job.lora
                else {"type": "model", "path": job.judge, "dtype": "bfloat16" if job.bfloat16 else "float32"}
            ],
            "data": {"prompts": job.prompts, "chat_template": "none"},
            "sampling": {
                "response_length": job.tokens,
                "temperature": SETTINGS["temperature"],
                "batch_size": job.decoded,
                "cache_implementation": job.cache,
                **({} if job.ends else {"stop_token": None}),
            },
            "ppo": {
                "kl_coef": SETTINGS["kl_coef"],
                "lam": SETTINGS["lam"],
                "num_ppo_epochs": job.epochs,
                "num_mini_batches": 1,
            },
            "train": {
                "max_steps": job.updates,
                "rollout_batch_size": job.episodes,
                "micro_batch_size": job.micro,
                "learning_rate": SETTINGS["learning_rate"],
                "bf16": False,
                "dry_step": False,
                "seed": job.seed,
            },
            "output_dir": job.folder,
            "overwrite_output_dir": True,
        }
    )


def train(job: Job) -> Outcome:
    """Trains, and returns the measurements."""
    torch.set_num_threads(job.threads)
    meter = Meter()
    updates = whole_run(config_of(job), callbacks=[meter]).updates
    seconds = [end - start for start, end in zip(meter.stamps, meter.stamps[1:], strict=False)]
    peaks = [value for update in updates for name, value in update.items() if name.startswith("memory/")]
    return Outcome(
        seconds,
        [update["objective/scores"] for update in updates],
        [update["rollout/length"] for update in updates],
        max(peaks) if torch.cuda.is_available() else resident_peak(),
        updates[-1],
    )


if __name__ == "__main__":
    job, path = read_job()
    path.write_text(json.dumps(asdict(train(job))), encoding="utf-8")
