"""Translates OpenRLHF's launch arguments, in the spelling of release 0.11 or of earlier ones, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tether.compat.launch import command
from tether.compat.scalars import GPUS, NO_LIMIT, Scalar, has_baseline, left_out, reward_settings, scalars_of
from tether.compat.translation import Translation, Translator
from tether.config.keys import counted
from tether.config.rewards import FunctionReward, HttpReward, ModelReward
from tether.config.schema import RunConfig, VLLMConfig

SYSTEM = "OpenRLHF"
MODULE = "openrlhf.cli.train_ppo_ray"

SCALARS = (
    Scalar("model.path", "actor.model_name_or_path"),
    Scalar("train.learning_rate", "actor.adam.lr", 1e-6),
    Scalar("value.learning_rate", "critic.adam.lr", 9e-6),
    Scalar("train.adam_epsilon", "actor.adam.eps", 1e-8),
    Scalar("train.weight_decay", "actor.adam.weight_decay", 0.0),
    Scalar("train.lr_scheduler_type", "actor.lr_scheduler", "cosine_with_min_lr"),
    Scalar("train.warmup_ratio", "actor.lr_warmup_ratio", 0.03),
    Scalar("train.max_grad_norm", "actor.max_norm", 1.0),
    Scalar("ppo.kl_coef", "algo.kl.init_coef", 0.01),
    Scalar("ppo.kl_estimator", "algo.kl.estimator", "k1"),
    Scalar("ppo.dual_clip", "actor.dual_clip"),
    Scalar("ppo.cliprange_value", "critic.value_clip", 0.5),
    Scalar("ppo.gamma", "algo.advantage.gamma", 1.0),
    Scalar("ppo.lam", "algo.advantage.lambd", 1.0),
    Scalar("ppo.entropy_coef", "actor.entropy_coef", 0.0),
    Scalar("ppo.num_ppo_epochs", "train.max_epochs", 1),
    Scalar("ppo.overlong_buffer", "reward.overlong_buffer_len"),
    Scalar("ppo.overlong_penalty", "reward.overlong_penalty_factor", 1.0),
    Scalar("sampling.num_generations", "rollout.n_samples_per_prompt", 1),
    Scalar("sampling.temperature", "rollout.temperature", 1.0),
    Scalar("data.split", "data.prompt_split", "train"),
    Scalar("data.eval_split", "eval.split", "train"),
    Scalar("train.num_train_epochs", "train.num_episodes", 1),
    Scalar("train.seed", "train.seed", 42),
    Scalar("train.logging_steps", "logger.logging_steps", 1),
    Scalar("train.save_total_limit", "ckpt.max_num", 3),
    Scalar("output_dir", "ckpt.output_dir", "./ckpt"),
)
ESTIMATORS = {"gae": "gae", "reinforce": "reinforce_pp", "rloo": "rloo", "group_norm": "grpo"}
BASELINE = "reinforce_baseline"
REDUCTIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}

OLD = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "max_norm": "actor.max_norm",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "advantage_estimator": "algo.advantage.estimator",
    "entropy_loss_coef": "actor.entropy_coef",
    "max_epochs": "train.max_epochs",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "reward_clip_range": "reward.clip_range",
    "normalize_reward": "reward.normalize_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "save_value_network": "critic.save_value_network",
    "fsdp.param_dtype": "ds.param_dtype",
    "fsdp.packing_samples": "ds.packing_samples",
    "fsdp.load_in_4bit": "ds.load_in_4bit",
    **{f"fsdp.lora.{name}": f"ds.lora.{name}" for name in ("rank", "alpha", "dropout", "target_modules")},
    "prompt_data": "data.prompt_dataset",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "max_samples": "data.max_samples",
    "max_len": "data.max_len",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "param_dtype": "ds.param_dtype",
    "packing_samples": "ds.packing_samples",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "save_path": "ckpt.output_dir",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "ref_pretrain": "ref.model_name_or_path",
    "adam_eps": "actor.adam.eps",
    "min_lr_ratio": "actor.min_lr_ratio",
    "policy_loss_type": "actor.policy_loss_type",
    "loss_agg_mode": "actor.loss_agg_mode",
    "aux_loss_coef": "actor.aux_loss_coef",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "max_new_tokens": "rollout.max_new_tokens",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "agent_func_path": "train.agent_func_path",
    "prompt_data_probs": "data.prompt_probs",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_mem": "ckpt.max_mem",
    "wandb_project": "logger.wandb.project",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enforce_eager": "vllm.enforce_eager",
    "colocate_all_models": "train.colocate_all",
}
"""Spellings of releases before 0.11, and of the FSDP2 engine; ``prompt_max_len`` has no new spelling."""
CORRECTION = tuple(f"algo.advantage.is_correction_{name}" for name in ("enable", "type", "threshold"))
CLUSTER = (
    "vllm.", "vllm_", "ds.", "fsdp.", "fsdp2_", "deepspeed", "zero", "colocate", "train.colocate", "train.async",
    "train.partial",
)  # fmt: skip
PLACES = ("num_nodes", "num_gpus_per_node", "offload", "adam_offload", "ref_reward_offload", "flash_attn", "bf16",
          "param_dtype", "local_rank", "use_ms", "enforce_eager", "enable_prefix_caching", "overlap_comm",
          "grad_accum_dtype", "attn_implementation", "use_liger_kernel", "dataloader_num_workers", "actor_init_on_gpu",
          "gradient_checkpointing_use_reentrant", "ring_attn_size", "ring_head_stride", "async_train",
          "disable_fast_tokenizer", "inference_tp_size", "max_tokens_per_gpu")  # fmt: skip


def translated(source: str, options: Mapping[str, Any]) -> Translation:
    """A launch of PPO, translated to our keys.

    Args:
        source: the file, for messages.
        options: the arguments without their dashes.

    Raises:
        ConfigError: it has no policy or no reward.
    """
    given = {OLD.get(key, key): value for key, value in options.items()}
    former = {new: old for old, new in OLD.items()} if OLD.keys() & options.keys() else {}
    keys = Translator(source, SYSTEM, given, {}, former | {OLD.get(key, key): key for key in options})
    if not keys.gives("actor.model_name_or_path"):
        keys.refuse("actor.model_name_or_path", "missing; wanted the policy")
    keys.put_scalars(SCALARS)
    _rewards(keys)
    _critic(keys)
    _data(keys)
    _batches(keys)
    _algorithm(keys)
    _lora(keys)
    _engine(keys)
    _output(keys)
    keys.ignore("a checkpoint is a folder of its own in output_dir, which transformers loads", "ckpt.path",
                "ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_mem")  # fmt: skip
    keys.ignore("they come from the environment: WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP", "logger.wandb.project",
                "logger.wandb.org", "logger.wandb.group")  # fmt: skip
    for key in given:
        if key.startswith(CLUSTER) or key.rpartition(".")[2] in PLACES or key.endswith(PLACES):
            keys.ignore("it affects only placement and speed on a cluster", key)
    keys.drop_rest("it has no counterpart here")
    return keys.finish(())


def _rewards(keys: Translator) -> None:
    """Reward models, a service, or a file with a reward function."""
    models, url = keys.take("reward.model_name_or_path"), keys.take("reward.remote_url")
    label = keys.take("data.label_key") if url is not None else None
    theirs = ("reward.remote_url", *(["data.label_key"] if label is not None else []))
    if url is not None and str(url).endswith(".py"):
        function = {"type": "function", "path": str(url), "name": "reward_func"}
        keys.put("rewards", [function | ({"label": label} if label is not None else {})], *theirs)
    elif url is not None:
        addresses = str(url).split(",")
        service = {"type": "http", "protocol": "openrlhf"} | ({"columns": [label]} if label is not None else {})
        keys.put("rewards", [{**service, "url": each} for each in addresses], *theirs)
    elif models is not None:
        paths = str(models).split(",")
        keys.put("rewards", [{"type": "model", "path": path} for path in paths], "reward.model_name_or_path")
    else:
        agent = keys.name("train.agent_func_path")
        keys.refuse(
            "reward.model_name_or_path",
            f"missing, and so is {keys.name('reward.remote_url')}; wanted one of them" + (
                f", as an agent ({agent}) has no counterpart here: name a file with the function reward_func"
                if keys.gives("train.agent_func_path") else ""
            ),
        )  # fmt: skip
    keys.covered("reward.model_name_or_path", by="rewards")


def _critic(keys: Translator) -> None:
    """A separate model, initialized from the reward model by default."""
    ours = keys.estimator("algo.advantage.estimator", ESTIMATORS, BASELINE)
    if keys.take("algo.advantage.estimator") == BASELINE:
        keys.note("The KL of a whole answer counts for each of its tokens; OpenRLHF's counts from the token on.")
    if ours != "gae":
        keys.config.pop("value", None)
        keys.ignore("there is no critic", *(key for key in keys.given if key.startswith("critic.")))
        return
    keys.put("value.kind", "model")
    init, rewards = keys.take("critic.model_name_or_path"), keys.take("reward.model_name_or_path")
    if init is not None and init != rewards:
        policy = init == keys.take("actor.model_name_or_path")
        keys.put("value.init", "policy" if policy else init, "critic.model_name_or_path")
    keys.covered("critic.model_name_or_path", by="the reward model, as by default here")
    if keys.number("critic.freezing_steps", -1) > 0:
        keys.put("value.warmup_steps", keys.take("critic.freezing_steps"), "critic.freezing_steps")
    if keys.flag("critic.save_value_network"):
        keys.put("value.save", True, "critic.save_value_network")


def _data(keys: Translator) -> None:
    """Prompts, their lengths, and how answers are sampled."""
    if not keys.gives("data.prompt_dataset"):
        keys.refuse("data.prompt_dataset", "missing; wanted the prompts")
    keys.put("data.prompts", _sources(keys.take("data.prompt_dataset")), "data.prompt_dataset")
    if keys.gives("eval.dataset"):
        keys.put("data.eval_prompts", _sources(keys.take("eval.dataset")), "eval.dataset")
        if keys.number("eval.steps", -1) > 0:
            keys.put("train.eval_steps", keys.take("eval.steps"), "eval.steps")
    keys.prompt_column("data.input_key", "input")
    why = "name a Jinja file with the same text in data.chat_template, such as User: {{ messages[-1].content }}"
    keys.drop(why, "data.input_template")
    keys.covered("data.label_key", by="columns reach reward functions under their own names")
    if not keys.flag("data.apply_chat_template"):
        keys.put("data.chat_template", "none", "data.apply_chat_template")
    keys.covered("data.apply_chat_template", by="the tokenizer's chat template, as by default here")
    if keys.number("data.max_samples", 1e8) < 1e8:
        keys.put("data.max_samples", keys.take("data.max_samples"), "data.max_samples")
    whole, answer = keys.number("data.max_len", 2048), keys.number("rollout.max_new_tokens", 0)
    if not answer:
        answer = whole // 2
        whole_key = keys.name("data.max_len")
        keys.note(f"Answers of up to {answer} tokens; in OpenRLHF they may fill what is left of {whole_key}.")
    keys.put("sampling.response_length", answer, "rollout.max_new_tokens")
    prompt = keys.number("prompt_max_len", 0) or max(1, whole - answer)
    keys.put("data.max_prompt_length", prompt, "prompt_max_len" if keys.gives("prompt_max_len") else "data.max_len")
    if keys.number("rollout.top_p", 1.0) < 1:
        keys.put("sampling.top_p", keys.take("rollout.top_p"), "rollout.top_p")
        keys.put("sampling.allow_truncated_sampling", True)
    keys.covered("rollout.top_p", by="its default, as here")


def _sources(value: Any) -> Any:
    """Datasets, which they join by commas."""
    return value.split(",") if isinstance(value, str) and "," in value else value


def _batches(keys: Translator) -> None:
    """Their rollout batch counts prompts, their training batch counts answers."""
    answers = keys.number("rollout.batch_size", 1024) * keys.number("rollout.n_samples_per_prompt", 1)
    step = keys.number("train.batch_size", 128)
    keys.put("train.rollout_batch_size", answers, "rollout.batch_size", "rollout.n_samples_per_prompt")
    keys.put("ppo.num_mini_batches", max(1, answers // max(step, 1)), "train.batch_size")
    if keys.flag("train.dynamic_batch_enable"):
        tokens = keys.take("train.max_tokens_per_gpu", 16192)
        keys.put("train.max_tokens_per_micro_batch", tokens, "train.max_tokens_per_gpu", "train.dynamic_batch_enable")
        keys.ignore(f"{keys.name('train.max_tokens_per_gpu')} takes precedence", "train.micro_batch_size")
    else:
        keys.put("train.micro_batch_size", keys.take("train.micro_batch_size", 1), "train.micro_batch_size")
        dynamic = "train.dynamic_batch_enable"
        keys.ignore(f"for {keys.name(dynamic)} only", "train.max_tokens_per_gpu", dynamic)
    keys.ignore("answers are decoded in batches of sampling.batch_size", "rollout.micro_batch_size")
    keys.ignore("rows are sorted by length here", "ds.packing_samples")


def _algorithm(keys: Translator) -> None:
    """Settings that have another form there."""
    low, high = keys.pair("actor.eps_clip_low_high", (keys.take("actor.eps_clip", 0.2),) * 2)
    keys.put("ppo.cliprange", low, *(key for key in ("actor.eps_clip_low_high", "actor.eps_clip") if keys.gives(key)))
    if high != low:
        keys.put("ppo.cliprange_high", high, "actor.eps_clip_low_high")
    keys.covered("actor.eps_clip", by="ppo.cliprange")
    if keys.flag("algo.kl.use_loss"):
        keys.put("ppo.kl_in", "loss", "algo.kl.use_loss")
    keys.covered("algo.kl.use_loss", by="its default, as here")
    keys.drop("theirs is in nats per token: ppo.kl_target is in nats per answer", "algo.kl.target", "algo.kl.horizon")
    reduction = keys.choice("actor.loss_agg_mode", "token-mean", REDUCTIONS, "token_mean")
    keys.put("ppo.loss_reduction", reduction, "actor.loss_agg_mode")
    low, high = keys.pair("reward.clip_range", (-10, 10))
    sources = keys.config.get("rewards", [])
    if low == -high:
        keys.put("ppo.reward_clip", high if high < NO_LIMIT else None, "reward.clip_range")
    elif len(sources) == 1:
        keys.put("rewards", [sources[0] | {"clip": [low, high]}], "reward.clip_range")
    keys.drop("of several rewards each has bounds of its own: rewards.N.clip", "reward.clip_range")
    keys.drop("theirs are the reward model's own statistics: use rewards.N.norm", "reward.normalize_enable")
    keys.drop("theirs is a factor: use ppo.missing_eos_penalty or ppo.missing_eos_score",
              "reward.stop_properly_penalty_coef")  # fmt: skip
    first, second = keys.pair("actor.adam.betas", (0.9, 0.95))
    keys.put("train.adam_beta1", first, "actor.adam.betas")
    keys.put("train.adam_beta2", second, "actor.adam.betas")
    if str(keys.take("actor.lr_scheduler", "cosine_with_min_lr")).endswith("min_lr"):
        least = keys.take("actor.min_lr_ratio", 0.1)
        keys.put("train.lr_scheduler_kwargs", {"min_lr_rate": least}, "actor.min_lr_ratio")
    if keys.flag("train.enable_ema"):
        keys.put("train.ema_decay", keys.take("train.ema_beta", 0.992), "train.enable_ema", "train.ema_beta")
    keys.put("train.gradient_checkpointing", keys.flag("actor.gradient_checkpointing_enable"),
             "actor.gradient_checkpointing_enable")  # fmt: skip


def _lora(keys: Translator) -> None:
    if keys.number("ds.lora.rank", 0):
        keys.put("model.lora.r", keys.take("ds.lora.rank"), "ds.lora.rank")
        keys.put("model.lora.alpha", keys.take("ds.lora.alpha", 16), "ds.lora.alpha")
        targets = keys.take("ds.lora.target_modules", "all-linear")
        keys.put("model.lora.target_modules", targets, "ds.lora.target_modules")
        if keys.take("ds.lora.dropout", 0):
            keys.put("model.lora.dropout", keys.take("ds.lora.dropout"), "ds.lora.dropout")
        if keys.flag("ds.load_in_4bit"):
            keys.put("model.quantization", "4bit", "ds.load_in_4bit")
    keys.drop("quantized weights cannot be trained themselves: add model.lora", "ds.load_in_4bit")
    if keys.gives("bf16") or keys.gives("ds.param_dtype"):
        dtype = keys.take("ds.param_dtype", "bf16")
        ours, value = ("train.fp16", True) if dtype == "fp16" else ("train.bf16", dtype == "bf16")
        keys.put(ours, value, "bf16", "ds.param_dtype")


def _engine(keys: Translator) -> None:
    """vLLM, on the devices that train or on its own there, and the weights that correct its rounding."""
    if not any(key.startswith("vllm.") for key in keys.given):
        keys.ignore("transformers generates the answers", *CORRECTION)
        return
    keys.put("sampling.vllm", {}, "vllm.num_engines")
    share, sleeps, eager = (f"vllm.{name}" for name in ("gpu_memory_utilization", "enable_sleep", "enforce_eager"))
    if keys.flag("train.colocate_all"):
        if keys.gives(share):
            keys.put("sampling.vllm.gpu_memory_utilization", keys.take(share), share)
        keys.put("sampling.vllm.enable_sleep_mode", keys.flag(sleeps), sleeps)
    keys.ignore("theirs is of devices on which nothing is trained", share, sleeps)
    keys.put("sampling.vllm.enforce_eager", keys.flag(eager), eager)
    enabled, kind, bounds = CORRECTION
    is_on, is_truncated = keys.flag(enabled), keys.take(kind, "tis") == "tis"
    low, high = keys.pair(bounds, (0.5, 5))
    keys.put("ppo.importance_sampling_cap", high if is_on and is_truncated else None, enabled)
    if is_on and is_truncated:
        keys.covered(kind, bounds, by="ppo.importance_sampling_cap")
        if low > 0:
            keys.note(f"Weights have no lower bound here; in OpenRLHF they are at least {low:g}.")
    elif is_on:
        keys.drop("weights are truncated here: set ppo.importance_sampling_cap", kind, bounds)
    keys.ignore("there are no weights", kind, bounds)


def _output(keys: Translator) -> None:
    if keys.number("ckpt.save_steps", -1) > 0:
        keys.put("train.save_steps", keys.take("ckpt.save_steps"), "ckpt.save_steps")
    keys.covered("ckpt.load_enable", by="--resume continues from a checkpoint")
    trackers = [name for name, key in (("wandb", "logger.wandb.key"), ("tensorboard", "logger.tensorboard_dir"))
                if keys.gives(key)]  # fmt: skip
    if trackers:
        keys.put("train.report_to", trackers, "logger.wandb.key", "logger.tensorboard_dir")
    keys.drop_unless(keys.take("actor.model_name_or_path"), "the reference is the policy that the run starts from",
                     "ref.model_name_or_path")  # fmt: skip
    keys.put_name("train.run_name", "logger.wandb.run_name")
    keys.covered("eval.steps", "ckpt.save_steps", by="not at all, as by default here")


# From ours to theirs


def launch(config: RunConfig, *, source: str) -> str:
    """A script that starts the same run on a Ray cluster, with comments that name what it cannot express.

    Args:
        source: our file, for the header.
    """
    words = [(f"--{name}", *_words(value)) for name, value in _arguments(config)]
    words += [(f"--{role}.num_gpus_per_node", str(GPUS)) for role in _roles(config)]
    words += [("--train.colocate_all",), ("--vllm.num_engines", str(GPUS)), ("--ds.enable_sleep",)]
    words += [(f"--{name}", *_words(value)) for name, value in _engine_arguments(config)]
    taken = [scalar.ours for scalar in SCALARS] + list(WRITTEN) + ["ppo.whiten_advantages"] * has_baseline(config)
    head = ["#!/bin/sh", f"# {SYSTEM}, from {source}; for one node of {GPUS} devices."]
    head += [f"# dropped, {line}" for line in left_out(config, taken)] + [f"# {note}" for note in _notes(config)]
    program = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", "python3", "-m", MODULE]
    return "\n".join(head) + "\n\n" + command(program, words)


def _engine_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """vLLM, without which there is no run there, and the weights that correct its rounding."""
    engine = config.sampling.vllm or VLLMConfig(gpu_memory_utilization=0.5, enable_sleep_mode=True)
    yield "vllm.gpu_memory_utilization", engine.gpu_memory_utilization
    for name, is_on in (("enable_sleep", engine.enable_sleep_mode), ("enforce_eager", engine.enforce_eager)):
        if is_on:
            yield f"vllm.{name}", True
    if (cap := config.importance_cap) is not None:
        enabled, kind, bounds = CORRECTION
        yield from ((enabled, True), (kind, "tis"), (bounds, [0, cap]))


WRITTEN = (
    "rewards", "value.kind", "value.init", "value.warmup_steps", "value.save", "model.lora", "data.prompts",
    "data.eval_prompts", "data.columns.prompt", "data.max_prompt_length", "data.max_samples", "data.chat_template",
    "sampling.response_length", "sampling.vllm", "ppo.importance_sampling_cap",
    "sampling.top_p", "sampling.allow_truncated_sampling", "ppo.cliprange", "ppo.cliprange_high", "ppo.kl_in",
    "ppo.advantage_estimator", "ppo.loss_reduction", "ppo.reward_clip", "ppo.num_mini_batches", "train.adam_beta1",
    "train.adam_beta2", "train.lr_scheduler_kwargs", "train.rollout_batch_size", "train.micro_batch_size",
    "train.max_tokens_per_micro_batch", "train.ema_decay", "train.gradient_checkpointing", "train.eval_steps",
    "train.save_steps", "train.bf16", "train.fp16", "train.report_to", "train.run_name", "resume",
)  # fmt: skip
"""Keys that ``launch`` expresses in another form."""


def _arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Their argument names with values, for everything that is not their default."""
    for name, value in scalars_of(config, SCALARS):
        if name.startswith("critic.") and not config.ppo.has_critic:
            continue
        yield name, value
    if config.train.learning_rate is None:
        yield "actor.adam.lr", config.learning_rate
    if config.ppo.has_critic and config.value.learning_rate is None:
        yield "critic.adam.lr", config.learning_rate
    yield from _model_arguments(config)
    yield from _data_arguments(config)
    yield from _batch_arguments(config)
    yield from _algorithm_arguments(config)
    yield from _output_arguments(config)


def _model_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Rewards, critic and LoRA."""
    models = [reward for reward in config.rewards if isinstance(reward, ModelReward)]
    services = [reward for reward in config.rewards if isinstance(reward, HttpReward)]
    functions = [reward for reward in config.rewards if isinstance(reward, FunctionReward)]
    if models:
        yield "reward.model_name_or_path", ",".join(reward.path for reward in models)
    elif services or functions:
        yield "reward.remote_url", ",".join([each.url for each in services] + [each.path for each in functions])
        labels = [each.label for each in functions] + [name for each in services for name in each.columns or ()]
        if len(set(labels) - {None}) == 1:
            yield "data.label_key", next(label for label in labels if label is not None)
    if config.ppo.has_critic and config.value.init not in (None, "reward"):
        yield "critic.model_name_or_path", config.model.path if config.value.init == "policy" else config.value.init
    if config.value.warmup_steps:
        yield "critic.freezing_steps", config.value.warmup_steps
    if config.value.save:
        yield "critic.save_value_network", True
    if config.model.lora is not None:
        lora = config.model.lora
        yield "ds.lora.rank", lora.r
        yield "ds.lora.alpha", math.ceil(lora.alpha)
        yield "ds.lora.target_modules", lora.target_modules
        yield "ds.lora.dropout", lora.dropout


def _data_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Prompts, their lengths, and how answers are sampled."""
    data, sampling = config.data, config.sampling
    yield "data.prompt_dataset", data.prompts if isinstance(data.prompts, str) else ",".join(data.prompts)
    if data.eval_prompts is not None:
        yield "eval.dataset", data.eval_prompts if isinstance(data.eval_prompts, str) else ",".join(data.eval_prompts)
    if config.train.eval_steps is not None:
        yield "eval.steps", config.train.eval_steps
    yield "data.input_key", data.columns.get("prompt", "prompt")
    if data.chat_template != "none":
        yield "data.apply_chat_template", True
    if data.max_samples is not None:
        yield "data.max_samples", data.max_samples
    yield "data.max_len", data.max_prompt_length + sampling.response_length
    yield "rollout.max_new_tokens", sampling.response_length
    yield "rollout.top_p", sampling.top_p


def _batch_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "rollout.batch_size", config.prompts_per_update
    yield "train.batch_size", config.mini_batch_size
    if config.train.max_tokens_per_micro_batch is not None:
        yield "train.dynamic_batch_enable", True
        yield "train.max_tokens_per_gpu", config.train.max_tokens_per_micro_batch
    else:
        yield "train.micro_batch_size", config.max_rows_per_micro_batch()


def _algorithm_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Settings that have another form there."""
    ppo, train = config.ppo, config.train
    yield "actor.eps_clip_low_high", [ppo.cliprange, ppo.cliprange_high or ppo.cliprange]
    if ppo.kl_in == "loss":
        yield "algo.kl.use_loss", True
    estimators = {ours: theirs for theirs, ours in ESTIMATORS.items()}
    yield "algo.advantage.estimator", BASELINE if has_baseline(config) else estimators[ppo.advantage_estimator]
    reductions = {ours: theirs for theirs, ours in REDUCTIONS.items()}
    yield "actor.loss_agg_mode", reductions.get(ppo.loss_reduction, "token-mean")
    bound = ppo.reward_clip if ppo.reward_clip is not None else NO_LIMIT
    yield "reward.clip_range", [-bound, bound]
    yield "actor.adam.betas", [train.adam_beta1, train.adam_beta2]
    yield "actor.min_lr_ratio", train.lr_scheduler_kwargs.get("min_lr_rate", 0.0)
    if train.ema_decay is not None:
        yield "train.enable_ema", True
        yield "train.ema_beta", train.ema_decay
    if train.gradient_checkpointing:
        yield "actor.gradient_checkpointing_enable", True
    if train.bf16 or train.fp16:
        yield "ds.param_dtype", "fp16" if train.fp16 else "bf16"


def _output_arguments(config: RunConfig) -> Iterator[tuple[str, Any]]:
    train = config.train
    if train.save_steps is not None:
        yield "ckpt.save_steps", train.save_steps
    if config.resume:
        yield "ckpt.load_enable", True
    if train.run_name is not None:
        yield "logger.wandb.run_name", train.run_name
    if "tensorboard" in train.report_to:
        yield "logger.tensorboard_dir", f"{config.output_dir}/logs"


def _roles(config: RunConfig) -> list[str]:
    critic = ["critic"] if config.ppo.has_critic else []
    reward = ["reward"] if any(isinstance(each, ModelReward) for each in config.rewards) else []
    return ["actor", "ref", *critic, *reward]


def _notes(config: RunConfig) -> Iterator[str]:
    """What the reader must adjust by hand."""
    written = {ModelReward, HttpReward, FunctionReward}
    if any(type(reward) not in written for reward in config.rewards) or len({type(r) for r in config.rewards}) > 1:
        yield "Their runs have reward models, or one service or file of a function: adjust the reward's arguments."
    if any(isinstance(reward, FunctionReward) for reward in config.rewards):
        yield "Their function is reward_func(queries, prompts, labels)."
    if any(isinstance(reward, HttpReward) and reward.protocol != "openrlhf" for reward in config.rewards):
        yield "Their services get query, prompts and labels, and reply with rewards."
    if config.ppo.has_critic and config.value_kind != "model":
        yield f"Their critic is a model of its own, not one of kind {config.value_kind}."
    if config.ppo.loss_reduction not in REDUCTIONS.values():
        yield f"Their loss is averaged by token-mean, not by {config.ppo.loss_reduction}."
    if "wandb" in config.train.report_to:
        yield 'For Weights & Biases add --logger.wandb.key "$WANDB_API_KEY".'
    yield from reward_settings(config, "label", "protocol", "columns")
    if config.train.num_train_epochs is None:
        length = config.train.total_episodes or counted(config.train.max_steps, "update")
        yield f"Their runs last train.num_episodes passes over the prompts; ours lasted {length}."


def _words(value: Any) -> tuple[str, ...]:
    """A value as the words of an argument."""
    if value is True:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
