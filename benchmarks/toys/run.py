"""The product's trainer on a toy language, and the exact regret of its policy after every update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.toys.language import END, Language, toy
from benchmarks.toys.tables import TableGenerator, table_roles
from benchmarks.whole import end_if_interrupted
from tether.compat.launch import nested
from tether.config.schema import RunConfig
from tether.metrics.trackers import Trackers
from tether.rewards.function import FunctionSource
from tether.train.callbacks import Callbacks
from tether.train.display import NullDisplay
from tether.train.log import RunLog
from tether.train.parts import Parts
from tether.train.trainer import PPOTrainer
from tether.types import Prompt, Sampling

HARNESS = {
    "train.max_steps": 300,
    "train.rollout_batch_size": 1024,
    "train.micro_batch_size": 1024,
    "train.learning_rate": 0.03,
}
"""Budget and learning rate of tables; the algorithm is the product's default."""


def judged(language: Language, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The judge's score of each answer, from texts. Handling cut answers is up to the trainer."""
    numbers = {prompt.text: prompt.row for prompt in toy_prompts(language)}
    return [
        float(language.scores[numbers[prompt], language.number([int(letter) for letter in completion.split()])])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def toy_scores(prompts: list[str], completions: list[str], language: list[str]) -> list[float]:
    """``judged`` as a reward function of a configuration; the dataset's column ``language`` names the toy."""
    (name,) = set(language)
    return judged(toy(name), prompts, completions)


class AfterUpdates(TrainerCallback):
    """Calls a function with the policy after every update."""

    def __init__(self, action: Callable[[nn.Module], None]) -> None:
        self._action = action

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """Calls it."""
        self._action(model)


@dataclass(frozen=True)
class Course:
    """The course of a run."""

    batch_size: int
    """Number of answers per update."""
    regrets: Sequence[float] = field(repr=False)
    """Regret after each update."""

    @property
    def regret(self) -> float:
        """Regret at the end."""
        return self.regrets[-1]

    def episodes_to(self, regret: float) -> int | None:
        """Number of answers until the regret was first this low; None if it never was."""
        reached = (i for i, r in enumerate(self.regrets, start=1) if r <= regret)
        return next((i * self.batch_size for i in reached), None)


def toy_config(language: Language, folder: Path, changes: Mapping[str, Any]) -> RunConfig:
    """A run on the language: the product's defaults, except for β, length and cut score, which the language fixes.

    Args:
        changes: changes of the configuration, by dotted key.
    """
    settings: dict[str, Any] = {
        "model.path": "table",
        "rewards": [{"type": "function", "path": "benchmarks.toys.run", "name": "toy_scores"}],
        "data.prompts": "prompts.jsonl",
        "sampling.response_length": language.max_length,
        "ppo.kl_coef": language.beta,
        "ppo.missing_eos_score": language.cut_score,
        "train.bf16": False,
        "train.log_samples": 0,
        "output_dir": str(folder),
    } | dict(changes)
    return RunConfig.model_validate(nested(settings))


def toy_tokenizer(language: Language) -> PreTrainedTokenizerFast:
    """Tokens written as their ids, separated by spaces; the pad token is the end token."""
    vocabulary = {str(token): token for token in range(language.vocab_size)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=str(END)))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(str(END), special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=str(END), pad_token=str(END))


def toy_prompts(language: Language) -> list[Prompt]:
    """Every prompt of the language once."""
    queries = [language.query(x) for x in range(language.num_prompts)]
    texts = [" ".join(map(str, query)) for query in queries]
    return [Prompt(x, text, text, query) for x, (text, query) in enumerate(zip(texts, queries, strict=True))]


def table_trainer(
    language: Language, config: RunConfig, callbacks: Sequence[TrainerCallback] = (), **parts: Any
) -> PPOTrainer:
    """The product's trainer with policy, critic and reference as tables.

    Args:
        parts: replacements for parts that would otherwise be created.
    """
    tokenizer, prompts = toy_tokenizer(language), toy_prompts(language)
    ppo = config.ppo
    roles = table_roles(language, tokenizer, with_reference=ppo.kl_coef > 0, with_critic=ppo.has_critic)
    made = {
        "roles": roles,
        "generator": TableGenerator(roles.policy),
        "rewards": FunctionSource(partial(judged, language), "judged"),
        "tokenizer": tokenizer,
        "sampling": Sampling(language.max_length, config.sampling.temperature, frozenset({END})),
        "prompts": prompts,
        "eval_prompts": [],
    }
    folder = config.output_dir
    log = RunLog(folder, NullDisplay(), Trackers("none", folder.name, folder, {}), logging_steps=1)
    events = Callbacks(callbacks, config, len(prompts))
    return PPOTrainer(config, Parts(**made | parts), read={}, log=log, callbacks=events)


def train_tables(language: Language, folder: Path, changes: Mapping[str, Any]) -> Course:
    """Trains tables, and measures regret in the objective that the run optimizes.

    With ``ppo.score_norm: frozen`` that is the language whose scores are (r − mean) / spread by the run's own
    statistics, while β and the score of a cut answer stay the same: the score that a nat of KL must earn, and thus the
    best policy, differ from those at the judge's own scale.

    Args:
        changes: changes of the configuration, by dotted key.
    """
    regrets: list[float] = []
    meter = AfterUpdates(lambda policy: regrets.append(aim.regret(policy.logprobs())))
    config = toy_config(language, folder, changes)
    trainer, aim = table_trainer(language, config, [meter]), language
    if config.ppo.score_norm == "frozen":
        trainer.freeze_norms()
        moments = trainer.state.score_moments
        aim = replace(language, scores=(language.scores - moments.mean) / moments.var**0.5)
    end_if_interrupted(trainer.fit())
    return Course(config.train.rollout_batch_size, regrets)
