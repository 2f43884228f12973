"""The inputs of a run, and the checks of them that are possible before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peft import PeftConfig, PeftType
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tether.config import launched
from tether.config.base import LARGEST_DEFAULT, divisors
from tether.config.keys import counted
from tether.config.places import FILE_OF
from tether.config.rewards import AdapterReward, FunctionReward, OwnModelReward, sources_of
from tether.config.schema import RunConfig
from tether.data.bad_rows import DROP_THEM, UNUSABLE, BadRows, Limit
from tether.data.demonstrations import Demonstration, DemonstrationData, load_demonstrations
from tether.data.digest import file_digest
from tether.data.joined import check_named
from tether.data.prompts import PromptData, load_prompts, split_prompts
from tether.data.queries import QueryFormat
from tether.errors import ConfigError, DataError, ModelError
from tether.generation.vllm import check_vllm, check_vllm_model
from tether.metrics.trackers import check_report_to
from tether.models.adapters import check_beside, check_switched_off, check_targets, check_tied, grown
from tether.models.attention import check_kernel
from tether.models.bitsandbytes import check_bitsandbytes
from tether.models.build import critic_source, policy_embeddings
from tether.models.chat import check_template, check_template_kwargs, templated
from tether.models.classifiers import check_classifier, check_has_classifier
from tether.models.compiled import check_compile
from tether.models.device import bf16_supported, default_device
from tether.models.fit import (
    check_language_model,
    check_positions,
    check_tokens,
    check_trainable,
    has_few_bits,
    steady_positions,
)
from tether.models.gguf import gguf_source
from tether.models.loading import load_config
from tether.models.paths import absolute_source, check_model_path, is_adapter, model_digest, model_errors, own_weights
from tether.models.tokenizer import end_token_ids, load_generation_config, load_tokenizer, stop_token_ids
from tether.rewards.build import check_contents, check_conversations, check_reward_columns, check_rewards
from tether.rewards.lengths import check_room
from tether.train.display import Display
from tether.train.optim import check_schedule
from tether.train.rollout import Answers
from tether.types import Completion, Message, Prompt, RewardBatch

logger = logging.getLogger(__name__)

OF_SCRIPT = "train_dataset"
"""``data.prompts`` of a run whose prompts were passed by a script that uses ``tether.compat.trl``."""


@dataclass(frozen=True)
class RunData:
    """The data of a run as token ids."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    prompts: PromptData
    """Prompts to train on."""
    eval_prompts: PromptData | None
    """Held-out prompts, if there are any."""
    ptx: DemonstrationData | None
    """Demonstrations of the SFT loss, if there is one."""

    @property
    def prompt_sets(self) -> list[PromptData]:
        """Prompts, and held-out prompts if there are any."""
        return [data for data in (self.prompts, self.eval_prompts) if data is not None]

    @property
    def held_out(self) -> Sequence[Prompt]:
        """The held-out prompts themselves; may be empty."""
        return self.eval_prompts.prompts if self.eval_prompts is not None else ()

    @property
    def demonstrations(self) -> Sequence[Demonstration]:
        """The demonstrations; none without the SFT loss."""
        return self.ptx.demonstrations if self.ptx is not None else ()


def check(config: RunConfig) -> None:
    """Raises for every mistake that can be found without loading a tokenizer or a model."""
    check_model_path(config.model.path, "model.path", revision=config.model.revision, takes_gguf=True)
    if config.model.quantization is not None:
        check_bitsandbytes(config.model.quantization, "model.quantization", default_device())
    if config.train.optim == "adamw_8bit":
        check_bitsandbytes("adamw_8bit", "train.optim", default_device())
    if config.train.compile:
        check_compile("train.compile", default_device())
    check_kernel(config.model.attn_implementation, default_device())
    if config.sampling.vllm is not None:
        check_vllm(config, default_device())
    check_template(config.data.chat_template)
    check_named(config.data, "prompts", "eval_prompts", "ptx")
    check_rewards(config.rewards)
    check_report_to(config.train.report_to)
    if (critic := config.value.init_path) is not None:
        check_model_path(critic, "value.init")
        if config.value_kind == "model":
            check_classifier(critic, "value.init", trust_remote_code=config.model.trust_remote_code)


def check_batches(config: RunConfig, num_processes: int) -> None:
    """Raises ``ConfigError`` if the batches cannot be divided over the processes."""
    rollout = config.train.rollout_batch_size
    if rollout < num_processes:
        raise ConfigError(
            f"train.rollout_batch_size: got {rollout}, wanted at least one answer for each of {num_processes} processes"
        )
    try:
        config.answers_at_once(num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def resolved(config: RunConfig, num_processes: int | None = None) -> RunConfig:
    """The configuration with those defaults filled in that depend on this machine and on the launcher.

    Args:
        num_processes: number of processes of the run. Default: those that were launched.
    """
    asked = launched.mixed_precision()
    bf16 = asked == "bf16" or bf16_supported(default_device())
    return config.resolved(
        bf16=bf16, fp16=asked == "fp16", num_processes=num_processes or launched.num_processes()
    )


def model_paths(config: RunConfig) -> dict[str, str]:
    """Key and path of every model that the run reads."""
    rewards = {
        f"{key}.path": reward.path
        for key, reward in sources_of(config.rewards)
        if isinstance(reward, AdapterReward | OwnModelReward)
    }
    critic = {} if config.value.init_path is None else {"value.init": config.value.init_path}
    return {"model.path": config.model.path} | rewards | critic


def place_digests(config: RunConfig) -> dict[str, str]:
    """Hashes of every model and file that the run reads from a folder, by key; see ``tether.config.places``."""
    files = {f"{key}.path": each.path for key, each in sources_of(config.rewards) if isinstance(each, FunctionReward)}
    files["data.chat_template"] = config.data.chat_template
    digests = {key: model_digest(path) for key, path in model_paths(config).items()}
    digests |= {f"{FILE_OF}{key}": file_digest(path) for key, path in files.items()}
    return {key: digest for key, digest in digests.items() if digest is not None}


def load_data(config: RunConfig) -> RunData:
    """Loads all data of the run as token ids."""
    model, data = config.model, config.data
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    tokenizer = templated(tokenizer, data.chat_template)
    check_template_kwargs(tokenizer, data.chat_template_kwargs)
    prompts, held_out = load_prompt_sets(config, tokenizer)
    return RunData(tokenizer, prompts, held_out, None if data.ptx is None else _demonstrations(config, tokenizer))


def load_prompt_sets(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptData, PromptData | None]:
    """Loads the prompts to train on, and the held-out prompts if there are any."""
    data = config.data
    prompts = _prompts(config, "prompts", tokenizer)
    if data.eval_prompts is not None:
        return prompts, _prompts(config, "eval_prompts", tokenizer)
    if not data.eval_fraction:
        return prompts, None
    prompts, held_out = split_prompts(prompts, data.eval_fraction, config.train.seed)
    if not held_out.prompts:
        raise DataError("data.eval_fraction: all rows of data.prompts have the same prompt, so none can be held out")
    return prompts, held_out


def _prompts(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    """The prompts under the key ``name``; without those that a reward source cannot score, if bad rows are dropped."""
    data = config.data
    limit = Limit(data.max_prompt_length, "data.max_prompt_length")
    read = load_prompts(data.source(name), QueryFormat(tokenizer, **data.chat), limit)
    if not data.drop_bad_rows:
        return read
    check_reward_columns(config.rewards, read.columns)
    try:
        check_contents(config.rewards, map(_named, read.prompts))
    except BadRows as error:
        kept = [prompt for prompt in read.prompts if _named(prompt)[2] not in error.errors]
        count = len(read.prompts) - len(kept)
        if not kept:
            raise
        logger.warning("data.%s: %d rows are left out, as rewards cannot use their columns:\n%s", name, count, error)
        note = f"{read.note}; {count} of these left out, as rewards cannot use their columns"
        return replace(read, prompts=kept, num_bad=read.num_bad + count, note=note)
    return read


def _named(prompt: Prompt) -> tuple[str | list[Message], Mapping[str, Any], str]:
    """A prompt, its other columns, and its name in messages."""
    return prompt.source, prompt.columns, f"row {prompt.row} of the prompts"


def _demonstrations(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DemonstrationData:
    model, data = config.model, config.data
    generation = load_generation_config(model.path, revision=model.revision)
    form, limit = QueryFormat(tokenizer, **data.chat), Limit(data.max_ptx_length, "data.max_ptx_length")
    return load_demonstrations(data.source("ptx"), form, limit, end_ids=end_token_ids(tokenizer, generation))


def check_data(config: RunConfig, data: RunData, *, has_policy: bool = True) -> list[str]:
    """Checks that need the data and the policy's configuration. Raises for: a column that a reward needs and that is
    missing or has unusable contents, tokens without an embedding, an unknown stop token, layers that the policy does
    not have, texts longer than the positions of the policy or a reward model, too few updates to train the policy,
    adapters of another base, and a critic that cannot start from ``value.init``.

    Args:
        has_policy: whether ``model.path`` is the policy itself, not what the policy is yet to be made from.

    Returns:
        Warnings about what may still go wrong.

    Raises:
        ConfigError, DataError: names the problem.
    """
    try:
        notes = check_judged(config, data.prompt_sets, data.tokenizer)
    except BadRows as error:
        if config.data.prompts == OF_SCRIPT:
            raise
        raise DataError(f"{error}\nCorrect or remove such rows, or set {DROP_THEM} to leave them out") from error
    notes = notes + _slow_passes(config) + _still(config)
    model = config.model
    base, revision = own_weights(model.path, model.revision)
    goes_on = model.lora is not None and is_adapter(model.path, model.revision)
    start = _peft_config(model.path, model.revision) if goes_on else None
    if start is not None:
        check_switched_off(model.path, start)
    shape = load_config(base, revision=revision, trust_remote_code=model.trust_remote_code)
    check_language_model(base, shape)
    if start is not None:
        check_tied(model.path, start, shape)
    _check_weights(config, shape)
    _check_tokens(config, data, grown(shape, model.path, model.revision))
    _check_layers(config, shape, is_fresh=base == model.path)
    _check_lengths(config, data, shape)
    _check_updates(config, len(data.prompts.prompts))
    if config.sampling.vllm is not None:
        check_vllm_model(config, grown(shape, model.path, model.revision), start)
    if critic_source(config, data.tokenizer) is None and config.value_kind == "model":
        check_has_classifier(shape, trust_remote_code=model.trust_remote_code)
    if has_policy:
        _check_adapters(config, base, PeftType.LORA if start is None else start.peft_type)
    return notes


def _slow_passes(config: RunConfig) -> list[str]:
    """A warning about a mini-batch that only few answers at a time divide; none with a token budget."""
    rows, mini = config.train.micro_batch_size, config.mini_batch_size
    if rows is None or mini <= LARGEST_DEFAULT or divisors(mini, most=LARGEST_DEFAULT)[0] >= LARGEST_DEFAULT // 2:
        return []
    return [
        f"train.micro_batch_size is {rows}, as no number from {LARGEST_DEFAULT // 2} to {LARGEST_DEFAULT} divides the "
        f"mini-batch size {mini}, and passes over few answers take longer; a multiple of {LARGEST_DEFAULT} is faster: "
        "change train.rollout_batch_size or ppo.num_mini_batches, or set train.max_tokens_per_micro_batch"
    ]


def check_judged(
    config: RunConfig, prompt_sets: Sequence[PromptData], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Checks that a run's reward sources can score answers to these prompts.

    Returns:
        Warnings about what may prevent them from scoring some answers.

    Raises:
        ConfigError, DataError: a column is missing or has contents that a source cannot use, the chat template of a
            reward model rejects a conversation, or prompts leave no room for answers.
    """
    for prompts in prompt_sets:
        check_reward_columns(config.rewards, prompts.columns)
    every = [prompt for prompts in prompt_sets for prompt in prompts.prompts]
    now = config.data.chat_template_now
    check_conversations(config.rewards, every, tokenizer, now)
    check_contents(config.rewards, map(_named, every))
    longest, rows = config.sampling.response_length, policy_embeddings(config)
    return check_room(config.rewards, every, tokenizer, longest, rows, now)


def first_answer(data: RunData) -> RewardBatch:
    """A made-up answer to the first prompt, with the columns of its row, to try reward sources on."""
    text = "Hello."
    ids = data.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Answers(data.prompts.prompts[:1], [Completion(ids, "length")], [text]).reward_batch(data.tokenizer)


def _still(config: RunConfig) -> list[str]:
    """A warning if the run leaves the policy as it is, which is a check and no training."""
    return ["train.learning_rate is 0: the policy stays as it is"] if config.learning_rate == 0 else []


def _check_weights(config: RunConfig, shape: PreTrainedConfig) -> None:
    """Checks quantized weights: those that a checkpoint itself stores in few bits are used as they are, and frozen."""
    check_trainable(config.model.path, shape, with_lora=config.model.lora is not None)
    if has_few_bits(shape) and config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization {config.model.quantization}: the weights of {config.model.path} are already "
            "quantized; remove this key"
        )


def _check_tokens(config: RunConfig, data: RunData, shape: PreTrainedConfig) -> None:
    texts = [("prompt", prompt.row, prompt.token_ids) for each in data.prompt_sets for prompt in each.prompts]
    texts += [("demonstration", each.row, each.query_ids + each.response_ids) for each in data.demonstrations]
    check_tokens(config.model.path, shape, data.tokenizer, texts)
    size = shape.get_text_config().vocab_size
    if config.sampling.stop_token not in (None, "eos"):
        (stop,) = stop_token_ids(data.tokenizer, None, config.sampling.stop_token)
        if stop >= size:
            raise ConfigError(
                f"sampling.stop_token {config.sampling.stop_token} has id {stop}, but the model has only {size} tokens"
            )


def _check_layers(config: RunConfig, shape: PreTrainedConfig, *, is_fresh: bool) -> None:
    """``is_fresh``: the policy starts from a full model, so a LoRA adapter is new."""
    model, layers = config.model, shape.get_text_config().num_hidden_layers
    if model.freeze_layers >= layers:
        raise ConfigError(
            f"model.freeze_layers {model.freeze_layers}: the model has {counted(layers, 'layer')}, so none would be "
            f"trained. Set it below {layers}"
        )
    if model.lora is not None and is_fresh:
        check_targets(model.lora, shape, trust_remote_code=model.trust_remote_code)


def _check_lengths(config: RunConfig, data: RunData, shape: PreTrainedConfig) -> None:
    longest = max(each.longest_query for each in data.prompt_sets)
    answer, budget = config.sampling.response_length, config.train.max_tokens_per_micro_batch
    if budget is not None and longest + answer > budget:
        raise ConfigError(
            f"train.max_tokens_per_micro_batch {budget} is less than one answer may need: the longest query has "
            f"{counted(longest, 'token')}, sampling.response_length is {answer}. Set it to at least {longest + answer}"
        )
    words = {"key": "sampling.response_length", "way_out": "lower it, or data.max_prompt_length"}
    check_positions(shape, longest, answer, **words)
    limit = steady_positions(shape)
    longest = max((each.num_tokens for each in data.demonstrations), default=0)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_ptx_length {config.data.max_ptx_length}: the longest demonstration in {config.data.ptx} has "
            f"{longest} tokens, the model has {limit} positions. Set it to at most {limit}"
        )


def _check_adapters(config: RunConfig, base: str, kind: PeftType) -> None:
    """Checks that reward adapters, and one that the critic is copied from, fit the policy's base next to its adapter.

    Args:
        base: the policy's base.
        kind: PEFT method of the policy's adapter.
    """
    model = config.model
    if model.lora is None or gguf_source(model.path) is not None:  # the base of a GGUF file is not written yet
        return
    sources = {f"{key}.path": each.path for key, each in sources_of(config.rewards) if isinstance(each, AdapterReward)}
    if config.value_kind == "adapter" and config.value.init_path is not None:
        sources["value.init"] = config.value.init_path
    for key, path in sources.items():
        try:
            check_beside(path, _peft_config(path), kind, absolute_source(base))
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from error


def _check_updates(config: RunConfig, num_prompts: int) -> None:
    updates = config.num_updates(num_prompts)
    if config.value.warmup_steps >= updates:
        raise ConfigError(
            f"value.warmup_steps {config.value.warmup_steps}: the run has {counted(updates, 'update')}, so the policy "
            f"would never be trained. Set it below {updates}"
        )
    check_schedule(config, updates)


def _peft_config(path: str, revision: str | None = None) -> PeftConfig:
    """Configuration of the adapter in ``path``."""
    with model_errors(path):
        return PeftConfig.from_pretrained(path, revision=revision)


def tell_data(config: RunConfig, data: RunData, display: Display) -> None:
    """Shows how many prompts there are, which were dropped, and how they fill the updates."""
    display.message(f"prompts: {data.prompts.note}")
    if data.eval_prompts is not None:
        display.message(f"held-out prompts: {data.eval_prompts.note}")
        trained = {prompt.text for prompt in data.prompts.prompts}
        if all(prompt.text in trained for prompt in data.eval_prompts.prompts):
            display.message(
                "warning: every held-out prompt is also trained on, so eval_scores says nothing about new prompts; set "
                "data.eval_split to another split, or data.eval_fraction to hold out prompts of data.prompts"
            )
    if data.ptx is not None:
        dropped = f", {data.ptx.num_too_long} of them dropped as too long" if data.ptx.num_too_long else ""
        dropped += f", {data.ptx.num_unanswered} without an answer" if data.ptx.num_unanswered else ""
        dropped += f", {data.ptx.num_bad} left out as {UNUSABLE}" if data.ptx.num_bad else ""
        display.message(f"demonstrations: {config.data.ptx}: {counted(data.ptx.num_rows, 'row')}{dropped}")
    if config.sampling.is_truncated:
        display.message(
            "warning: with sampling.top_p or top_k, answers do not come from the distribution whose ratio and KL are "
            "computed. Both are biased: the policy can lower the measured KL, even below 0, by changing the "
            "probability of tokens that are never sampled"
        )
    prompts = data.prompts.prompts
    display.message(f"the first query as the policy reads it: {data.tokenizer.decode(prompts[0].token_ids)!r}")
    size, asked = config.train.rollout_batch_size, config.prompts_per_update
    updates, count = config.num_updates(len(prompts)), len(prompts)
    if count < asked:
        told = f"{counted(count, 'prompt')}, fewer than the {asked} of an update"
        display.message(f"{told}: each update cycles through them")
    display.message(
        f"{counted(updates, 'update')} of {counted(size, 'answer')} = {counted(updates * size, 'episode')}; passes "
        f"over the prompts: {updates * asked / count:.3g}"
    )
