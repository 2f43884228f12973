"""Every key of a run, with its default. The strings under the fields are the command line's help and the docs table.

This package imports neither torch nor transformers: a mistake in a configuration is found in well under a second.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tether.config.base import Section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class LoraConfig(Section):
    """A LoRA adapter, in the words of PEFT."""

    r: PositiveInt = 16
    """Rank of the update."""
    alpha: PositiveFloat = 32
    """Scale: the update is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the adapter's input. PPO runs with all dropout off, so this is only written into the saved adapter."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: ``all-linear``, a regular expression, or a list of names."""

    @field_validator("target_modules")
    @classmethod
    def _compiles(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"{targets!r} is no regular expression: {error}") from error
        elif not targets:
            raise ValueError("an empty list names no module; wanted all-linear, a regular expression, or names")
        return targets


class ModelConfig(Section):
    """The policy."""

    path: str
    """Hub id or folder of the fine-tuned model to start from: a full model or a PEFT adapter."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 for full fine-tuning; with LoRA the frozen base is bfloat16 where bf16
    arithmetic is on, and the adapters are float32. Training weights that are bfloat16 themselves loses most small
    updates to rounding."""
    attn_implementation: str | None = None
    """Attention kernel as transformers names it; the model's default if left out."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter instead of all weights; ``lora: {}`` takes the defaults."""


class ValueConfig(Section):
    """The critic."""

    kind: Literal["adapter", "model", "head"] | None = None
    """``adapter``: a second adapter with its own head on the policy's base. ``model``: a separate model. ``head``: a
    head on the policy itself. Left out: adapter with LoRA, model otherwise."""
    init: str | None = None
    """Where the critic starts: ``reward`` (the reward model or reward adapter), ``policy``, or the path of a sequence
    classifier (kind model) or of a reward adapter (kind adapter). Left out: reward where the first reward source can be
    copied, policy otherwise. A head that starts from the policy starts at zero."""
    learning_rate: PositiveFloat | None = None
    """Learning rate of the critic; the policy's if left out. Not for kind head, which shares the policy's optimizer."""
    detach: bool = False
    """Kind head only: keep the value loss out of the policy's weights."""


class _Reward(Section):
    weight: float = 1.0
    """Factor of this source in the sum."""
    name: str | None = None
    """Name in metrics and samples; must be unique."""


class ModelReward(_Reward):
    """A sequence classifier with one label."""

    type: Literal["model"]
    """``model``: a sequence classifier with one label."""
    path: str
    """Hub id or folder of the sequence classifier, or of a PEFT adapter of one (loaded on its own base)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; ``auto``: as saved."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward."""
    max_length: PositiveInt | None = None
    """Longest prompt plus answer in the reward model's tokens. Longer ones are an error. Left out: its limit."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class AdapterReward(_Reward):
    """A reward adapter on the policy's own base."""

    type: Literal["adapter"]
    """``adapter``: a LoRA reward adapter with its head, on the policy's own base model."""
    path: str
    """Folder of the PEFT adapter, trained as a sequence classifier with one label on the policy's base."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward."""


class FunctionReward(_Reward):
    """A Python function."""

    type: Literal["function"]
    """``function``: ``f(prompts, completions, **columns) -> list[float]``."""
    path: str
    """File that holds the function (``my_rewards.py``) or an import path (``package.module``)."""
    name: str
    """Name of the function; also its name in metrics and samples."""


RewardConfig = Annotated[ModelReward | AdapterReward | FunctionReward, Field(discriminator="type")]


class DataConfig(Section):
    """The prompts."""

    prompts: str
    """Prompts to train on: a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, or a hub id. A column
    ``prompt`` (or ``messages``) holds text or chat messages; other columns reach the reward functions."""
    eval_prompts: str | None = None
    """Held-out prompts, in the same forms."""
    split: str = "train"
    """Split that is read where the source has several, for ``prompts``."""
    eval_split: str = "train"
    """The same for ``eval_prompts``; left alone where the source has one split only."""
    max_prompt_length: PositiveInt = 512
    """Longest query in tokens, chat template included. Longer prompts are dropped and counted."""
    chat_template: Literal["auto", "none"] = "auto"
    """``auto``: text for a tokenizer that has a chat template becomes a user turn. ``none``: text is taken as it is."""
    system_prompt: str | None = None
    """System message put before prompts that bring none; needs a chat template."""


class SamplingConfig(Section):
    """How answers are drawn."""

    response_length: PositiveInt = 53
    """Most tokens of an answer, its end token included."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and of every log-probability."""
    stop_token: str | None = "eos"
    """``eos``: every end token of the model's generation config and tokenizer. Another string: that one token ends an
    answer. null: only the length ends it."""
    batch_size: PositiveInt = 64
    """Answers decoded side by side; the answers do not depend on it beyond rounding."""


class PPOConfig(Section):
    """The algorithm."""

    kl_coef: NonNegativeFloat = 0.05
    """Coefficient of the KL penalty in the reward. 0 runs no reference forward."""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """Estimator of the KL in the reward. k1 gives the exact gradient of the sequence KL; k3 is biased there."""
    kl_target: PositiveFloat | None = None
    """Adaptive coefficient: nats a sequence that ``kl_coef`` is steered towards; left out: ``kl_coef`` stays fixed."""
    kl_horizon: PositiveInt = 10_000
    """Episodes over which the adaptive coefficient reacts."""
    num_ppo_epochs: PositiveInt = 4
    """Passes over each rollout batch."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps in one pass."""
    cliprange: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Policy ratio is clipped to [1 − cliprange, 1 + cliprange]."""
    cliprange_value: PositiveFloat | None = 0.2
    """New values are clipped to within this of the old ones; null turns it off."""
    vf_coef: PositiveFloat = 0.1
    """Weight of the value loss where policy and critic share an optimizer (``value.kind: head``); other critics have an
    optimizer of their own."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount a token."""
    lam: Fraction = 0.95
    """λ of generalized advantage estimation. Use 1 for answers much longer than 128 tokens."""
    whiten_rewards: bool = False
    """Scale token rewards to unit variance over the rollout batch, mean kept. Changes the objective."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the rollout batch."""
    missing_eos_penalty: NonNegativeFloat | None = None
    """Subtracted from the score of an answer that did not end by itself."""
    missing_eos_score: float | None = None
    """Replaces the score of an answer that did not end by itself."""

    @model_validator(mode="after")
    def _one_eos_rule(self) -> PPOConfig:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError(
                f"missing_eos_penalty ({self.missing_eos_penalty}) subtracts and missing_eos_score "
                f"({self.missing_eos_score}) replaces: set one of them"
            )
        return self


class TrainConfig(Section):
    """Batches, optimizer, evaluation, saving."""

    total_episodes: PositiveInt | None = None
    """Answers to train on. Set exactly one of total_episodes, num_train_epochs and max_steps."""
    num_train_epochs: PositiveFloat | None = None
    """Passes over the prompts."""
    max_steps: PositiveInt | None = None
    """Updates, one rollout batch each."""
    rollout_batch_size: PositiveInt = 64
    """Answers an update."""
    micro_batch_size: PositiveInt = 8
    """Answers in one forward and backward pass."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the policy. Left out: 5e-5 with LoRA, 3e-6 otherwise."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Schedule of the learning rate over the optimizer steps, as transformers names it."""
    warmup_ratio: Fraction = 0.0
    """Share of the optimizer steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW β₁."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """AdamW β₂."""
    adam_epsilon: PositiveFloat = 1e-5
    """AdamW ε."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradient norm of each role is clipped to it; null turns clipping off."""
    bf16: bool | None = None
    """bfloat16 autocast of all forwards. Left out: on where the hardware has it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the update to save memory; never on while answers are generated."""
    seed: int = 42
    """Seed of sampling, data order and initialisation."""
    logging_steps: PositiveInt = 1
    """Updates between two entries in the trackers and callbacks; metrics.jsonl has every update."""
    log_samples: NonNegativeInt = 8
    """Training answers an update that are written to samples.jsonl."""
    eval_steps: PositiveInt | None = None
    """Updates between two evaluations on ``data.eval_prompts``. Left out: only before the first and after the last."""
    save_steps: PositiveInt | None = None
    """Updates between two checkpoints; left out: only the final model is saved."""
    save_total_limit: PositiveInt | None = None
    """Checkpoints that are kept: the newest, and always the best one."""
    metric_for_best_model: str | None = None
    """Evaluation metric that the best checkpoint is kept by, ``eval_scores`` for example. Each evaluation that is the
    best so far saves a checkpoint."""
    greater_is_better: bool = True
    """Whether a larger ``metric_for_best_model`` is better."""
    load_best_model_at_end: bool = False
    """Put the best checkpoint at the root of ``output_dir`` instead of the last policy."""
    report_to: str | list[str] = "none"
    """Accelerate trackers to log to: none, all, tensorboard, wandb, trackio, …"""
    run_name: str | None = None
    """Name of the run in the trackers; ``output_dir`` if left out."""
    max_runtime: PositiveFloat | None = None
    """Hours after which the run saves its state and ends with exit code 130."""

    @model_validator(mode="after")
    def _cross_checks(self) -> TrainConfig:
        lengths = {k: getattr(self, k) for k in ("total_episodes", "num_train_epochs", "max_steps")}
        given = {k: v for k, v in lengths.items() if v is not None}
        if len(given) != 1:
            got = ", ".join(f"{k}={v}" for k, v in given.items()) or "none of them"
            raise ValueError(f"set exactly one of total_episodes, num_train_epochs and max_steps; got {got}")
        if self.rollout_batch_size % self.micro_batch_size:
            raise ValueError(
                _divide("micro_batch_size", self.micro_batch_size, "rollout_batch_size", self.rollout_batch_size)
            )
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            raise ValueError("load_best_model_at_end needs metric_for_best_model, eval_scores for example")
        return self


class RunConfig(Section):
    """One PPO run."""

    model: ModelConfig
    """The policy."""
    value: ValueConfig = ValueConfig()
    """The critic."""
    rewards: list[RewardConfig] = Field(min_length=1)
    """Judges of answers; the score is their weighted sum."""
    data: DataConfig
    """The prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """How answers are drawn."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    train: TrainConfig
    """Batches, optimizer, evaluation, saving."""
    output_dir: Path
    """Folder for the trained policy and everything else that the run writes."""
    overwrite_output_dir: bool = False
    """Start anew in a folder that holds an earlier run, whose files are then replaced."""
    resume: bool | str = False
    """true: go on from the newest complete checkpoint in ``output_dir``; a path: from that checkpoint."""

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward sources in metrics and samples, unique."""
        return [reward.name or (reward.type if len(self.rewards) == 1 else f"{reward.type}_{i}")
                for i, reward in enumerate(self.rewards)]

    @property
    def value_kind(self) -> Literal["adapter", "model", "head"]:
        """The critic's kind, the default resolved."""
        return self.value.kind or ("adapter" if self.model.lora else "model")

    @property
    def learning_rate(self) -> float:
        """The policy's peak learning rate, the default resolved."""
        return self.train.learning_rate or (5e-5 if self.model.lora else 3e-6)

    def resolved(self, *, bf16: bool) -> RunConfig:
        """The same run with every default filled in that depends on other keys or on the machine.

        Args:
            bf16: whether the machine has bfloat16 arithmetic; used where ``train.bf16`` is left out.
        """
        value = self.value.model_copy(update={"kind": self.value_kind})
        filled = {"learning_rate": self.learning_rate, "bf16": bf16 if self.train.bf16 is None else self.train.bf16}
        return self.model_copy(update={"value": value, "train": self.train.model_copy(update=filled)})

    @property
    def mini_batch_size(self) -> int:
        """Answers an optimizer step."""
        return self.train.rollout_batch_size // self.ppo.num_mini_batches

    def num_updates(self, num_prompts: int) -> int:
        """Updates that the run makes over ``num_prompts`` usable prompts; every prompt is seen in each epoch."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        episodes = self.train.total_episodes or self.train.num_train_epochs * num_prompts
        return math.ceil(episodes / self.train.rollout_batch_size)

    @model_validator(mode="after")
    def _check_batches(self) -> RunConfig:
        rollout, minis, micro = self.train.rollout_batch_size, self.ppo.num_mini_batches, self.train.micro_batch_size
        if rollout % minis:
            raise ValueError(_divide("ppo.num_mini_batches", minis, "train.rollout_batch_size", rollout))
        if self.mini_batch_size % micro:
            raise ValueError(_divide("train.micro_batch_size", micro, "the mini-batch size", self.mini_batch_size))
        horizon = self.ppo.kl_horizon
        if self.ppo.kl_target is not None and 5 * horizon <= rollout:
            raise ValueError(
                f"ppo.kl_horizon {horizon} is too short for train.rollout_batch_size {rollout}: one update could take "
                f"all of kl_coef away. Set it to at least {rollout // 5 + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_sharing(self) -> RunConfig:
        kind, value = self.value_kind, self.value
        if kind == "adapter" and self.model.lora is None:
            raise ValueError(
                "value.kind adapter needs model.lora: add `lora: {}` under model, or set value.kind to model or head"
            )
        if kind == "head" and value.learning_rate is not None:
            raise ValueError(
                "value.learning_rate: kind head shares the policy's optimizer; set value.kind to model or adapter, or "
                "leave it out"
            )
        if kind == "head" and value.init not in (None, "policy"):
            raise ValueError(
                f"value.init {value.init}: kind head starts from the policy; set value.kind to model or adapter"
            )
        if value.detach and kind != "head":
            raise ValueError(f"value.detach is for value.kind head; kind {kind} never touches the policy's weights")
        if len(set(self.reward_names)) != len(self.reward_names):
            raise ValueError(f"rewards: names must be unique, got {', '.join(self.reward_names)}")
        if any(reward.type == "adapter" for reward in self.rewards) and self.model.lora is None:
            raise ValueError(
                "rewards: type adapter shares the policy's base, which full fine-tuning changes: add `lora: {}` under "
                "model, or use type model"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        metric = self.train.metric_for_best_model
        asked = {"eval_steps": self.train.eval_steps, "metric_for_best_model": metric}
        without = next((key for key, value in asked.items() if value is not None), None)
        if without is not None and self.data.eval_prompts is None:
            raise ValueError(f"train.{without} needs data.eval_prompts")
        known = ["eval_scores", "eval_length", "eval_eos_rate", *(f"eval_rewards/{name}" for name in self.reward_names)]
        known += ["eval_kl"] if self.ppo.kl_coef > 0 else []
        if metric is not None and metric not in known:
            raise ValueError(f"train.metric_for_best_model: got {metric}, wanted one of {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> RunConfig:
        rule = self.ppo.missing_eos_penalty or self.ppo.missing_eos_score
        if rule is not None and self.sampling.stop_token is None:
            raise ValueError("ppo.missing_eos_*: with sampling.stop_token null no answer ends; set stop_token to eos")
        return self


def _divide(small: str, value: int, large: str, total: int) -> str:
    """Says that ``value`` must divide ``total``, with the nearest values that do."""
    around = range(max(1, value - 4096), min(total, value + 4096) + 1)
    fits = [d for d in around if total % d == 0] or [1, total]
    near = sorted(sorted(fits, key=lambda d: abs(d - value))[:2])
    return f"{small} {value} must divide {large} {total}: try {' or '.join(map(str, near))}"
