"""Translates verl's PPO configuration, as YAML or as Hydra overrides of a launch, and back. The keys are those of
release 0.9."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tether.compat.launch import Unset, flat, nested
from tether.compat.table import (
    COLUMN,
    COUNT,
    GPUS,
    NAME,
    NO_LIMIT,
    TOP_K,
    TOP_P,
    WHOLE,
    Key,
    Rule,
    arguments,
    below,
    estimator,
    reward_settings,
    script,
    words,
)
from tether.compat.translation import Translation, Translator
from tether.config.rewards import FunctionReward, ModelReward
from tether.config.schema import RunConfig

SYSTEM = "verl"
MODULE = "verl.trainer.main_ppo"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ARGUMENTS = "reward.custom_reward_function.reward_kwargs."
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
CORRECTION = "algorithm.rollout_correction"
FORMER = ("use_rmpad", "grad_offload", "ppo_micro_batch_size", "log_prob_micro_batch_size")
"""Last parts of keys of releases before 0.3."""
FORMER_DEFAULTS = {
    f"{ACTOR}.clip_ratio_c": None, f"{ACTOR}.entropy_coeff": 0.001, "algorithm.use_kl_in_reward": True,
}  # fmt: skip
"""Defaults of these releases that differ."""

CRITIC = ("critic.", "trainer.critic_warmup")
"""Beginnings of the keys of the critic."""
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
BASELINE = "reinforce_plus_plus_baseline"
ADAM_EPSILON = 1e-8
"""That of torch."""
REDUCTIONS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "fixed_length",
}  # fmt: skip
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine"}
KEYS = (
    Key("model.path", f"{MODEL}.path"),
    Key("model.trust_remote_code", f"{MODEL}.trust_remote_code", False),
    Key("train.gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing", True),
    Key("train.learning_rate", f"{ACTOR}.optim.lr", 1e-6),
    Key("train.weight_decay", f"{ACTOR}.optim.weight_decay", 0.01),
    Key("train.max_grad_norm", f"{ACTOR}.grad_clip", 1.0),
    Key("value.learning_rate", "critic.optim.lr", 1e-5),
    Key("value.warmup_steps", "trainer.critic_warmup", 0),
    Key("ppo.gamma", "algorithm.gamma", 1.0),
    Key("ppo.lam", "algorithm.lam", 1.0),
    Key("ppo.dual_clip", f"{ACTOR}.clip_ratio_c", 3.0, below(NO_LIMIT)),
    Key("ppo.cliprange_value", "critic.cliprange_value", 0.5),
    Key("ppo.entropy_coef", f"{ACTOR}.entropy_coeff", 0.0),
    Key("ppo.num_ppo_epochs", f"{ACTOR}.ppo_epochs", 1),
    Key("sampling.num_generations", f"{ROLLOUT}.n", 1),
    Key("sampling.temperature", f"{ROLLOUT}.temperature", 1.0),
    Key("sampling.top_p", f"{ROLLOUT}.top_p", 1.0, TOP_P),
    Key("sampling.top_k", f"{ROLLOUT}.top_k", -1, TOP_K),
    Key("sampling.response_length", "data.max_response_length", 512),
    Key("data.max_prompt_length", "data.max_prompt_length", 512),
    Key("data.prompts", "data.train_files"),
    Key("data.eval_prompts", "data.val_files"),
    Key("data.columns.prompt", "data.prompt_key", "prompt", COLUMN),
    Key("data.max_samples", "data.train_max_samples", form=COUNT),
    Key("train.seed", "data.seed"),
    Key("train.run_name", "trainer.experiment_name", form=NAME),
    Key("train.eval_steps", "trainer.test_freq", form=COUNT, needs="data.val_files"),
    Key("train.save_steps", "trainer.save_freq", form=COUNT),
    Key("train.save_total_limit", "trainer.max_actor_ckpt_to_keep"),
)
"""Keys that stand for one of ours."""
LORA = (
    Key("model.lora.r", f"{MODEL}.lora_rank"),
    Key("model.lora.alpha", f"{MODEL}.lora_alpha", 16, WHOLE),
    Key("model.lora.target_modules", f"{MODEL}.target_modules", "all-linear"),
)
"""Those of LoRA."""
OLD = {
    **{f"{old}.overlong_buffer.": f"{OVERLONG}." for old in ("reward_model", "custom_reward_function")},
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
}
"""Spellings of earlier releases; those with a dot at their end are beginnings."""
CLUSTER = tuple(
    f"{section}{name}" for section, names in {
        f"{ROLLOUT}.": (
            "agent.num_workers calculate_log_probs checkpoint_engine. cudagraph_capture_sizes data_parallel_size "
            "disable_log_stats dtype enable_chunked_prefill enable_prefix_caching enforce_eager engine_kwargs. "
            "expert_parallel_size free_cache_engine gpu_memory_utilization layered_summon load_format log_prob_ "
            "logprobs_mode max_model_len max_num_ mode multi_stage_wake_up n_gpus_per_node name nnodes "
            "pipeline_model_parallel_size profiler. prometheus. prompt_length response_length scheduling_policy skip. "
            "skip_tokenizer_init tensor_model_parallel_size trace. update_weights_bucket_megabytes"
        ),
        "actor_rollout_ref.ref.": (
            "entropy_ fsdp_config. log_prob_ megatron. param_offload profiler. rollout_n strategy ulysses use_"
        ),
        f"{ACTOR}.optim.override_optimizer_config.": (
            "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
            "use_precision_aware_optimizer"
        ),
        f"{ACTOR}.": "checkpoint. fsdp_config. megatron. profiler. strategy ulysses use_torch_compile",
        f"{MODEL}.": "enable_activation_offload use_",
        "critic.": (
            "checkpoint. forward_ fsdp megatron. model.enable_ model.external_lib model.fsdp_config. "
            "model.tokenizer_path model.use_ param_offload ppo_max_token ppo_micro profiler. strategy ulysses "
            "use_dynamic_bsz"
        ),
        "trainer.": (
            "balance_batch default_hdfs_dir device n_gpus_per_node nnodes project_name ray_ use_legacy use_v1 v1."
        ),
        "reward.": "num_workers",
        "reward.reward_model.": "enable_resource_pool n_gpus_per_node nnodes rollout.",
        "reward_model.": (
            "enable_resource_pool forward_ launch_reward_fn_async megatron. micro_batch_size model.external_lib "
            "model.fsdp_config. model.input_tokenizer model.use_ n_gpus_per_node nnodes num_workers param_offload "
            "profiler. rollout. strategy ulysses use_dynamic_bsz use_reward_loop"
        ),
        "": "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout data.dataloader_num_workers "
            "data.filter_overlong_prompts_workers data.use_shm global_profiler. hydra. hydra/ model_engine ray_init. "
            "ray_kwargs. transfer_queue.",
    }.items()
    for name in names.split()
)  # fmt: skip
"""Prefixes of keys that do not affect the result."""
COVERED = {
    "columns reach reward functions under their own names": ("data.reward_fn_key",),
    "prompts that are too long are dropped": ("data.truncation", "data.filter_overlong_prompts"),
    "held-out prompts are answered before the first update": ("trainer.val_before_train",),
}
"""Keys that say how it always is here, by how that is."""
IGNORED = {
    "answers to held-out prompts are decoded in batches of sampling.batch_size": ("data.val_batch_size",),
    "prompts are shuffled": ("data.shuffle", f"{ACTOR}.shuffle", "critic.shuffle"),
    "judges are shown conversations in any case": (
        "data.return_raw_chat", "data.return_full_prompt", "data.return_raw_input_ids",
    ),
    "samples.jsonl has answers with their scores": (
        "trainer.log_val_generations", "trainer.validation_data_dir", "trainer.rollout_data_dir",
    ),
}  # fmt: skip
"""Further keys that have no effect here, by reason."""
USUAL = {
    f"{ROLLOUT}.do_sample": (True, "answers are always drawn here"),
    f"{ROLLOUT}.ignore_eos": (False, "an end token ends an answer here: sampling.stop_token: null lets it continue"),
    f"{ROLLOUT}.repetition_penalty": (1, "answers are drawn from the policy's own distribution here"),
    f"{ROLLOUT}.multi_turn": (False, "an answer is one turn here"),
    f"{ROLLOUT}.multi_turn.enable": (False, "an answer is one turn here"),
    "critic.model.lora_rank": (0, "a critic of kind model trains all its weights here"),
    "algorithm.norm_adv_by_std_in_grpo": (True, "ppo.advantage_estimator grpo divides by the standard deviation"),
    "data.image_key": ("images", "images are not read"),
    "trainer.val_only": (False, "`tether evaluate` answers held-out prompts"),
}
"""Keys that affect the result, with the value that does not, and how it is here."""


def _current(key: str) -> str:
    """A key as release 0.9 spells it."""
    old = next((old for old in OLD if key == old or (old.endswith(".") and key.startswith(old))), None)
    return key if old is None else OLD[old] + key.removeprefix(old)


def _rewards(keys: Translator) -> None:
    path, name = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    model, enabled = "reward.reward_model.model_path", "reward.reward_model.enable"
    if keys.gives(path):
        function = {"type": "function", "path": keys.take(path), "name": keys.take(name, "compute_score")}
        keys.drop_secrets(ARGUMENTS, "read it from the environment in the function")
        arguments = keys.below(ARGUMENTS)
        given = {"arguments": nested(arguments)} if arguments else {}
        keys.put("rewards", [function | given], path, name, *(f"{ARGUMENTS}{each}" for each in arguments))
    elif keys.gives(model) and keys.flag(enabled, True):
        keys.put("rewards", [{"type": "model", "path": keys.take(model)}], model, enabled)
    else:
        keys.refuse(
            path,
            f"missing, and so is {model}; verl's rules for known datasets are not available here: add "
            f"{path}=FILE.py to the script, your reward function as docs/rewards.md describes it"
        )
    keys.covered(enabled, name, by="rewards")
    _overlong(keys)


def _overlong(keys: Translator) -> None:
    """The soft penalty for long answers that their reward manager ``dapo`` adds."""
    if keys.flag(f"{OVERLONG}.enable"):
        for name, ours in (("len", "ppo.overlong_buffer"), ("penalty_factor", "ppo.overlong_penalty")):
            if not keys.gives(f"{OVERLONG}.{name}"):
                keys.refuse(f"{OVERLONG}.{name}", f"missing, and {OVERLONG}.enable is true; wanted a number")
            keys.put(ours, keys.take(f"{OVERLONG}.{name}"), f"{OVERLONG}.{name}", f"{OVERLONG}.enable")
    keys.ignore("this penalty is off", *(f"{OVERLONG}.{name}" for name in ("enable", "len", "penalty_factor")))
    keys.ignore("metrics.jsonl has the scores", f"{OVERLONG}.log")
    longest = keys.take("data.max_response_length", 512)
    why = "the penalty counts from sampling.response_length, the longest answer"
    keys.drop_unless(longest, why, "reward.reward_kwargs.max_resp_len")
    manager = keys.take("reward.reward_manager.name", "naive")
    if manager in ("naive", "dapo", "batch", "prime"):
        keys.covered("reward.reward_manager.name", by="rewards")
    keys.drop("not supported here: its rules belong in a reward function", "reward.reward_manager.name")


def _their_rewards(config: RunConfig) -> Iterator[tuple[str, Any]]:
    reward = config.rewards[0]
    if isinstance(reward, FunctionReward):
        yield "reward.custom_reward_function.path", reward.path
        yield "reward.custom_reward_function.name", reward.name
        yield from ((f"+{ARGUMENTS}{name}", value) for name, value in flat(reward.arguments).items())
    elif isinstance(reward, ModelReward):
        yield "reward.reward_model.enable", True
        yield "reward.reward_model.model_path", reward.path


def _critic(keys: Translator) -> None:
    """A separate model, from the path that they give."""
    if keys.has_critic:
        keys.put("value.kind", "model")
        keys.put_init("critic.model.path", f"{MODEL}.path", "reward.reward_model.model_path")


def _their_critic(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """There is no default there."""
    if config.ppo.has_critic:
        first = config.rewards[0]
        judge = first.path if isinstance(first, ModelReward) and config.value.init != "policy" else config.model.path
        yield "critic.model.path", config.value.init_path or judge


def _prompts(keys: Translator) -> None:
    """What templates are given."""
    extra = keys.below("data.apply_chat_template_kwargs.")
    if extra:
        theirs = [f"data.apply_chat_template_kwargs.{name}" for name in extra]
        keys.put("data.chat_template_kwargs", nested(extra), *theirs)


def _their_prompts(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for name, value in config.data.chat_template_kwargs.items():
        yield f"+data.apply_chat_template_kwargs.{name}", value
    yield "data.filter_overlong_prompts", True


def _batches(keys: Translator) -> None:
    """Their batches count prompts."""
    prompts, answers = keys.number("data.train_batch_size", 1024), keys.number(f"{ROLLOUT}.n", 1)
    step = keys.number(f"{ACTOR}.ppo_mini_batch_size", 256)
    keys.put("train.rollout_batch_size", prompts * answers, "data.train_batch_size", f"{ROLLOUT}.n")
    keys.put("ppo.num_mini_batches", max(1, prompts // max(step, 1)), f"{ACTOR}.ppo_mini_batch_size")
    tokens, rows = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    of_all = f"{ACTOR}.ppo_micro_batch_size"
    if keys.flag(f"{ACTOR}.use_dynamic_bsz"):
        keys.put("train.max_tokens_per_micro_batch", keys.take(tokens, 16384), tokens, f"{ACTOR}.use_dynamic_bsz")
        keys.ignore(f"{tokens} takes precedence", rows, of_all)
    elif keys.gives(rows):
        keys.put("train.micro_batch_size", keys.take(rows), rows)
    elif keys.gives(of_all):
        devices = keys.number("trainer.n_gpus_per_node", 8) * keys.number("trainer.nnodes", 1)
        of_each = max(1, keys.number(of_all, 1) // max(devices, 1))
        keys.put("train.micro_batch_size", of_each, of_all, note=f"divided by {devices} devices")
    keys.ignore("for use_dynamic_bsz only", tokens, f"{ACTOR}.use_dynamic_bsz")
    if (updates := keys.take("trainer.total_training_steps")) is not None:
        keys.put("train.max_steps", updates, "trainer.total_training_steps")
        keys.ignore("trainer.total_training_steps takes precedence", "trainer.total_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("trainer.total_epochs", 30), "trainer.total_epochs")


def _their_batches(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "data.train_batch_size", config.prompts_per_update
    yield f"{ACTOR}.ppo_mini_batch_size", config.prompts_per_update // config.ppo.num_mini_batches
    if config.train.max_tokens_per_micro_batch is not None:
        yield f"{ACTOR}.use_dynamic_bsz", True
        yield f"{ACTOR}.ppo_max_token_len_per_gpu", config.train.max_tokens_per_micro_batch
    else:
        yield f"{ACTOR}.ppo_micro_batch_size_per_gpu", config.max_rows_per_micro_batch()
        yield f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", config.max_rows_per_micro_batch()
        yield "critic.ppo_micro_batch_size_per_gpu", config.max_rows_per_micro_batch()
    if config.train.max_steps is not None:
        yield "trainer.total_training_steps", config.train.max_steps
    elif config.train.num_train_epochs is not None:
        yield "trainer.total_epochs", math.ceil(config.train.num_train_epochs)


def _kl(keys: Translator) -> None:
    """Their KL is off by default, in the reward and in the loss; before 0.3 it was in the reward."""
    in_loss = keys.flag(f"{ACTOR}.use_kl_loss")
    in_reward = keys.flag("algorithm.use_kl_in_reward")
    in_reward = in_reward and (keys.gives("algorithm.use_kl_in_reward") or not in_loss)
    of_reward, of_loss = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"), (
        f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type",
    )  # fmt: skip
    if in_reward:
        coef, kind = of_reward
        keys.put("ppo.kl_coef", keys.take(coef, 0.001), "algorithm.use_kl_in_reward", coef)
        keys.put("ppo.kl_estimator", keys.choice(kind, "kl", KL, "k1"), kind)
        if in_loss:
            keys.drop("the KL is in the reward or in the loss, not in both", f"{ACTOR}.use_kl_loss")
    elif in_loss:
        coef, kind = of_loss
        keys.put("ppo.kl_in", "loss", f"{ACTOR}.use_kl_loss")
        keys.put("ppo.kl_coef", keys.take(coef, 0.001), coef)
        keys.put("ppo.kl_estimator", keys.choice(kind, "low_var_kl", KL, "k3"), kind)
    else:
        keys.put("ppo.kl_coef", 0.0, "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
    adaptive = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
    if keys.take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        why = "theirs is in nats per token: ppo.kl_target is in nats per answer"
        keys.drop(why, "algorithm.kl_ctrl.type", *adaptive)
    keys.ignore("the coefficient is fixed", "algorithm.kl_ctrl.type", *adaptive)
    if not (in_reward or in_loss or keys.gives("algorithm.use_kl_in_reward")) and (coef := keys.take(of_reward[0])):
        keys.note(f"The KL is off, as by default in verl. Before verl 0.3 it was in the reward: ppo.kl_coef: {coef}.")
    keys.ignore("this KL is off", *of_reward, *of_loss, "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")


def _their_kl(config: RunConfig) -> Iterator[tuple[str, Any]]:
    ppo = config.ppo
    names = {ours: theirs for theirs, ours in reversed(KL.items())}
    in_loss = ppo.kl_in == "loss"
    yield "algorithm.use_kl_in_reward", ppo.kl_coef > 0 and not in_loss
    yield f"{ACTOR}.use_kl_loss", ppo.kl_coef > 0 and in_loss
    if ppo.kl_coef > 0:
        yield (f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"), ppo.kl_coef
        yield (f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"), names[ppo.kl_estimator]


def _loss(keys: Translator) -> None:
    """Bounds of the ratio, which may differ, and the average over tokens."""
    both = keys.take(f"{ACTOR}.clip_ratio", 0.2)
    low, high = keys.take(f"{ACTOR}.clip_ratio_low", both), keys.take(f"{ACTOR}.clip_ratio_high", both)
    keys.put("ppo.cliprange", low, f"{ACTOR}.clip_ratio_low" if keys.gives(f"{ACTOR}.clip_ratio_low") else
             f"{ACTOR}.clip_ratio")  # fmt: skip
    if high != low:
        keys.put("ppo.cliprange_high", high, f"{ACTOR}.clip_ratio_high")
    keys.covered(*(f"{ACTOR}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")), by="ppo.cliprange")
    usual = "token-mean" if keys.flag(f"{ACTOR}.use_token_level_loss", True) else "seq-mean-token-mean"
    keys.put_table([Key("ppo.loss_reduction", f"{ACTOR}.loss_agg_mode", usual, words(REDUCTIONS, "token_mean"))])
    keys.covered(f"{ACTOR}.use_token_level_loss", by="ppo.loss_reduction")


def _their_loss(config: RunConfig) -> Iterator[tuple[str, Any]]:
    ppo = config.ppo
    yield f"{ACTOR}.clip_ratio", ppo.cliprange
    yield f"{ACTOR}.clip_ratio_low", ppo.cliprange
    yield f"{ACTOR}.clip_ratio_high", ppo.cliprange_high or ppo.cliprange
    yield f"{ACTOR}.loss_agg_mode", {ours: theirs for theirs, ours in REDUCTIONS.items()}[ppo.loss_reduction]


def _optimizer(keys: Translator) -> None:
    """Both decays, and the learning rate over the updates; their cosine ends at a share of its peak."""
    kind, least, steps, ratio = (
        f"{ACTOR}.optim.{name}"
        for name in ("lr_scheduler_type", "min_lr_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio")
    )
    schedule, floor = keys.take(kind, "constant"), keys.number(least, 0.0)
    if schedule == "cosine" and floor:
        keys.put("train.lr_scheduler_type", "cosine_with_min_lr", kind)
        keys.put("train.lr_scheduler_kwargs", {"min_lr_rate": floor}, least)
    else:
        keys.put("train.lr_scheduler_type", SCHEDULES.get(str(schedule), schedule), kind)
        keys.ignore("only a cosine has a floor, and 0 is none", least)
    if keys.number(steps, -1) > 0:
        keys.put("train.warmup_steps", keys.take(steps), steps)
        keys.ignore(f"{steps} takes precedence", ratio)
    else:
        keys.put("train.warmup_ratio", keys.take(ratio, 0.0), ratio)
        keys.covered(steps, by="train.warmup_ratio")
    keys.put_betas(f"{ACTOR}.optim.betas", (0.9, 0.999))
    keys.put("train.adam_epsilon", ADAM_EPSILON)


def _their_optimizer(config: RunConfig) -> Iterator[tuple[str, Any]]:
    train = config.train
    yield f"{ACTOR}.optim.betas", [train.adam_beta1, train.adam_beta2]
    least = train.lr_scheduler_kwargs.get("min_lr_rate") if train.lr_scheduler_type == "cosine_with_min_lr" else None
    is_cosine = train.lr_scheduler_type == "cosine" or least is not None
    yield f"{ACTOR}.optim.lr_scheduler_type", "cosine" if is_cosine else "constant"
    if least is not None:
        yield f"{ACTOR}.optim.min_lr_ratio", least
    if train.warmup_steps is not None:
        yield f"{ACTOR}.optim.lr_warmup_steps", train.warmup_steps
    else:
        yield f"{ACTOR}.optim.lr_warmup_steps_ratio", train.warmup_ratio


def _weights(keys: Translator) -> None:
    """LoRA, and the type of weights."""
    if keys.number(f"{MODEL}.lora_rank", 0):
        keys.put_table(LORA)
    keys.ignore("LoRA is off", *(key.theirs for key in LORA))
    name = f"{ACTOR}.fsdp_config.dtype"
    if keys.gives(name):
        dtype = str(keys.take(name))
        is_half = dtype in ("float16", "fp16", "half", "16")
        keys.put(*("train.fp16", True) if is_half else ("train.bf16", dtype in ("bfloat16", "bf16")), name)


def _their_weights(config: RunConfig) -> Iterator[tuple[str, Any]]:
    train = config.train
    if config.model.lora is not None:
        yield from arguments(config, LORA)
    if train.fp16 or train.bf16 is not None:
        yield f"{ACTOR}.fsdp_config.dtype", "float16" if train.fp16 else "bfloat16" if train.bf16 else "float32"


def _engine(keys: Translator) -> None:
    """vLLM, which shares the devices with training there as here, and the weights that correct its rounding."""
    weights, cap = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    if keys.take(f"{ROLLOUT}.name") != "vllm":
        keys.ignore("transformers generates the answers", weights, cap)
        return
    keys.put("sampling.vllm", {}, f"{ROLLOUT}.name")
    share, frees, eager = (
        f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "free_cache_engine", "enforce_eager")
    )
    keys.put("sampling.vllm.gpu_memory_utilization", keys.number(share, 0.5), share)
    keys.put("sampling.vllm.enable_sleep_mode", keys.flag(frees, True), frees)
    keys.put("sampling.vllm.enforce_eager", keys.flag(eager), eager)
    kind = keys.take(weights)
    if kind == "token":
        keys.put("ppo.importance_sampling_cap", keys.number(cap, 2.0), weights, cap)
        return
    keys.put("ppo.importance_sampling_cap", None)
    if kind is not None:
        keys.drop("weights are those of tokens here: set ppo.importance_sampling_cap", weights, cap)
    keys.ignore("there are no weights", weights, cap)


def _their_engine(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """vLLM and the weights that correct its rounding; their defaults if transformers generates here."""
    engine, cap = config.sampling.vllm, config.importance_cap
    if engine is None:
        return
    yield f"{ROLLOUT}.gpu_memory_utilization", engine.gpu_memory_utilization
    yield f"{ROLLOUT}.free_cache_engine", engine.enable_sleep_mode
    yield f"{ROLLOUT}.enforce_eager", engine.enforce_eager
    if cap is not None:
        yield f"{CORRECTION}.rollout_is", "token"
        yield f"{CORRECTION}.rollout_is_threshold", cap


def _output(keys: Translator) -> None:
    folder = keys.take("trainer.default_local_dir")
    if folder is None:
        known = {"trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k"}
        parts = [keys.given.get(key) or usual for key, usual in known.items()]
        folder = "/".join(["checkpoints", *(str(part) for part in parts if not isinstance(part, Unset))])
    keys.put("output_dir", folder, "trainer.default_local_dir")
    loggers = keys.take("trainer.logger", [])
    trackers = [name for name in (loggers if isinstance(loggers, list) else [loggers]) if name != "console"]
    if trackers:
        keys.put("train.report_to", trackers, "trainer.logger")
    if keys.take("trainer.resume_mode", "auto") == "resume_path":
        path = keys.take("trainer.resume_from_path", True)
        keys.put("resume", path, "trainer.resume_mode", "trainer.resume_from_path")
    keys.covered("trainer.resume_mode", by="--resume continues from a checkpoint")
    keys.covered("trainer.logger", by="not at all, as by default here")


def _their_output(config: RunConfig) -> Iterator[tuple[str, Any]]:
    train = config.train
    yield "trainer.default_local_dir", config.output_dir
    trackers = [train.report_to] if isinstance(train.report_to, str) else train.report_to
    yield "trainer.logger", ["console", *(name for name in trackers if name != "none")]
    if config.resume:
        yield "trainer.resume_mode", "resume_path" if isinstance(config.resume, str) else "auto"
        if isinstance(config.resume, str):
            yield "trainer.resume_from_path", config.resume


TABLE = (
    Rule(
        ("ppo.advantage_estimator",),
        lambda keys: keys.estimator("algorithm.adv_estimator", ESTIMATORS, BASELINE),
        lambda config: [("algorithm.adv_estimator", estimator(config, ESTIMATORS, BASELINE))],
    ),
    *KEYS,
    Rule(("rewards",), _rewards, _their_rewards),
    Rule(("value.kind", "value.init"), _critic, _their_critic),
    Rule(("data.chat_template_kwargs",), _prompts, _their_prompts),
    Rule(("train.rollout_batch_size", "train.micro_batch_size", "train.max_tokens_per_micro_batch",
          "train.num_train_epochs", "train.max_steps", "ppo.num_mini_batches"), _batches, _their_batches),
    Rule(("ppo.kl_in", "ppo.kl_coef", "ppo.kl_estimator"), _kl, _their_kl),
    Rule(("ppo.cliprange", "ppo.cliprange_high", "ppo.loss_reduction"), _loss, _their_loss),
    Rule(("train.adam_beta1", "train.adam_beta2", "train.lr_scheduler_type", "train.warmup_ratio", "train.warmup_steps",
          "train.lr_scheduler_kwargs.min_lr_rate"), _optimizer, _their_optimizer),
    Rule(("model.lora", "train.bf16", "train.fp16"), _weights, _their_weights),
    Rule(("sampling.vllm", "ppo.importance_sampling_cap"), _engine, _their_engine),
    Rule(("output_dir", "train.report_to", "resume"), _output, _their_output),
)  # fmt: skip
"""All that both systems can say."""


def translated(source: str, settings: Mapping[str, Any], *, file: str | None = None) -> Translation:
    """A PPO run of verl, translated to our keys.

    Args:
        source: the file, for messages.
        settings: their values by dotted key; a value that Hydra takes from another key by ``${…}`` counts as not set,
            and so does an empty group.
        file: configuration file of their own that a launch names; it is not read.

    Raises:
        ConfigError: it has no policy, no reward or no prompts.
    """
    given = {
        _current(key): value
        for key, value in settings.items()
        if not key.endswith("_target_") and value != {}
        and (isinstance(value, Unset) or not (isinstance(value, str) and value.startswith(("${", "???"))))
    }
    keys = Translator(source, SYSTEM, given, {}, {_current(key): key for key in settings})
    elsewhere = "" if file is None else f", in the script: the file {file} is not read"
    keys.need(f"{MODEL}.path", f"the policy{elsewhere}")
    former = next((key for key in given if key.rpartition(".")[2] in FORMER), None)
    if former is not None:
        keys.note(f"The defaults are those of verl before 0.3, which had the key {former}: no dual clip, an entropy "
                  "bonus of 0.001, and the KL in the reward.")  # fmt: skip
        keys.defaults = FORMER_DEFAULTS
    keys.put_table(TABLE, CRITIC)
    keys.need("data.train_files", "the prompts")
    keys.allow_truncation()
    for by, names in COVERED.items():
        keys.covered(*names, by=by)
    for key, (usual, why) in USUAL.items():
        keys.drop_unless(usual, why, key)
    for why, names in IGNORED.items():
        keys.ignore(why, *names)
    keys.ignore("it affects only placement and speed on a cluster", *(key for key in given if key.startswith(CLUSTER)))
    keys.drop_rest("it has no counterpart here")
    if file is not None:
        keys.note(f"The values in the file {file} are not read, only those that the script gives: where the file sets "
                  "another one, change it here.")  # fmt: skip
    return keys.finish(())


def launch(config: RunConfig, *, source: str) -> str:
    """A script that starts the same run, with comments that name what it cannot express.

    Args:
        source: our file, for the header.
    """
    given = [(f"{name}={_word(value)}",) for name, value in arguments(config, TABLE, CRITIC)]
    given += [(f"{ROLLOUT}.name=vllm",), (f"{ROLLOUT}.tensor_model_parallel_size=1",)]
    given += [(f"trainer.n_gpus_per_node={GPUS}",), ("trainer.nnodes=1",)]
    title = f"{SYSTEM}, from {source}; for one node of {GPUS} devices."
    eps = ["train.adam_epsilon"] * (config.train.adam_epsilon == ADAM_EPSILON)
    return script(config, TABLE, ["python3", "-m", MODULE], given, title=title, notes=_notes(config), written=eps)


def _notes(config: RunConfig) -> Iterator[str]:
    """What the reader must adjust by hand."""
    if len(config.rewards) > 1 or not isinstance(config.rewards[0], FunctionReward | ModelReward):
        yield "Their runs have one reward model or one function: adjust the reward's settings."
    if isinstance(config.rewards[0], FunctionReward):
        yield "Their function is compute_score(data_source, solution_str, ground_truth, extra_info)."
    yield "Their data are parquet files with the columns data_source, prompt (chat messages) and reward_model."
    if config.ppo.has_critic and config.value_kind != "model":
        yield f"Their critic is a model of its own, not one of kind {config.value_kind}."
    schedule, has_floor = config.train.lr_scheduler_type, "min_lr_rate" in config.train.lr_scheduler_kwargs
    if schedule not in ("cosine", "constant_with_warmup", "constant", *["cosine_with_min_lr"] * has_floor):
        yield f"Their schedules are constant and cosine, not {config.train.lr_scheduler_type}."
    if config.train.total_episodes is not None:
        yield f"Their runs last trainer.total_epochs epochs; ours lasted {config.train.total_episodes} answers."
    yield from reward_settings(config, *["arguments"] * isinstance(config.rewards[0], FunctionReward))


def _word(value: Any) -> str:
    """A value as Hydra reads it."""
    match value:
        case bool():
            return str(value)
        case list():
            return f"[{','.join(map(_word, value))}]"
        case dict():
            return "{" + ",".join(f"{name}:{_word(each)}" for name, each in value.items()) + "}"
        case None:
            return "null"
        case str() if not value.isprintable() or set(value) & set("=,[]{}() '\""):
            return "'" + value.replace("'", r"\'") + "'"
        case _:
            return str(value)
