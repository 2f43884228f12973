"""Translates OpenRLHF's launch arguments, in the spelling of release 0.11 or of earlier ones, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tether.compat.table import (
    COLUMN,
    COUNT,
    FLAG,
    GPUS,
    JOINED,
    NAME,
    NO_LIMIT,
    TOP_P,
    WHOLE,
    Form,
    Key,
    Rule,
    arguments,
    below,
    constant,
    estimator,
    reward_settings,
    script,
    words,
)
from tether.compat.translation import Translation, Translator
from tether.config.keys import counted
from tether.config.rewards import FunctionReward, HttpReward, ModelReward
from tether.config.schema import RunConfig, VLLMConfig

SYSTEM = "OpenRLHF"
MODULE = "openrlhf.cli.train_ppo_ray"

ESTIMATORS = {"gae": "gae", "reinforce": "reinforce_pp", "rloo": "rloo", "group_norm": "grpo"}
CRITIC = ("critic.",)
"""Beginnings of the keys of the critic."""
BASELINE = "reinforce_baseline"
REDUCTIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
CORRECTION = tuple(f"algo.advantage.is_correction_{name}" for name in ("enable", "type", "threshold"))
ALL = 10**8
"""Their number of prompts that stands for all of them."""
RESUMES = Form(
    lambda keys, key: keys.take(key.theirs) and None, lambda checkpoint: bool(checkpoint) or None,
    kept="--resume continues from a checkpoint",
)  # fmt: skip
KEYS = (
    Key("model.path", "actor.model_name_or_path", former="pretrain"),
    Key("train.learning_rate", "actor.adam.lr", 1e-6, former="actor_learning_rate"),
    Key("value.learning_rate", "critic.adam.lr", 9e-6, former="critic_learning_rate"),
    Key("value.warmup_steps", "critic.freezing_steps", form=COUNT, former="freezing_actor_steps"),
    Key("value.save", "critic.save_value_network", form=FLAG, former="save_value_network"),
    Key("train.adam_epsilon", "actor.adam.eps", 1e-8, former="adam_eps"),
    Key("train.weight_decay", "actor.adam.weight_decay", 0.0, former="l2"),
    Key("train.lr_scheduler_type", "actor.lr_scheduler", "cosine_with_min_lr", former="lr_scheduler"),
    Key("train.warmup_ratio", "actor.lr_warmup_ratio", 0.03, former="lr_warmup_ratio"),
    Key("train.max_grad_norm", "actor.max_norm", 1.0, former="max_norm"),
    Key("train.gradient_checkpointing", "actor.gradient_checkpointing_enable", form=FLAG,
        former="gradient_checkpointing"),
    Key("ppo.kl_coef", "algo.kl.init_coef", 0.01, former="init_kl_coef"),
    Key("ppo.kl_estimator", "algo.kl.estimator", "k1", former="kl_estimator"),
    Key("ppo.kl_in", "algo.kl.use_loss", form=constant("loss"), former="use_kl_loss"),
    Key("ppo.dual_clip", "actor.dual_clip", former="dual_clip"),
    Key("ppo.cliprange_value", "critic.value_clip", 0.5, former="value_clip"),
    Key("ppo.gamma", "algo.advantage.gamma", 1.0, former="gamma"),
    Key("ppo.lam", "algo.advantage.lambd", 1.0, former="lambd"),
    Key("ppo.entropy_coef", "actor.entropy_coef", 0.0, former="entropy_loss_coef"),
    Key("ppo.loss_reduction", "actor.loss_agg_mode", "token-mean", words(REDUCTIONS, "token_mean"),
        former="loss_agg_mode"),
    Key("ppo.num_ppo_epochs", "train.max_epochs", 1, former="max_epochs"),
    Key("ppo.overlong_buffer", "reward.overlong_buffer_len", former="overlong_buffer_len"),
    Key("ppo.overlong_penalty", "reward.overlong_penalty_factor", 1.0, former="overlong_penalty_factor"),
    Key("sampling.num_generations", "rollout.n_samples_per_prompt", 1, former="n_samples_per_prompt"),
    Key("sampling.temperature", "rollout.temperature", 1.0, former="temperature"),
    Key("sampling.top_p", "rollout.top_p", 1.0, TOP_P, former="top_p"),
    Key("data.prompts", "data.prompt_dataset", form=JOINED, former="prompt_data"),
    Key("data.split", "data.prompt_split", "train", former="prompt_split"),
    Key("data.eval_prompts", "eval.dataset", form=JOINED, former="eval_dataset"),
    Key("data.eval_split", "eval.split", "train", former="eval_split"),
    Key("data.columns.prompt", "data.input_key", "input", COLUMN, former="input_key"),
    Key("data.chat_template", "data.apply_chat_template", form=constant("none", when=False),
        former="apply_chat_template"),
    Key("data.max_samples", "data.max_samples", ALL, below(ALL), former="max_samples"),
    Key("train.num_train_epochs", "train.num_episodes", 1, former="num_episodes"),
    Key("train.seed", "train.seed", 42, former="seed"),
    Key("train.logging_steps", "logger.logging_steps", 1, former="logging_steps"),
    Key("train.run_name", "logger.wandb.run_name", form=NAME, former="wandb_run_name"),
    Key("train.eval_steps", "eval.steps", form=COUNT, former="eval_steps", needs="eval.dataset"),
    Key("train.save_steps", "ckpt.save_steps", form=COUNT, former="save_steps"),
    Key("train.save_total_limit", "ckpt.max_num", 3, former="max_ckpt_num"),
    Key("output_dir", "ckpt.output_dir", "./ckpt", former="save_path"),
    Key("resume", "ckpt.load_enable", form=RESUMES, former="load_checkpoint"),
)  # fmt: skip
"""Keys that stand for one of ours, and how they are spelled there and were before release 0.11."""
LORA = (
    Key("model.lora.r", "ds.lora.rank", former="lora_rank"),
    Key("model.lora.alpha", "ds.lora.alpha", 16, WHOLE, former="lora_alpha"),
    Key("model.lora.dropout", "ds.lora.dropout", former="lora_dropout"),
    Key("model.lora.target_modules", "ds.lora.target_modules", "all-linear", former="target_modules"),
)
"""Those of LoRA."""
OLD = {
    **{key.former: key.theirs for key in KEYS + LORA},
    "reward_pretrain": "reward.model_name_or_path", "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url", "adam_betas": "actor.adam.betas", "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon", "eps_clip": "actor.eps_clip", "eps_clip_low_high": "actor.eps_clip_low_high",
    "advantage_estimator": "algo.advantage.estimator", "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size", "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size", "generate_max_len": "rollout.max_new_tokens",
    "reward_clip_range": "reward.clip_range", "normalize_reward": "reward.normalize_enable",
    "fsdp.param_dtype": "ds.param_dtype", "fsdp.packing_samples": "ds.packing_samples",
    "fsdp.load_in_4bit": "ds.load_in_4bit",
    **{key.theirs.replace("ds.", "fsdp."): key.theirs for key in LORA},
    "label_key": "data.label_key", "input_template": "data.input_template", "max_len": "data.max_len",
    "enable_ema": "train.enable_ema", "ema_beta": "train.ema_beta", "load_in_4bit": "ds.load_in_4bit",
    "param_dtype": "ds.param_dtype", "packing_samples": "ds.packing_samples",
    "use_dynamic_batch": "train.dynamic_batch_enable", "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "use_wandb": "logger.wandb.key", "use_tensorboard": "logger.tensorboard_dir",
    "ref_pretrain": "ref.model_name_or_path", "policy_loss_type": "actor.policy_loss_type",
    "min_lr_ratio": "actor.min_lr_ratio",
    "max_new_tokens": "rollout.max_new_tokens", "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "agent_func_path": "train.agent_func_path", "ckpt_path": "ckpt.path", "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds", "max_ckpt_mem": "ckpt.max_mem", "wandb_project": "logger.wandb.project",
    "wandb_org": "logger.wandb.org", "wandb_group": "logger.wandb.group", "vllm_num_engines": "vllm.num_engines",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization", "vllm_enable_sleep": "vllm.enable_sleep",
    "vllm_enable_is_correction": CORRECTION[0], "enable_vllm_is_correction": CORRECTION[0],
    "vllm_is_correction_type": CORRECTION[1], "vllm_is_truncated_threshold": CORRECTION[2],
    "enforce_eager": "vllm.enforce_eager", "colocate_all_models": "train.colocate_all",
}  # fmt: skip
"""Spellings of releases before 0.11, and of the FSDP2 engine; ``prompt_max_len`` has no new spelling."""
IGNORED = {
    "a checkpoint is a folder of its own in output_dir, which transformers loads": (
        "ckpt.path", "ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_mem",
    ),
    "they come from the environment: WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP": (
        "logger.wandb.project", "logger.wandb.org", "logger.wandb.group",
    ),
    "answers are decoded in batches of sampling.batch_size": ("rollout.micro_batch_size",),
    "rows are sorted by length here": ("ds.packing_samples",),
}  # fmt: skip
"""Keys that have no effect here, by reason."""
DROPPED = {
    "theirs is in nats per token: ppo.kl_target is in nats per answer": ("algo.kl.target", "algo.kl.horizon"),
    "theirs are the reward model's own statistics: use rewards.N.norm": ("reward.normalize_enable",),
    "theirs is a factor: use ppo.missing_eos_penalty or ppo.missing_eos_score": ("reward.stop_properly_penalty_coef",),
    "name a Jinja file with the same text in data.chat_template, such as User: {{ messages[-1].content }}": (
        "data.input_template",
    ),
    "answers are those of the policy that is trained here, not of an earlier one": (
        "async_train", "train.async_enable", "train.async_queue_size", "partial_rollout",
        "train.partial_rollout_enable",
    ),
}  # fmt: skip
"""Keys that have no counterpart, by what to do instead."""
CLUSTER = (
    "vllm.", "vllm_sync_", "vllm_tensor_", "vllm_max_", "vllm_generate_", "ds.", "fsdp.", "fsdp2_", "deepspeed", "zero",
    "colocate", "train.colocate",
)  # fmt: skip
"""Beginnings of keys that affect only placement and speed on a cluster."""
PLACES = ("num_nodes", "num_gpus_per_node", "offload", "adam_offload", "ref_reward_offload", "flash_attn", "bf16",
          "param_dtype", "local_rank", "use_ms", "enforce_eager", "enable_prefix_caching", "overlap_comm",
          "grad_accum_dtype", "attn_implementation", "use_liger_kernel", "dataloader_num_workers", "actor_init_on_gpu",
          "gradient_checkpointing_use_reentrant", "ring_attn_size", "ring_head_stride",
          "disable_fast_tokenizer", "inference_tp_size", "max_tokens_per_gpu")  # fmt: skip
"""Last parts of such keys."""


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
    keys.covered("data.label_key", by="columns reach reward functions under their own names")


def _their_rewards(config: RunConfig) -> Iterator[tuple[str, Any]]:
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


def _estimator(keys: Translator) -> None:
    keys.estimator("algo.advantage.estimator", ESTIMATORS, BASELINE)
    if keys.take("algo.advantage.estimator") == BASELINE:
        keys.note("The KL of a whole answer counts for each of its tokens; OpenRLHF's counts from the token on.")


def _critic(keys: Translator) -> None:
    """A separate model, initialized from the reward model by default."""
    if keys.has_critic:
        keys.put("value.kind", "model")
        keys.put_init("critic.model_name_or_path", "actor.model_name_or_path", "reward.model_name_or_path")


def _their_critic(config: RunConfig) -> Iterator[tuple[str, Any]]:
    if config.ppo.has_critic and config.value.init not in (None, "reward"):
        yield "critic.model_name_or_path", config.model.path if config.value.init == "policy" else config.value.init


def _lengths(keys: Translator) -> None:
    """Their lengths, and those of answers."""
    whole, answer = keys.number("data.max_len", 2048), keys.number("rollout.max_new_tokens", 0)
    if not answer:
        answer = whole // 2
        whole_key = keys.name("data.max_len")
        keys.note(f"Answers of up to {answer} tokens; in OpenRLHF they may fill what is left of {whole_key}.")
    keys.put("sampling.response_length", answer, "rollout.max_new_tokens")
    prompt = keys.number("prompt_max_len", 0) or max(1, whole - answer)
    keys.put("data.max_prompt_length", prompt, "prompt_max_len" if keys.gives("prompt_max_len") else "data.max_len")


def _their_lengths(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "data.max_len", config.data.max_prompt_length + config.sampling.response_length
    yield "rollout.max_new_tokens", config.sampling.response_length


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


def _their_batches(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "rollout.batch_size", config.prompts_per_update
    yield "train.batch_size", config.mini_batch_size
    if config.train.max_tokens_per_micro_batch is not None:
        yield "train.dynamic_batch_enable", True
        yield "train.max_tokens_per_gpu", config.train.max_tokens_per_micro_batch
    else:
        yield "train.micro_batch_size", config.max_rows_per_micro_batch()


def _bounds(keys: Translator) -> None:
    """Bounds of the ratio, which may differ, and of the score."""
    low, high = keys.pair("actor.eps_clip_low_high", (keys.take("actor.eps_clip", 0.2),) * 2)
    keys.put("ppo.cliprange", low, *(key for key in ("actor.eps_clip_low_high", "actor.eps_clip") if keys.gives(key)))
    if high != low:
        keys.put("ppo.cliprange_high", high, "actor.eps_clip_low_high")
    keys.covered("actor.eps_clip", by="ppo.cliprange")
    low, high = keys.pair("reward.clip_range", (-10, 10))
    sources = keys.config.get("rewards", [])
    if low == -high:
        keys.put("ppo.reward_clip", high if high < NO_LIMIT else None, "reward.clip_range")
    elif len(sources) == 1:
        keys.put("rewards", [sources[0] | {"clip": [low, high]}], "reward.clip_range")
    keys.drop("of several rewards each has bounds of its own: rewards.N.clip", "reward.clip_range")


def _their_bounds(config: RunConfig) -> Iterator[tuple[str, Any]]:
    ppo = config.ppo
    yield "actor.eps_clip_low_high", [ppo.cliprange, ppo.cliprange_high or ppo.cliprange]
    bound = ppo.reward_clip if ppo.reward_clip is not None else NO_LIMIT
    yield "reward.clip_range", [-bound, bound]


def _optimizer(keys: Translator) -> None:
    """Both decays, the learning rate's floor, and the average of weights."""
    keys.put_betas("actor.adam.betas", (0.9, 0.95))
    if str(keys.take("actor.lr_scheduler", "cosine_with_min_lr")).endswith("min_lr"):
        least = keys.take("actor.min_lr_ratio", 0.1)
        keys.put("train.lr_scheduler_kwargs", {"min_lr_rate": least}, "actor.min_lr_ratio")
    if keys.flag("train.enable_ema"):
        keys.put("train.ema_decay", keys.take("train.ema_beta", 0.992), "train.enable_ema", "train.ema_beta")


def _their_optimizer(config: RunConfig) -> Iterator[tuple[str, Any]]:
    train = config.train
    yield "actor.adam.betas", [train.adam_beta1, train.adam_beta2]
    yield "actor.min_lr_ratio", train.lr_scheduler_kwargs.get("min_lr_rate", 0.0)
    if train.ema_decay is not None:
        yield "train.enable_ema", True
        yield "train.ema_beta", train.ema_decay


def _weights(keys: Translator) -> None:
    """LoRA, and the type of weights."""
    if keys.number("ds.lora.rank", 0):
        keys.put_table(LORA)
        if keys.flag("ds.load_in_4bit"):
            keys.put("model.quantization", "4bit", "ds.load_in_4bit")
    keys.drop("quantized weights cannot be trained themselves: add model.lora", "ds.load_in_4bit")
    if keys.gives("bf16") or keys.gives("ds.param_dtype"):
        dtype = keys.take("ds.param_dtype", "bf16")
        ours, value = ("train.fp16", True) if dtype == "fp16" else ("train.bf16", dtype == "bf16")
        keys.put(ours, value, "bf16", "ds.param_dtype")


def _their_weights(config: RunConfig) -> Iterator[tuple[str, Any]]:
    if config.model.lora is not None:
        yield from arguments(config, LORA)
    if config.train.bf16 or config.train.fp16:
        yield "ds.param_dtype", "fp16" if config.train.fp16 else "bf16"


def _engine(keys: Translator) -> None:
    """vLLM, on the devices that train or on its own there, and the weights that correct its rounding."""
    if not any(key.startswith("vllm.") for key in keys.given):
        keys.ignore("transformers generates the answers", *CORRECTION, "use_icepop")
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
    is_on, is_truncated = keys.flag(enabled), keys.take(kind, "tis") == "tis" and not keys.flag("use_icepop")
    is_one = isinstance(keys.take(bounds), int | float)  # before 0.9
    low, high = (0, keys.take(bounds)) if is_one else keys.pair(bounds, (0.5, 5))
    keys.put("ppo.importance_sampling_cap", high if is_on and is_truncated else None, enabled)
    if is_on and is_truncated:
        keys.covered(kind, bounds, by="ppo.importance_sampling_cap")
        if low > 0:
            keys.note(f"Weights have no lower bound here; in OpenRLHF they are at least {low:g}.")
    elif is_on:
        keys.drop("weights are truncated here: set ppo.importance_sampling_cap", kind, "use_icepop", bounds)
    keys.ignore("there are no weights", kind, "use_icepop", bounds)


def _their_engine(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Without vLLM there is no run there."""
    engine = config.sampling.vllm or VLLMConfig(gpu_memory_utilization=0.5, enable_sleep_mode=True)
    yield "vllm.gpu_memory_utilization", engine.gpu_memory_utilization
    for name, is_on in (("enable_sleep", engine.enable_sleep_mode), ("enforce_eager", engine.enforce_eager)):
        if is_on:
            yield f"vllm.{name}", True
    if (cap := config.importance_cap) is not None:
        enabled, kind, bounds = CORRECTION
        yield from ((enabled, True), (kind, "tis"), (bounds, [0, cap]))


def _trackers(keys: Translator) -> None:
    trackers = [name for name, key in (("wandb", "logger.wandb.key"), ("tensorboard", "logger.tensorboard_dir"))
                if keys.gives(key)]  # fmt: skip
    if trackers:
        keys.put("train.report_to", trackers, "logger.wandb.key", "logger.tensorboard_dir")


def _their_trackers(config: RunConfig) -> Iterator[tuple[str, Any]]:
    if "tensorboard" in config.train.report_to:
        yield "logger.tensorboard_dir", f"{config.output_dir}/logs"


TABLE = (
    Rule(("ppo.advantage_estimator",), _estimator,
         lambda config: [("algo.advantage.estimator", estimator(config, ESTIMATORS, BASELINE))]),
    *KEYS,
    Rule(("rewards",), _rewards, _their_rewards),
    Rule(("value.kind", "value.init"), _critic, _their_critic),
    Rule(("data.max_prompt_length", "sampling.response_length"), _lengths, _their_lengths),
    Rule(("train.rollout_batch_size", "train.micro_batch_size", "train.max_tokens_per_micro_batch",
          "ppo.num_mini_batches"), _batches, _their_batches),
    Rule(("ppo.cliprange", "ppo.cliprange_high", "ppo.reward_clip"), _bounds, _their_bounds),
    Rule(("train.adam_beta1", "train.adam_beta2", "train.lr_scheduler_kwargs", "train.ema_decay"), _optimizer,
         _their_optimizer),
    Rule(("model.lora", "train.bf16", "train.fp16"), _weights, _their_weights),
    Rule(("sampling.vllm", "ppo.importance_sampling_cap"), _engine, _their_engine),
    Rule(("train.report_to",), _trackers, _their_trackers),
)  # fmt: skip
"""All that both systems can say."""


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
    keys.need("actor.model_name_or_path", "the policy")
    keys.put_table(TABLE, CRITIC)
    keys.need("data.prompt_dataset", "the prompts")
    keys.allow_truncation()
    for why, names in IGNORED.items():
        keys.ignore(why, *names)
    for why, names in DROPPED.items():
        keys.drop(why, *names)
    keys.drop_unless(keys.take("actor.model_name_or_path"), "the reference is the policy that the run starts from",
                     "ref.model_name_or_path")  # fmt: skip
    keys.drop_unless("ppo", "the loss is PPO's clipped one here", "actor.policy_loss_type")
    for key in given:
        if key.startswith(CLUSTER) or key.rpartition(".")[2] in PLACES or key.endswith(PLACES):
            keys.ignore("it affects only placement and speed on a cluster", key)
    keys.drop_rest("it has no counterpart here")
    return keys.finish(())


def launch(config: RunConfig, *, source: str) -> str:
    """A script that starts the same run on a Ray cluster, with comments that name what it cannot express.

    Args:
        source: our file, for the header.
    """
    given = [(f"--{name}", *_words(value)) for name, value in arguments(config, TABLE, CRITIC)]
    given += [(f"--{role}.num_gpus_per_node", str(GPUS)) for role in _roles(config)]
    given += [("--train.colocate_all",), ("--vllm.num_engines", str(GPUS)), ("--ds.enable_sleep",)]
    program = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", "python3", "-m", MODULE]
    title = f"{SYSTEM}, from {source}; for one node of {GPUS} devices."
    return script(config, TABLE, program, given, title=title, notes=_notes(config))


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
