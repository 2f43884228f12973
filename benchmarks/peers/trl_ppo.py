"""TRL's PPOTrainer on a job: python -m benchmarks.peers.trl_ppo JOB.json OUTCOME.json, in TRL's environment."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peers.job import SETTINGS, Job, Outcome, read_job, resident_peak


class Meter(TrainerCallback):
    """Notes time and score whenever an update is logged."""

    def __init__(self) -> None:
        self.outcome, self._last = Outcome(), time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """An update is over."""
        if logs and "objective/scores" in logs:
            now = time.perf_counter()
            self.outcome.seconds.append(now - self._last)
            self.outcome.scores.append(logs["objective/scores"])
            self._last = now


def train(job: Job) -> Outcome:
    """Trains as TRL's users do: one model per role; the reference of a LoRA policy is its base."""
    torch.set_num_threads(job.threads)
    on_gpu = torch.cuda.is_available()
    kind = {"dtype": torch.bfloat16 if job.bfloat16 else torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    judges = [AutoModelForSequenceClassification.from_pretrained(job.judge, num_labels=1, **kind) for _ in range(2)]
    for judge in judges:
        judge.config.pad_token_id = tokenizer.pad_token_id
    with open(job.prompts, encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    dataset = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    lora = LoraConfig(
        r=SETTINGS["rank"], lora_alpha=SETTINGS["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    config = PPOConfig(
        output_dir=job.folder,
        total_episodes=job.updates * job.episodes,
        per_device_train_batch_size=job.micro,
        gradient_accumulation_steps=job.episodes // job.micro,
        local_rollout_forward_batch_size=job.decoded,
        num_mini_batches=1,
        num_ppo_epochs=job.epochs,
        learning_rate=SETTINGS["learning_rate"],
        kl_coef=SETTINGS["kl_coef"],
        lam=SETTINGS["lam"],
        temperature=SETTINGS["temperature"],
        response_length=job.tokens,
        stop_token="eos" if job.ends else None,
        missing_eos_penalty=None,
        num_sample_generations=0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not on_gpu,
        bf16=False,
        seed=job.seed,
    )
    meter = Meter()
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(job.model, **kind),
        ref_model=None if job.lora else AutoModelForCausalLM.from_pretrained(job.model, **kind),
        reward_model=judges[0],
        value_model=judges[1],
        train_dataset=dataset,
        eval_dataset=dataset.select(range(min(8, len(dataset)))),
        peft_config=lora if job.lora else None,
        callbacks=[meter],
    )
    meter._last = time.perf_counter()
    trainer.train()
    meter.outcome.peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else resident_peak()
    return meter.outcome


if __name__ == "__main__":
    job, path = read_job()
    path.write_text(json.dumps(asdict(train(job))), encoding="utf-8")
