"""Keys that the stages before PPO share: ``tether sft`` and ``tether reward``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tether.config.base import (
    LARGEST_DEFAULT,
    Fraction,
    HeldOut,
    OutputDir,
    Section,
    Seed,
    check_precision,
    check_warmup,
    divisors,
)
from tether.config.chat import DataKeys
from tether.config.keys import counted
from tether.config.model import ModelConfig, check_weights


class StageTrainConfig(Section):
    """Batches, optimizer, evaluation, saving."""

    num_train_epochs: PositiveFloat | None = None
    """Passes over the data. Default: 1, unless max_steps is set."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps, instead of num_train_epochs."""
    batch_size: PositiveInt = 16
    """Rows per optimizer step, of all processes together."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass of a process; fewer if all processes together would read more than
    batch_size, which it must divide. Default: the largest number up to 8 that fits batch_size and the processes."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Default: 1e-4 with LoRA, 1e-5 otherwise."""
    lr_scheduler_type: str = "linear"
    """Any schedule of transformers that needs no further arguments: linear, cosine, constant, …"""
    warmup_ratio: Fraction = 0.0
    """Share of the optimizer steps over which the learning rate rises from 0."""
    warmup_steps: PositiveInt | None = None
    """Number of optimizer steps over which the learning rate rises from 0, instead of warmup_ratio."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum gradient norm; null turns clipping off."""
    bf16: bool | None = None
    """Run all forward passes under bfloat16 autocast. Default: on if the hardware is faster that way and ``fp16`` is
    off, or if ``mixed_precision`` of ``accelerate launch`` is bf16."""
    fp16: bool = False
    """Run all forward passes under float16 autocast with scaled losses, for accelerators without bfloat16 (V100, T4).
    Also on if ``mixed_precision`` of ``accelerate launch`` is fp16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    seed: Seed = 42
    """Seed of new weights, the held-out share and the data order."""
    eval_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations on held-out rows. Default: only after the last step."""
    save_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints. Default: a checkpoint is saved only if a signal stops the run."""
    save_total_limit: PositiveInt | None = 1
    """Number of checkpoints to keep: the newest ones, and always the best one; null keeps all."""
    metric_for_best_model: str | None = None
    """Evaluation metric that decides which checkpoint is the best, for example ``eval_loss``. Each evaluation that is
    the best so far saves a checkpoint. Needs ``eval_steps``."""
    greater_is_better: bool | None = None
    """Whether a larger ``metric_for_best_model`` is better. Default: false for ``eval_loss``, true otherwise."""
    load_best_model_at_end: bool = False
    """At the end, put the best checkpoint at the root of ``output_dir`` instead of the last model."""
    early_stopping_patience: PositiveInt | None = None
    """End the run after this many evaluations in a row without a better ``metric_for_best_model``. Default: never."""
    report_to: str | list[str] = "none"
    """Trackers of Accelerate to log to: none, all, tensorboard, wandb, trackio, … A tracker's project comes from the
    environment (``WANDB_PROJECT``, …); default: tether."""
    run_name: str | None = None
    """Name of the run in the trackers. Default: the name of ``output_dir``."""
    ddp_timeout: PositiveInt = 1800
    """Seconds that the processes of a run wait for each other before the run ends."""

    @property
    def is_greater_better(self) -> bool:
        """Whether a larger ``metric_for_best_model`` is better, the default resolved."""
        return self.metric_for_best_model != "eval_loss" if self.greater_is_better is None else self.greater_is_better

    def rows_at_once(self, num_processes: int) -> int:
        """Rows in one forward and backward pass of each of so many processes.

        Raises:
            ValueError: an optimizer step cannot be divided into such passes.
        """
        if self.micro_batch_size is None:
            if self.batch_size % num_processes:
                raise ValueError(
                    f"train.batch_size: got {self.batch_size}, wanted a multiple of {num_processes}, the number of "
                    "processes"
                )
            return divisors(self.batch_size // num_processes, most=LARGEST_DEFAULT)[0]
        rows = min(self.micro_batch_size, self.batch_size // num_processes)
        if rows == 0 or self.batch_size % (rows * num_processes):
            least = max(rows, 1) * num_processes
            raise ValueError(
                f"train.batch_size: got {self.batch_size}, wanted a multiple of {least} ("
                f"{counted(max(rows, 1), 'row')} at once in each of {counted(num_processes, 'process')}; "
                f"train.micro_batch_size is {self.micro_batch_size})"
            )
        return rows

    @model_validator(mode="after")
    def _cross_checks(self) -> StageTrainConfig:
        check_precision(self.bf16, self.fp16)
        check_warmup(self.warmup_ratio, self.warmup_steps)
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} must divide batch_size {self.batch_size}: "
                f"set batch_size to {self.micro_batch_size * max(1, self.batch_size // self.micro_batch_size)}"
            )
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ValueError(
                f"max_steps ({self.max_steps}) and num_train_epochs ({self.num_train_epochs}) both say how long the "
                "run is: set one of them"
            )
        if self.metric_for_best_model is None:
            for key in ("load_best_model_at_end", "early_stopping_patience"):
                if getattr(self, key):
                    raise ValueError(f"{key} needs metric_for_best_model, for example eval_loss")
            if self.greater_is_better is not None:
                raise ValueError(
                    f"greater_is_better {str(self.greater_is_better).lower()}: no evaluation is compared: set "
                    "metric_for_best_model, or leave greater_is_better out"
                )
        return self


class StageConfig(Section):
    """One run of a stage before PPO."""

    REFUSED: ClassVar[tuple[str, ...]] = ("model.freeze_layers", "model.quantization")
    ROWS: ClassVar[str]
    """Key of the rows to train on."""
    EVALUATED: ClassVar[tuple[str, ...]]
    """Names of the metrics of every evaluation that tell better models from worse ones."""

    model: ModelConfig
    """The model to train."""
    train: StageTrainConfig = StageTrainConfig()
    """Batches, optimizer, evaluation, saving."""
    output_dir: OutputDir
    """Folder for the trained model and everything else that the run writes."""
    overwrite_output_dir: bool = False
    """Start again in a folder that holds an earlier run, and replace its files."""
    resume: bool | str = False
    """true: continue from the newest complete checkpoint in ``output_dir``; a path: from that checkpoint; auto: as
    true, but start if no step was recorded yet, and train nothing if the run is finished, for launchers that restart a
    run by themselves."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, the default resolved."""
        return self.train.learning_rate or (1e-4 if self.model.lora else 1e-5)

    @model_validator(mode="after")
    def _check_weights(self) -> StageConfig:
        check_weights(self.model, fp16=self.train.fp16)
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> StageConfig:
        train, metric = self.train, self.train.metric_for_best_model
        asked = {"eval_steps": train.eval_steps, "metric_for_best_model": metric}
        without = next((key for key, value in asked.items() if value is not None), None)
        if without is not None and not self.data.has_eval:
            raise ValueError(f"train.{without} needs data.eval_{self.ROWS} or data.eval_fraction")
        if metric is not None and metric not in self.EVALUATED:
            raise ValueError(f"train.metric_for_best_model: got {metric}, wanted one of {', '.join(self.EVALUATED)}")
        if metric is not None and train.eval_steps is None:
            raise ValueError(
                f"train.metric_for_best_model {metric} needs train.eval_steps: without it, only the last model is "
                "evaluated"
            )
        return self

    @model_validator(mode="after")
    def _no_keys_of_ppo(self) -> StageConfig:
        for key in self.REFUSED:
            if value := getattr(self.model, key.removeprefix("model.")):
                raise ValueError(
                    f"{key} {value} is for `tether ppo` (in a pipeline: ppo.{key}); leave it out here, or "
                    "train fewer weights with model.lora"
                )
        return self


def held_out_fraction(fraction: HeldOut | None, others: object, *, default: float) -> float:
    """The share of a dataset that is held out.

    Args:
        fraction: the configured share.
        others: the held-out dataset that is named instead.
        default: the share if neither is set.
    """
    if fraction is not None:
        return fraction
    return 0.0 if others else default


def check_held_out(data: DataKeys, source: str) -> None:
    """Raises ``ValueError`` if a share and a dataset are both to be held out, or a part of a dataset that is not named.

    Args:
        source: the key of what is trained on; that of what is held out begins with ``eval_``.
    """
    key = f"eval_{source}"
    others, fraction = (getattr(data, name) for name in (key, "eval_fraction"))
    if others is not None and fraction is not None:
        raise ValueError(
            f"{key} ({others}) and eval_fraction ({fraction}) both name what is held out: set one of them"
        )
    for part in ("eval_split", "eval_subset", "eval_revision"):
        value, default = getattr(data, part), type(data).model_fields[part].default
        if others is None and value != default:
            raise ValueError(
                f"{part} {value}: {key} is not set, so this has no effect. Set {key} (the source of {source} "
                f"again, for another part of it), or leave {part} out"
            )
