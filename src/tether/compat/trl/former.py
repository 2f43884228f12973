"""Names that TRL used before 1.12, and their replacements: for messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tether.errors import ConfigError

GUIDE = "docs/from_trl.md"
NAMES = {
    "PPOv2Trainer": "it is called PPOTrainer",
    "PPOv2Config": "it is called PPOConfig",
    "AutoModelForCausalLMWithValueHead": (
        "load the policy with transformers.AutoModelForCausalLM and give PPOTrainer a value_model, a sequence "
        "classifier with one label; a head on the policy is `value: {kind: head}` in a configuration file"
    ),
    "AutoModelForSeq2SeqLMWithValueHead": "models with an encoder cannot be trained",
    "PreTrainedModelWrapper": "load the policy with transformers.AutoModelForCausalLM, which PPOTrainer takes as it is",
    "create_reference_model": "remove it: ref_model=None is a copy of the policy",
    "LengthSampler": "remove it: response_length is the maximum, and end tokens end an answer",
    "AdaptiveKLController": "use ppo.kl_target and ppo.kl_horizon in a configuration file",
    "set_seed": "import it from transformers",
}
"""Names in TRL that PPO scripts import."""
LOOP = f"{GUIDE}, From the training loop of TRL ≤ 0.11"
ACCELERATE = "remove it: `accelerate launch` sets it, and trackers are set up by report_to and their environment"
OF_CONFIG = {
    "model_name": "load the models yourself, and pass them to PPOTrainer",
    "reward_model": "it is an argument of PPOTrainer: a model, its path, or a function",
    "query_dataset": "load the dataset yourself, and pass it to PPOTrainer as train_dataset",
    "task_name": "run_name",
    "tracker_kwargs": ACCELERATE,
    "accelerator_kwargs": ACCELERATE,
    "project_kwargs": ACCELERATE,
    "push_to_hub_if_best_kwargs": "push_to_hub, with load_best_model_at_end",
    "forward_batch_size": "per_device_train_batch_size",
    "kl_penalty": "kl_estimator: k1 is `kl`; `mse` is ppo.kl_estimator: k2 in a configuration file",
    "ratio_threshold": "ppo.max_ratio in a configuration file",
    "compare_steps": "metric_for_best_model, by which evaluations are compared",
    "optimize_cuda_cache": "remove it: it changes no result",
    "optimize_device_cache": "remove it: it changes no result",
    "is_encoder_decoder": "remove it: models with an encoder cannot be trained",
    "is_peft_model": "remove it: it is read from the model",
    "global_backward_batch_size": "mini_batch_size, which is derived",
    "global_batch_size": "batch_size, which is derived",
    "steps": "total_episodes, or max_steps for a number of updates",
    "ppo_epochs": "num_ppo_epochs",
    "backward_batch_size": "per_device_train_batch_size",
    "init_kl_coef": "kl_coef",
    "adap_kl_ctrl": "ppo.kl_target in a configuration file",
    "target": "ppo.kl_target in a configuration file",
    "horizon": "ppo.kl_horizon in a configuration file",
    "target_kl": "ppo.max_approx_kl in a configuration file",
    "early_stopping": "ppo.max_approx_kl in a configuration file",
    "log_with": "report_to",
    "tracker_project_name": "project, or what the tracker reads from the environment: WANDB_PROJECT",
    "use_score_scaling": "ppo.score_norm in a configuration file",
    "use_score_norm": "ppo.score_norm in a configuration file",
    "score_clip": "ppo.reward_clip in a configuration file",
    "non_eos_penalty": "missing_eos_penalty",
    "penalize_non_eos": "missing_eos_penalty",
    "penalty_reward_value": "missing_eos_penalty, which is subtracted: 1.0 where this was -1",
    "truncate_token": "stop_token",
    "truncate_token_id": "stop_token_id",
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps, where a number below 1 is the share",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "remove it: an earlier run in output_dir is replaced",
    "logging_dir": "remove it: metrics.jsonl and report.html are in output_dir, and report_to sets trackers",
    "save_safetensors": "remove it: everything is saved as safetensors",
    "group_by_length": "remove it: micro-batches are of similar length",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "adafactor": "optimizers, an argument of PPOTrainer",
    "torchdynamo": "torch_compile",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id, as ORGANIZATION/NAME",
    "push_to_hub_token": "hub_token",
    "include_tokens_per_second": "remove it: the metrics speed/… are always logged",
    **dict.fromkeys(
        ("half_precision_backend", "fp16_backend", "fp16_opt_level"), "remove it: bf16 and fp16 use torch's autocast"
    ),
    **dict.fromkeys(("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"), "remove it: the launcher sets it"),
    **dict.fromkeys(
        ("use_mps_device", "use_ipex", "jit_mode_eval", "tpu_num_cores", "tpu_metrics_debug", "mp_parameters",
         "ray_scope", "past_index", "use_legacy_prediction_loop", "include_inputs_for_metrics", "split_batches",
         "dispatch_batches"),
        "remove it: it has no effect",
    ),
}  # fmt: skip
"""Arguments of PPOConfig in TRL ≤ 0.16 and in transformers 4."""
OF_TRAINER = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
    "dataset": "train_dataset",
    "optimizer": "optimizers, a pair of an optimizer and its schedule",
    "lr_scheduler": "optimizers, a pair of an optimizer and its schedule",
    "num_shared_layers": "remove it: with peft_config everything but the adapters is shared",
}
"""Arguments of PPOTrainer in TRL before 0.13."""
OF_TRANSFORMERS = {
    "tokenizer": "processing_class",
    "model_wrapped": "model",
    "callback_handler": "add_callback, pop_callback and remove_callback",
    "get_train_dataloader": "train_dataset",
    "get_eval_dataloader": "eval_dataset",
    "predict": "generate_completions, or evaluate",
    "create_optimizer": "optimizer, or the argument optimizers",
    "create_scheduler": "lr_scheduler, or the argument optimizers",
    "create_optimizer_and_scheduler": "optimizer and lr_scheduler, or the argument optimizers",
    "compute_loss": "train, whose loss is PPO's",
    "training_step": "train, with a callback's on_step_end",
    "hyperparameter_search": "train, once for each setting",
}
"""Attributes of transformers.Trainer, and their replacements in PPOTrainer."""


OF_LOOP = {
    "step": "train runs the whole loop; one by hand calls `experience` and `update` of tether.train.trainer.PPOTrainer",
    "generate": "train draws the answers; a loop by hand calls `rollout` of tether.train.trainer.PPOTrainer",
    "log_stats": "train logs every update; one by hand calls `finish` and `record` of tether.train.trainer.PPOTrainer",
    "save_pretrained": "it is save_model",
    "dataloader": "train goes through train_dataset by itself",
}
"""Methods that a loop of TRL ≤ 0.11 calls, and their replacements in PPOTrainer."""


def missing(name: str) -> ImportError | AttributeError:
    """The error for a name that this package does not have."""
    if name in NAMES:
        return ImportError(f"tether.compat.trl has no {name}: {NAMES[name]}; see {GUIDE}")
    return AttributeError(f"module 'tether.compat.trl' has no attribute {name!r}")


def no_attribute(name: str) -> AttributeError:
    """The error for an attribute that PPOTrainer does not have."""
    if name in OF_TRANSFORMERS:
        return AttributeError(f"PPOTrainer has no {name}: use {OF_TRANSFORMERS[name]}; {GUIDE} lists what it has")
    if name in OF_LOOP:
        return AttributeError(f"PPOTrainer has no {name}, which TRL ≤ 0.11 had: {OF_LOOP[name]}; see {LOOP}")
    from transformers import Trainer

    if not name.startswith("_") and hasattr(Trainer, name):
        return AttributeError(f"PPOTrainer has no {name}, which transformers.Trainer has: {GUIDE} lists what it has")
    return AttributeError(f"'PPOTrainer' object has no attribute {name!r}")


def telling(former: Mapping[str, str], what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates an ``__init__`` whose arguments had other names.

    Raises:
        ConfigError: a former name was used that is no longer an argument; gives the current name.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        known = inspect.signature(init).parameters

        @functools.wraps(init)
        def told(self: Any, *args: Any, **kwargs: Any) -> None:
            used = [name for name in kwargs if name in former and name not in known]
            if used:
                lines = "; ".join(f"{name} → {former[name]}" for name in used)
                raise ConfigError(f"{what} takes the arguments of TRL 1.12: {lines}. {GUIDE} lists the others")
            init(self, *args, **kwargs)

        return told

    return decorate
