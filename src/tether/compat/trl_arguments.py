"""Command lines of TRL's PPO scripts in our words. Scripts run themselves by ``tether.compat.trl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tether.compat.scalars import Scalar
from tether.compat.translation import Translation, Translator

SYSTEM = "TRL"
SCALARS = (
    Scalar("model.revision", "model_revision"),
    Scalar("model.dtype", "dtype"),
    Scalar("model.attn_implementation", "attn_implementation"),
    Scalar("model.trust_remote_code", "trust_remote_code"),
    Scalar("data.prompts", "dataset_name"),
    Scalar("data.split", "dataset_train_split", "train"),
    Scalar("ppo.kl_coef", "kl_coef", 0.05),
    Scalar("ppo.kl_estimator", "kl_estimator", "k1"),
    Scalar("ppo.cliprange", "cliprange", 0.2),
    Scalar("ppo.cliprange_value", "cliprange_value", 0.2),
    Scalar("ppo.vf_coef", "vf_coef", 0.1),
    Scalar("ppo.gamma", "gamma", 1.0),
    Scalar("ppo.lam", "lam", 0.95),
    Scalar("ppo.num_ppo_epochs", "num_ppo_epochs", 4),
    Scalar("ppo.num_mini_batches", "num_mini_batches", 1),
    Scalar("ppo.whiten_rewards", "whiten_rewards", False),
    Scalar("ppo.missing_eos_penalty", "missing_eos_penalty"),
    Scalar("sampling.response_length", "response_length", 53),
    Scalar("sampling.temperature", "temperature", 0.7),
    Scalar("train.learning_rate", "learning_rate", 3e-6),
    Scalar("train.lr_scheduler_type", "lr_scheduler_type", "linear"),
    Scalar("train.warmup_ratio", "warmup_ratio", 0.0),
    Scalar("train.weight_decay", "weight_decay", 0.0),
    Scalar("train.adam_beta1", "adam_beta1"),
    Scalar("train.adam_beta2", "adam_beta2"),
    Scalar("train.adam_epsilon", "adam_epsilon", 1e-8),
    Scalar("train.max_grad_norm", "max_grad_norm", 1.0),
    Scalar("train.bf16", "bf16"),
    Scalar("train.fp16", "fp16"),
    Scalar("train.gradient_checkpointing", "gradient_checkpointing"),
    Scalar("train.seed", "seed", 42),
    Scalar("train.logging_steps", "logging_steps"),
    Scalar("train.save_steps", "save_steps"),
    Scalar("train.save_total_limit", "save_total_limit"),
    Scalar("train.report_to", "report_to"),
    Scalar("train.run_name", "run_name"),
    Scalar("train.push_to_hub", "push_to_hub"),
    Scalar("train.hub_model_id", "hub_model_id"),
    Scalar("train.hub_private_repo", "hub_private_repo"),
    Scalar("output_dir", "output_dir"),
)


def translated(source: str, options: Mapping[str, Any]) -> Translation:
    """A launch of ``ppo.py`` or ``ppo_tldr.py`` in our words.

    Args:
        options: the arguments without their dashes.

    Raises:
        ConfigError: there is no policy, no reward model, or no output folder.
    """
    keys = Translator(source, SYSTEM, options, {})
    keys.put_scalars(SCALARS)
    policy = next((key for key in ("sft_model_path", "model_name_or_path") if keys.gives(key)), "sft_model_path")
    for key in {policy, "reward_model_path", "output_dir"} - {key for key in options if keys.gives(key)}:
        keys.refuse(key, "missing")
    keys.put("model.path", keys.take(policy), policy)
    keys.covered("model_name_or_path", by="the model of sft_model_path")
    keys.put("rewards", [{"type": "model", "path": keys.take("reward_model_path")}], "reward_model_path")
    if keys.flag("use_peft"):
        keys.put("model.lora.r", keys.take("lora_r", 16), "lora_r")
        keys.put("model.lora.alpha", keys.take("lora_alpha", 32), "lora_alpha")
        if keys.gives("lora_dropout"):
            keys.put("model.lora.dropout", keys.take("lora_dropout"), "lora_dropout")
        for key, bits in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
            if keys.flag(key):
                keys.put("model.quantization", bits, key)
        if keys.gives("lora_target_modules"):
            keys.put("model.lora.target_modules", keys.take("lora_target_modules"), "lora_target_modules")
    keys.covered("use_peft", by="model.lora")
    keys.put("value.kind", "model")
    if keys.take("stop_token", "eos") != "eos":
        keys.refuse("stop_token", "wanted eos, or to leave it out")
    ends = keys.take("stop_token") == "eos" or keys.gives("missing_eos_penalty")
    keys.put("sampling.stop_token", "eos" if ends else None, "stop_token")
    if ends and not keys.gives("stop_token"):
        keys.note("Answers end at the end token; without stop_token TRL writes on after it.")
    if keys.gives("stop_token_id"):
        keys.refuse("stop_token_id", "set sampling.stop_token to the token's text, or stop_token to eos")
    if keys.gives("dataset_config"):
        keys.refuse("dataset_config", "write that part of the dataset to a file and name the file as dataset_name")
    if keys.gives("warmup_steps"):
        keys.refuse("warmup_steps", "set warmup_ratio, the share of the run's optimizer steps")
    _batches(keys)
    keys.ignore("the prompts have one column of text or messages", "dataset_text_field", "dataset_num_proc")
    keys.ignore("the last evaluation is on data.eval_prompts", "dataset_test_split", "eval_strategy", "eval_steps",
                "num_sample_generations")  # fmt: skip
    keys.ignore("forwards have train.micro_batch_size rows", "local_rollout_forward_batch_size")
    keys.drop_rest("it has no counterpart here")
    return keys.finish(())


def _batches(keys: Translator) -> None:
    """Their rollout batch is rows × forwards, on each device."""
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    minis = keys.number("num_mini_batches", 1)
    if minis < 1:
        keys.refuse("num_mini_batches", "wanted a whole number above 0")
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps")
    keys.put("train.rollout_batch_size", rows * forwards, *theirs, note="on one device")
    keys.put("train.micro_batch_size", min(rows, rows * forwards // max(minis, 1)), "per_device_train_batch_size")
    if keys.gives("total_episodes"):
        keys.put("train.total_episodes", keys.take("total_episodes"), "total_episodes")
        keys.ignore("total_episodes is what counts", "num_train_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("num_train_epochs", 3.0), "num_train_epochs")
