"""TRL's PPO configuration: its names and defaults, and what each means for a run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from transformers import TrainingArguments, integrations
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_bf16_gpu_available

from tether.compat.table import ADAMW, ADAMW_8BIT
from tether.compat.trl.former import OF_CONFIG, telling
from tether.config import launched
from tether.config.load import checked_config
from tether.config.schema import RunConfig, without_idle
from tether.errors import ConfigError
from tether.machine.deepspeed import load_whole
from tether.machine.distributed import Dist
from tether.models.bitsandbytes import check_bitsandbytes
from tether.models.compiled import check_compile
from tether.models.device import bf16_supported, default_device
from tether.train.inputs import OF_SCRIPT

REFUSED = {
    "optim_args": "the optimizer is AdamW: use learning_rate, weight_decay and adam_*, or pass `optimizers`",
    "optim_target_modules": "the optimizer is AdamW over all that trains",
    "label_smoothing_factor": "PPO has no labels",
    "neftune_noise_alpha": "noise on the embeddings would change the ratio",
    "use_liger_kernel": "forward passes run as they are",
    "auto_find_batch_size": "set per_device_train_batch_size instead",
    "deepspeed": "the launcher sets it: accelerate launch --use_deepspeed --deepspeed_config_file FILE script.py",
    "fsdp": "the launcher sets it: accelerate launch --config_file examples/accelerate/fsdp2.yaml script.py",
    "parallelism_config": "answers are divided over processes, and nothing else is",
}
"""Arguments of ``TrainingArguments`` that must keep their defaults, and why."""
INERT = frozenset({
    "accelerator_config", "activation_checkpointing_kwargs", "average_tokens_across_devices", "batch_eval_metrics",
    "bf16_full_eval", "data_seed", "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "dataset_num_proc", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
    "ddp_static_graph", "debug", "do_eval", "do_predict", "do_train",
    "enable_jit_checkpoint", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start",
    "eval_use_gather_object", "exp_name", "fp16_full_eval", "fsdp_config", "full_determinism",
    "gradient_checkpointing_kwargs", "hub_always_push", "ignore_data_skip", "include_for_metrics",
    "include_num_input_tokens_seen", "label_names",
    "length_column_name", "liger_kernel_config", "local_rank", "log_level", "log_level_replica",
    "log_on_each_node", "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy",
    "prediction_loss_only", "remove_unused_columns", "restore_callback_states_from_checkpoint", "save_on_each_node",
    "save_only_model", "skip_memory_metrics", "tf32", "torch_compile_backend", "torch_compile_mode",
    "torch_empty_cache_steps", "train_sampling_strategy", "use_cache",
})  # fmt: skip
"""Arguments that the trainer does not read, among those that TRL's PPO reads at all; the trainer names those that are
set."""
DERIVED = frozenset({
    "world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size", "local_mini_batch_size",
    "mini_batch_size",
})  # fmt: skip
"""Arguments that the trainer fills in."""
OPTIMIZERS = {
    theirs: ours for theirs, ours in (ADAMW | ADAMW_8BIT).items() if theirs in {name.value for name in OptimizerNames}
}
"""``train.optim`` by ``optim``, for the optimizers of the installed transformers."""
CHOICES = {
    "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy, "lr_scheduler_type": SchedulerType, "optim": OptimizerNames,
}  # fmt: skip
"""Arguments that take one of several names."""
TRACKERS: dict[str, tuple[Callable[[], bool], str]] = {
    "azure_ml": (integrations.is_azureml_available, "azureml-sdk"),
    "clearml": (integrations.is_clearml_available, "clearml"),
    "codecarbon": (integrations.is_codecarbon_available, "codecarbon"),
    "comet_ml": (integrations.is_comet_available, "comet-ml"),
    "dagshub": (integrations.is_dagshub_available, "dagshub mlflow"),
    "dvclive": (integrations.is_dvclive_available, "dvclive"),
    "flyte": (integrations.is_flytekit_available, "flytekit"),
    "mlflow": (integrations.is_mlflow_available, "mlflow"),
    "neptune": (integrations.is_neptune_available, "neptune"),
    "swanlab": (integrations.is_swanlab_available, "swanlab"),
    "tensorboard": (integrations.is_tensorboard_available, "tensorboard"),
    "trackio": (integrations.is_trackio_available, "trackio"),
    "wandb": (integrations.is_wandb_available, "wandb"),
}
"""Trackers of transformers that need a package: whether it is there, and what to install."""
WANTED = {int: "a whole number", float: "a number", bool: "True or False"}
"""What an argument takes that is declared as one of these types, for messages."""


@dataclass
class PPOConfig(TrainingArguments):
    """TRL 1.12's arguments of PPO with their defaults, as ``transformers.HfArgumentParser`` takes them.

    docs/from_trl.md lists where a run differs.
    """

    # From TrainingArguments, with TRL's defaults.
    learning_rate: float = field(default=3e-6, metadata={"help": "Peak learning rate of policy and critic."})
    logging_steps: float = field(default=10, metadata={"help": "Not read: every update is logged."})
    gradient_checkpointing: bool | None = field(
        default=True, metadata={"help": "Recompute activations in the update to save memory."}
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 autocast of all forward passes. Default: on if the GPU supports it."}
    )
    lr_scheduler_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Further arguments of the schedule, as a JSON object."}
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Push the policy to the hub."})

    # The run.
    exp_name: str = field(default="ppo_config", metadata={"help": "Not read: run_name names the run."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes of the script's dataset.map."})
    total_episodes: int | None = field(
        default=None, metadata={"help": "Answers to train on. Default: num_train_epochs passes over the dataset."}
    )
    num_mini_batches: int = field(default=1, metadata={"help": "Optimizer steps in one pass over a rollout batch."})
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Answers decoded and scored in one batch."}
    )
    num_sample_generations: int = field(
        default=10, metadata={"help": "Number of times that a few held-out answers are shown; 0: never."}
    )
    response_length: int = field(default=53, metadata={"help": "Maximum number of tokens in an answer."})
    stop_token: Literal["eos"] | None = field(
        default=None, metadata={"help": "`eos`: the tokenizer's end token ends an answer. Default: only the length."}
    )
    stop_token_id: int | None = field(
        default=None, metadata={"help": "Id of the token that ends an answer, instead of stop_token."}
    )
    temperature: float = field(default=0.7, metadata={"help": "Temperature of sampling and of log-probabilities."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of an answer without an end token."}
    )

    # The models.
    sft_model_path: str = field(default="EleutherAI/pythia-160m", metadata={"help": "For scripts: the policy."})
    reward_model_path: str = field(
        default="EleutherAI/pythia-160m", metadata={"help": "For scripts: the reward model."}
    )
    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Adapter of a PEFT model to train. Default: the active adapter."}
    )
    ref_adapter_name: str | None = field(
        default=None, metadata={"help": "Adapter of a PEFT model that is the reference. Default: the start policy."}
    )
    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "Gather weights sharded by ZeRO-3 or FSDP2 to generate a batch of answers."}
    )

    # The algorithm.
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout batch."})
    whiten_rewards: bool = field(default=False, metadata={"help": "Scale token rewards to unit variance."})
    kl_coef: float = field(default=0.05, metadata={"help": "Coefficient of the KL penalty; 0: no reference."})
    kl_estimator: Literal["k1", "k3"] = field(default="k1", metadata={"help": "Estimator of the KL."})
    cliprange: float = field(default=0.2, metadata={"help": "The ratio is clipped to 1 ± cliprange."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss in an optimizer of both models."})
    cliprange_value: float = field(default=0.2, metadata={"help": "New values are clipped to old ± cliprange_value."})
    gamma: float = field(default=1.0, metadata={"help": "Discount per token."})
    lam: float = field(default=0.95, metadata={"help": "λ of generalized advantage estimation."})

    # Filled in by the trainer.
    world_size: int | None = field(default=None, metadata={"help": "Filled in: number of processes."})
    num_total_batches: int | None = field(default=None, metadata={"help": "Filled in: number of updates."})
    micro_batch_size: int | None = field(
        default=None, metadata={"help": "Filled in: answers per forward pass, all devices."}
    )
    local_batch_size: int | None = field(default=None, metadata={"help": "Filled in: answers per update, one device."})
    batch_size: int | None = field(default=None, metadata={"help": "Filled in: answers per update."})
    local_mini_batch_size: int | None = field(
        default=None, metadata={"help": "Filled in: answers per optimizer step, one device."}
    )
    mini_batch_size: int | None = field(default=None, metadata={"help": "Filled in: answers per optimizer step."})

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        self.set_arguments = {f.name for f in fields(self) if getattr(self, f.name) != _default(f)}
        self.fp16 = self.fp16 or (launched.mixed_precision() == "fp16" and not self.bf16)
        if self.bf16 is None:
            self.bf16 = (not self.fp16 and not self.use_cpu and _has_bf16()) or launched.mixed_precision() == "bf16"
        if getattr(self, "activation_checkpointing", False) is None:  # newer name of the same setting
            self.activation_checkpointing = self.gradient_checkpointing
        if launched.num_processes() > 1 or launched.uses_deepspeed():
            Dist(self.ddp_timeout)  # before TrainingArguments sets up the process group in its own way
        compiles = self.torch_compile or bool(self.torch_compile_backend or self.torch_compile_mode)
        # TrainingArguments would have Accelerate compile whole models; here train.compile compiles their layers.
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None
        super().__post_init__()
        self.torch_compile = compiles
        check_trackers(self)  # scripts load models next
        load_whole()


def _has_bf16() -> bool:
    """Whether there is an accelerator with native bfloat16; torch also counts CUDA devices that emulate it."""
    return bf16_supported("cuda") if torch.cuda.is_available() else is_torch_bf16_gpu_available()


PPOConfig.__init__ = telling(OF_CONFIG, "PPOConfig")(PPOConfig.__init__)


def _default(argument: Any) -> Any:
    """The default of a dataclass field."""
    return argument.default if not callable(argument.default_factory) else argument.default_factory()


@cache
def _kinds() -> dict[str, type]:
    """The arguments that take one kind of number or truth value, and which; what reads the others checks them."""
    of_all = {name: set(get_args(hint) or [hint]) - {type(None)} for name, hint in get_type_hints(PPOConfig).items()}
    return {name: kind for name, kinds in of_all.items() for kind in kinds if len(kinds) == 1 and kind in WANTED}


def make_numbers_plain(args: PPOConfig) -> None:
    """Makes numbers and truth values of other packages, NumPy's for example, Python's own, which JSON takes.

    Raises:
        ConfigError: an argument is a text, or otherwise of another kind than it takes.
    """
    for name, kind in _kinds().items():
        value = getattr(args, name)
        if value is None:
            continue
        plain = _plain(value, kind)
        if plain is None:
            raise ConfigError(f"PPOConfig.{name}: got {value!r}, wanted {WANTED[kind]}")
        setattr(args, name, plain)


def _plain(value: Any, kind: type) -> int | float | bool | None:
    """The value as Python's own; None if it is not of this kind. 0 and 1 are truth values too."""
    is_truth_value = isinstance(value, (bool, np.bool_))
    if kind is bool:
        return bool(value) if is_truth_value or (isinstance(value, Integral) and value in (0, 1)) else None
    if is_truth_value:
        return None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if kind is float and isinstance(value, Real) else None


def make_choices_plain(args: PPOConfig) -> None:
    """Makes names of choices the choices themselves, as ``TrainingArguments`` does when it is made.

    Raises:
        ConfigError: there is no choice of this name.
    """
    for name, choices in CHOICES.items():
        value = getattr(args, name)
        try:
            setattr(args, name, choices(value))
        except ValueError as error:
            names = ", ".join(choice.value for choice in choices)
            raise ConfigError(f"PPOConfig.{name}: got {value!r}, wanted one of {names}") from error


def check_trackers(args: PPOConfig) -> None:
    """Raises ``ConfigError`` for a tracker whose package is not installed."""
    names = [args.report_to] if isinstance(args.report_to, str) else args.report_to
    for name in names:
        is_available, packages = TRACKERS.get(name, (lambda: True, ""))
        if not is_available():
            raise ConfigError(
                f"PPOConfig.report_to: {name} is not installed: pip install {packages}, or set report_to to none"
            )


def check_arguments(args: PPOConfig) -> None:
    """Raises ``ConfigError`` for arguments that a run here cannot honor, and for mutually exclusive ones."""
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"PPOConfig.{name} {getattr(args, name)!r}: {why}; remove it")
    make_numbers_plain(args)  # a script may have set them after it made the object
    make_choices_plain(args)
    check_trackers(args)
    if str(args.optim.value) not in OPTIMIZERS:
        raise ConfigError(
            f"PPOConfig.optim {args.optim.value}: wanted one of {', '.join(OPTIMIZERS)}; pass another as "
            "`optimizers`"
        )
    if OPTIMIZERS[args.optim.value] == "adamw_8bit":
        check_bitsandbytes(args.optim.value, "PPOConfig.optim", default_device())
    if args.torch_compile:
        check_compile("PPOConfig.torch_compile", default_device())
    if args.stop_token is not None and args.stop_token_id is not None:
        raise ConfigError(
            f"PPOConfig: got stop_token {args.stop_token} and stop_token_id {args.stop_token_id}; set one of them"
        )
    if args.stop_token not in (None, "eos"):
        raise ConfigError(f"PPOConfig.stop_token: got {args.stop_token!r}, wanted eos or None; or set stop_token_id")
    if args.kl_estimator not in ("k1", "k3"):
        raise ConfigError(f"PPOConfig.kl_estimator: got {args.kl_estimator!r}, wanted k1 or k3")
    if args.vf_coef < 0:
        raise ConfigError(f"PPOConfig.vf_coef: got {args.vf_coef}, wanted 0 or more, which weighs the value loss")
    if args.missing_eos_penalty is not None and args.missing_eos_penalty < 0:
        raise ConfigError(
            f"PPOConfig.missing_eos_penalty: got {args.missing_eos_penalty}, wanted 0 or more, which is subtracted "
            "from the score"
        )
    if args.max_steps > 0 and args.total_episodes is not None:
        raise ConfigError(
            f"PPOConfig: got max_steps {args.max_steps} and total_episodes {args.total_episodes}, which both set "
            "the length of the run; set one of them"
        )
    if args.save_strategy.value == "best" and args.metric_for_best_model is None:
        raise ConfigError("PPOConfig.save_strategy best needs metric_for_best_model, eval_scores for example")
    if args.hub_strategy.value not in ("end", "every_save"):
        raise ConfigError(f"PPOConfig.hub_strategy: got {args.hub_strategy.value}, wanted end or every_save")


def check_evaluation(args: PPOConfig, *, has_data: bool) -> list[str]:
    """What the arguments request of evaluations that will not take place, one line each.

    Args:
        has_data: whether there is an ``eval_dataset``.

    Raises:
        ConfigError: the best checkpoint is to be chosen by something that no evaluation measures.
    """
    strategy, metric = args.eval_strategy.value, args.metric_for_best_model
    if has_data and strategy != "no":
        return []
    if metric is not None:
        raise ConfigError(
            f"PPOConfig.metric_for_best_model: got {metric}, but nothing is evaluated: eval_strategy is {strategy} and "
            f"there is {'an' if has_data else 'no'} eval_dataset. Set eval_strategy to steps or epoch and give "
            "PPOTrainer an eval_dataset, or remove metric_for_best_model and load_best_model_at_end"
        )
    told = f"PPOConfig.eval_strategy: got {strategy}, but nothing is evaluated without an eval_dataset"
    return [told] if strategy != "no" else []


def derive(args: PPOConfig, num_prompts: int, num_processes: int = 1) -> list[str]:
    """Fills in the batch sizes and the length of the run, as TRL does.

        batch_size = per_device_train_batch_size · gradient_accumulation_steps · num_processes
        mini_batch_size = batch_size / num_mini_batches
        num_total_batches = ⌈total_episodes / batch_size⌉

    Returns:
        One line for each of them that was set to another value.

    Raises:
        ConfigError: a batch does not divide into whole mini-batches, or an argument is not positive.
    """
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"):
        if getattr(args, name) < 1:
            raise ConfigError(f"PPOConfig.{name}: got {getattr(args, name)}, wanted at least 1")
    was = {name: getattr(args, name) for name in sorted(DERIVED & args.set_arguments)}
    args.world_size = num_processes
    args.micro_batch_size = args.per_device_train_batch_size * num_processes
    args.local_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    args.batch_size = args.local_batch_size * num_processes
    if args.local_batch_size % args.num_mini_batches:
        raise ConfigError(
            f"PPOConfig.num_mini_batches {args.num_mini_batches} must divide per_device_train_batch_size × "
            f"gradient_accumulation_steps, which is {args.local_batch_size}"
        )
    args.local_mini_batch_size = args.local_batch_size // args.num_mini_batches
    args.mini_batch_size = args.local_mini_batch_size * num_processes
    if args.max_steps > 0:
        args.total_episodes = args.max_steps * args.batch_size
    elif args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * num_prompts)
        if args.total_episodes < 1:
            raise ConfigError(
                f"PPOConfig.num_train_epochs: got {args.num_train_epochs}, which is less than one answer over "
                f"{num_prompts} prompts; wanted at least {1 / num_prompts:.2g}, or set total_episodes"
            )
    args.num_total_batches = math.ceil(args.total_episodes / args.batch_size)
    return [
        f"PPOConfig.{name}: got {value}, but it is derived, as in TRL 1.12, and is {getattr(args, name)} here: it "
        f"follows from per_device_train_batch_size {args.per_device_train_batch_size}, gradient_accumulation_steps "
        f"{args.gradient_accumulation_steps}, num_mini_batches {args.num_mini_batches} and the number of processes"
        for name, value in was.items()
        if value != getattr(args, name)
    ]


def run_config(
    args: PPOConfig,
    *,
    model_path: str,
    lora: Mapping[str, Any] | None,
    rewards: Sequence[Mapping[str, Any]],
    num_prompts: int,
    evaluates: bool,
    stop_token: str | None,
    value_kind: str = "model",
) -> RunConfig:
    """The run that the arguments describe, after ``derive``.

    Args:
        model_path: where the policy was loaded from.
        lora: settings of the policy's adapter; None for full fine-tuning.
        rewards: configuration sections of the reward sources.
        num_prompts: number of prompts in the training data.
        evaluates: whether there are held-out prompts to evaluate on.
        stop_token: what ends an answer, as a value of ``sampling.stop_token``.
        value_kind: ``model``, or ``head`` for a critic on the policy's own layers.

    Raises:
        ConfigError: names the argument, the value it got and what is expected.
    """
    updates, each_epoch = args.num_total_batches, max(1, round(num_prompts / args.batch_size))
    ppo = ("num_ppo_epochs", "num_mini_batches", "whiten_rewards", "kl_coef", "kl_estimator", "cliprange",
           "cliprange_value", "gamma", "lam")  # fmt: skip
    train = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "save_total_limit",
             "total_episodes", "gradient_checkpointing", "bf16", "fp16", "load_best_model_at_end", "ddp_timeout",
             "ds3_gather_for_generation")  # fmt: skip
    given: dict[str, dict[str, Any]] = {
        "ppo": {name: getattr(args, name) for name in ppo},
        "train": {name: getattr(args, name) for name in train},
        "sampling": {name: getattr(args, name) for name in ("response_length", "temperature")},
    }
    origins = {(part, name): name for part, names in given.items() for name in names}
    origins["sampling", "batch_size"] = "local_rollout_forward_batch_size"
    given["ppo"] |= {"missing_eos_penalty": args.missing_eos_penalty if stop_token is not None else None}
    if value_kind == "head":
        given["ppo"]["vf_coef"] = args.vf_coef
        origins["ppo", "vf_coef"] = "vf_coef"
    given["sampling"] |= {"stop_token": stop_token, "batch_size": args.local_rollout_forward_batch_size}
    given["train"] |= {
        "rollout_batch_size": args.batch_size,
        "micro_batch_size": math.gcd(args.per_device_train_batch_size, args.local_mini_batch_size),
        "optim": OPTIMIZERS[args.optim.value],
        "compile": args.torch_compile,
        "lr_scheduler_type": args.lr_scheduler_type.value,
        "lr_scheduler_kwargs": dict(args.lr_scheduler_kwargs or {}),
        **_warmup(args.warmup_steps),
        "max_grad_norm": args.max_grad_norm or None,
        "eval_steps": _every(args.eval_strategy.value, args.eval_steps, updates, each_epoch) if evaluates else None,
        "save_steps": _every(args.save_strategy.value, args.save_steps, updates, each_epoch),
        "metric_for_best_model": _metric(args),
        "greater_is_better": args.greater_is_better is not False,
        "run_name": args.run_name,
    }
    data = {"prompts": OF_SCRIPT} | ({"eval_prompts": "eval_dataset"} if evaluates else {})
    config, _ = without_idle(
        {
            "model": {"path": model_path, "lora": lora},
            "value": {"kind": value_kind},
            "rewards": [dict(reward) for reward in rewards],
            "data": data,
            "output_dir": args.output_dir,
            **given,
        }
    )
    return checked_config(config, RunConfig, source="PPOConfig", origins=origins)


def _warmup(steps: float) -> dict[str, float]:
    """The key of the warm-up and its value; ``steps`` below 1 are a fraction of the run."""
    return {"warmup_ratio": steps} if steps < 1 else {"warmup_steps": int(steps)}


def _every(strategy: str, steps: float | None, updates: int, each_epoch: int) -> int | None:
    """Updates between two evaluations or checkpoints; steps below 1 are a fraction of the run."""
    if strategy == "epoch":
        return each_epoch
    if strategy != "steps" or not steps:
        return None
    return math.ceil(steps * updates) if steps < 1 else int(steps)


def _metric(args: PPOConfig) -> str | None:
    """The metric that selects the best checkpoint, under its name in evaluations."""
    name = args.metric_for_best_model
    return name if name is None or name.startswith("eval_") else f"eval_{name}"
