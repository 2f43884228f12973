"""TRL's PPOTrainer on a toy language, as tables: python -m benchmarks.peers.trl_toys A --seeds 0 -o OUT.json

Runs in an environment with TRL 1.12.0, the last release that has the trainer, and without Tether. Writes one entry per
seed, with the exact regret after every update.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
import torch.nn.functional as F
from datasets import Dataset
from jaxtyping import Float
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.modeling_outputs import CausalLMOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.toys.language import END, Language, toy
from benchmarks.toys.models import Reader, Rows, TablePolicy


class GeneratingTable(TablePolicy, GenerationMixin):
    """A table that ``generate`` can sample from, with a padding token that it never writes: TRL looks up its logit."""

    def __init__(self, language: Language) -> None:
        super().__init__(language)
        self.generation_config = GenerationConfig(use_cache=False, eos_token_id=END, pad_token_id=language.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutput:
        """The logits, the padding token's far below all others."""
        return CausalLMOutput(logits=F.pad(super().forward(*args, **kwargs).logits, (0, 1), value=-1e4))

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> dict[str, Any]:
        """All tokens so far, as a table keeps no cache; padding after an end is read as one more end."""
        return {"input_ids": input_ids.where(input_ids < self.config.vocab_size, END), "attention_mask": attention_mask}


class RowsWithEnds(Rows):
    """Two rows per text: one for while it is written, one for after its end token."""

    def forward(self, hidden: Float[Tensor, "*columns 3"]) -> Float[Tensor, "*columns width"]:
        """The rows."""
        prompts, texts, ended = hidden.unbind(-1)
        return super().forward(torch.stack([prompts, 2 * texts + ended, ended], dim=-1))


class TableClassifier(PreTrainedModel):
    """A sequence classifier whose head is a table."""

    config_class = PreTrainedConfig
    base_model_prefix = "reader"

    def __init__(self, language: Language, head: Rows) -> None:
        super().__init__(PreTrainedConfig(vocab_size=language.vocab_size))
        self.reader = Reader(language)
        self.score = head


class RegretMeter(TrainerCallback):
    """Notes the exact regret of the policy after every update."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self.regrets: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Measures."""
        self.regrets.append(self._language.regret(model.policy.logprobs()))


def train(language: Language, settings: argparse.Namespace, seed: int) -> list[float]:
    """Regret after each update. The critic has a row for the state after an end, where TRL puts the score."""
    judge = TableClassifier(language, Rows(language.answer_scores.unsqueeze(-1)))
    critic_table = torch.zeros(language.num_prompts, 2 * language.num_prefixes, 1)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(language.vocab_size)}, unk_token=str(END))),
        eos_token=str(END),
        pad_token="<pad>",
        padding_side="left",
    )
    queries = [list(language.query(x)) for x in range(language.num_prompts)]
    dataset = Dataset.from_dict({"input_ids": [queries[i % len(queries)] for i in range(settings.batch)]})
    meter = RegretMeter(language)
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder,
            total_episodes=settings.updates * settings.batch,
            per_device_train_batch_size=settings.batch,
            gradient_accumulation_steps=1,
            local_rollout_forward_batch_size=settings.batch,
            num_mini_batches=1,
            num_ppo_epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            adam_epsilon=1e-5,
            kl_coef=language.beta,
            lam=0.95,
            cliprange=0.2,
            temperature=1.0,
            response_length=language.max_length,
            stop_token="eos",
            missing_eos_penalty=None,  # the judge's table has the score of an answer that was cut
            num_sample_generations=0,
            report_to=[],
            save_strategy="no",
            logging_steps=settings.updates,
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            seed=seed,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=GeneratingTable(language),
            ref_model=GeneratingTable(language),
            reward_model=judge,
            value_model=TableClassifier(language, RowsWithEnds(critic_table)),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(language.num_prompts)),
            callbacks=[meter],
        )
        trainer.train()
    return meter.regrets


def main() -> None:
    """Trains once per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("toy", choices=["A", "B"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in given.seeds:
        start = time.perf_counter()
        regrets = train(toy(given.toy), given, seed)
        runs.append({"seed": seed, "regrets": regrets, "seconds": time.perf_counter() - start})
        given.output.write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
