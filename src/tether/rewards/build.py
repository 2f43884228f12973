"""From configuration to reward sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config.rewards import (
    AdapterReward,
    ColumnReward,
    EnsembleReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    ModelReward,
    OwnModelReward,
    ReadyReward,
    RewardConfig,
    ServiceReward,
    ValueHeadReward,
    reward_names,
    sources_of,
)
from tether.data.bad_rows import every
from tether.errors import ConfigError, DataError, ModelError, RewardError
from tether.models.bitsandbytes import FewBits, check_bitsandbytes, is_quantized, placed
from tether.models.classifiers import (
    check_adapter_head,
    check_classifier,
    check_value_head,
    load_reward_model,
    load_value_head_model,
    reads_last_token,
)
from tether.models.compiled import compile_whole
from tether.models.device import bf16_supported, default_device, weight_dtype
from tether.models.fit import has_few_bits
from tether.models.heads import value_head_file
from tether.models.loading import load_config
from tether.models.offload import Offloaded, has_own_memory
from tether.models.paths import check_model_path, is_adapter
from tether.models.roles import ModelRoles
from tether.models.tokenizer import load_tokenizer
from tether.rewards.adapter import AdapterSource
from tether.rewards.base import NotAScore
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.encoder import EncoderSource
from tether.rewards.ensemble import Ensemble, reduction
from tether.rewards.foreign import check_truth
from tether.rewards.function import FunctionSource, check_columns, load_function
from tether.rewards.http import check_sent_columns, check_sent_values, http_source
from tether.rewards.judge import NoNumber, judge_source
from tether.rewards.missing import Missing
from tether.rewards.model import ModelSource
from tether.rewards.reading import Reader, same_tokenizer
from tether.rewards.ready import check_ready, check_ready_column, check_value, ready_source
from tether.rewards.service import NoScore, service_key
from tether.types import Prompt, RewardBatch, RewardSource


@dataclass(frozen=True)
class ToSpread:
    """A source whose weights wait on the CPU for an engine to shard them over processes."""

    source: ModelSource | EncoderSource
    """The source, whose ``through`` will be the engine."""
    modules: Sequence[nn.Module]
    """Its model, and its head if that is not part of the model."""
    waits: bool = False
    """Whether each process's shard stays on the CPU while not scoring."""


Make = Callable[[int | None], RewardSource | ToSpread]
"""Makes a source for one process, given its maximum number of requests in flight; None if there is no such limit."""
Shared = Callable[[Make, int | None, bool], RewardSource]
"""A source made once for all processes: its maker, how many requests all may have in flight together, and whether only
the first process has it."""


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Checks everything about reward sources that can be checked before a model is loaded.

    Files and folders are there, functions load and take ``prompts`` and ``completions``, classifiers have one label or
    the one that is named, keys of services are set, packages are installed.

    Raises:
        ConfigError, ModelError: the first mistake, with its key.
    """
    for key, config in sources_of(configs):
        if isinstance(config, OwnModelReward) and config.quantization is not None:
            check_bitsandbytes(config.quantization, f"{key}.quantization", default_device())
        match config:
            case FunctionReward():
                _function(config, key)
            case AdapterReward():
                check_model_path(config.path, f"{key}.path")
                _check_reward_adapter(config.path, f"{key}.path")
            case ModelReward():
                check_model_path(config.path, f"{key}.path", revision=config.revision)
                check_classifier(
                    config.path,
                    f"{key}.path",
                    revision=config.revision,
                    trust_remote_code=config.trust_remote_code,
                    label=config.label,
                    label_key=f"{key}.label",
                )
            case ValueHeadReward():
                check_model_path(config.path, f"{key}.path", revision=config.revision)
                check_value_head(config.path, f"{key}.path")
            case ReadyReward():
                check_ready(config, key)
            case ServiceReward():
                service_key(config, key)


def _function(config: FunctionReward, key: str) -> Callable[..., Any]:
    """The function that a section names, with its arguments."""
    return load_function(config.path, config.name, key, config.label, config.arguments)


def check_reward_columns(configs: Sequence[RewardConfig], columns: Sequence[str]) -> None:
    """Checks that reward sources find the columns that they require.

    Args:
        columns: the dataset's columns besides the prompt.

    Raises:
        ConfigError: the first that is missing, with the key of what requires it.
    """
    for key, config in sources_of(configs):
        match config:
            case FunctionReward():
                check_columns(_function(config, key), columns, config.name, key)
            case ColumnReward():
                check_ready_column(config, columns, key)
            case HttpReward():
                check_sent_columns(config, columns, key)


def check_contents(configs: Sequence[RewardConfig], rows: Iterable[tuple[Any, Mapping[str, Any], str]]) -> None:
    """Checks that ready-made rewards can use their column in every row, that services can be sent every row, and that
    functions of verl find a ground truth.

    Args:
        rows: prompt, other columns and name of each row.

    Raises:
        BadRows: some that they cannot use; names the reward's key and the rows.
    """
    sources = {
        key: config
        for key, config in sources_of(configs)
        if isinstance(config, ColumnReward | FunctionReward)
        or (isinstance(config, HttpReward) and config.protocol == "tether")
    }
    functions = {
        key: _function(config, key)
        for key, config in sources.items()
        if isinstance(config, FunctionReward)
    }

    def check(prompt: Any, columns: Mapping[str, Any], where: str) -> None:
        for key, config in sources.items():
            try:
                match config:
                    case HttpReward():
                        check_sent_values(config, prompt, columns)
                    case FunctionReward():
                        check_truth(functions[key], columns)
                    case _:
                        check_value(config, columns.get(config.column))
            except ValueError as error:
                raise DataError(f"{where}, for {key}: column {config.column} {error}") from error
            except RewardError as error:
                raise DataError(f"{where}, for {key}: {error}") from error

    if sources and (given := list(rows)):
        prompts, columns, places = zip(*given, strict=True)
        every(check, places, prompts, columns)


def check_conversations(
    configs: Sequence[RewardConfig],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    now: str | None = None,
) -> None:
    """Checks that judges that read text can be shown the prompts; loads tokenizers only.

    Args:
        prompts: prompts, of which one conversation is tried for each order of roles.
        tokenizer: the policy's.
        now: as in ``Reader``.

    Raises:
        ConfigError: a judge has no chat template for conversations, or it refuses one; names the prompt's row.
    """
    shapes: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        shapes.setdefault(tuple(message["role"] for message in prompt.conversation or ()), prompt)
    for key, config in sources_of(configs):
        if not isinstance(config, OwnModelReward) or config.input_format not in ("auto", "chat"):
            continue
        own = load_tokenizer(config.path, revision=config.revision, trust_remote_code=config.trust_remote_code)
        if config.input_format == "auto" and same_tokenizer(own, tokenizer):
            continue
        reader = Reader(own, config.input_format, config.name or config.path, now=now)
        for prompt in shapes.values():
            where = f"an answer to row {prompt.row} of the prompts"
            try:
                reader.text(prompt.source, prompt.conversation, "answer", where)
            except RewardError as error:
                raise ConfigError(f"{key}: {error}") from error


def check_sharded(configs: Sequence[RewardConfig], engine: str, *, spreads: bool) -> None:
    """Raises ``ConfigError`` for sources that are to be sharded and cannot be.

    Args:
        engine: the engine's name, ``spreads`` whether it spreads weights.
    """
    for key, config in sources_of(configs):
        if not isinstance(config, OwnModelReward) or config.processes != "sharded":
            continue
        if not spreads:
            raise ConfigError(
                f"{key}.processes: got sharded, wanted all or one under {engine}, which does not shard weights; launch "
                "with FSDP2 or ZeRO-3, or leave it out"
            )
        if _has_few_bits(config):
            raise ConfigError(
                f"{key}.processes: got sharded, but {config.path} holds quantized weights, which cannot be sharded; "
                "wanted all or one"
            )


def build_rewards(
    configs: Sequence[RewardConfig],
    names: Sequence[str],
    *,
    roles: ModelRoles | None,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device | str,
    now: str | None = None,
    offload_idle: bool = False,
    shards: bool = False,
    shared: Shared = lambda make, most, by_one: make(most),
) -> RewardSource:
    """The weighted sum of the configured sources, each a component under its name.

    Args:
        names: unique names of the sources, in the order of ``configs``.
        roles: the policy's models, which share their base with reward adapters; None if there are no such adapters.
        tokenizer: the policy's; None where every source reads text as the dataset had it.
        now: as in ``Reader``.
        offload_idle: whether to keep models on the CPU while they do not score, unless their section says otherwise.
        shards: whether models of their own wait on the CPU for ``shared`` to spread their weights, unless their
            section says otherwise.
        shared: turns each source into one for all processes.

    Raises:
        ConfigError, ModelError: a source cannot be loaded.
    """
    made = _Sources(roles, tokenizer, device, now, offload_idle, shards, shared)
    return WeightedSum(made.parts(configs, names, "rewards"))


@dataclass(frozen=True)
class _Sources:
    """Makes sources from their sections; its fields are the arguments of ``build_rewards``."""

    roles: ModelRoles | None
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device | str
    now: str | None
    offload_idle: bool
    shards: bool
    shared: Shared

    def parts(self, configs: Sequence[RewardConfig], names: Sequence[str], key: str, prefix: str = "") -> list[Part]:
        """The sources of a weighted sum, or the members of an ensemble.

        Args:
            names: their names there.
            key: the configuration key of the list.
            prefix: what goes before the names in metrics.
        """
        return [
            Part(
                name,
                config.weight,
                self._source(config, prefix + name, f"{key}.{i}"),
                norm=tuple(config.norm) if isinstance(config.norm, list) else config.norm,
                bounds=config.bounds,
            )
            for i, (config, name) in enumerate(zip(configs, names, strict=True))
        ]

    def _source(self, config: RewardConfig, name: str, key: str) -> RewardSource:
        """One source for all processes."""
        if isinstance(config, EnsembleReward):
            members = self.parts(config.members, reward_names(config.members), f"{key}.members", f"{name}/")
            return Ensemble(members, reduction(config), name)

        def make(most: int | None) -> RewardSource | ToSpread:
            mine = config if most is None else config.model_copy(update={"max_concurrency": most})
            return self._of_this_process(mine, name, key)

        by_one = isinstance(config, OwnModelReward) and config.processes == "one"
        return self.shared(make, config.max_concurrency if isinstance(config, ServiceReward) else None, by_one)

    def _of_this_process(self, config: RewardConfig, name: str, key: str) -> RewardSource | ToSpread:
        match config:
            case FunctionReward():
                function = _function(config, key)
                return FunctionSource(function, name, missing=config.missing, section=key)
            case AdapterReward():
                self.roles.add_reward_adapter(name, config.path)
                options = {"batch_size": config.batch_size, "device": self.device}
                return AdapterSource(self.roles, name, self.tokenizer, **options)
            case OwnModelReward():
                options = {"now": self.now, "offload_idle": self.offload_idle}
                options["is_sharded"] = self.shards and _is_sharded(config)
                return _model_source(config, name, key, self.tokenizer, torch.device(self.device), **options)
            case ReadyReward():
                return ready_source(config, name)
            case HttpReward():
                return http_source(config, name, key, self.tokenizer)
            case JudgeReward():
                return judge_source(config, name, key)


_MISTAKES = (AttributeError, ImportError, NameError, TypeError, RewardError)
"""Errors that a function raises for a mistake in its own code, or that are raised for what it did to the process."""


def try_sources(
    configs: Sequence[RewardConfig],
    names: Sequence[str],
    batch: RewardBatch,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    under: str = "rewards",
    asks_services: bool = True,
) -> None:
    """Calls every function among the sources for an answer and the same once more, which a score of the whole batch
    does not fit, and asks every service to score the answer, so that faults show before a run.

    Args:
        batch: one answer.
        tokenizer: as in ``build_rewards``.
        under: configuration key of the sources.
        asks_services: whether services are asked.

    Raises:
        ConfigError: a service gave no scores, a judge no number, whatever its ``missing`` is, or a function raised an
            error or returned something that no answer can cause; says why.
    """
    for i, (config, name) in enumerate(zip(configs, names, strict=True)):
        key, source, what, tried = f"{under}.{i}", None, "service", batch
        match config:
            case FunctionReward():
                function = _function(config, key)
                source, what, tried = FunctionSource(function, name), "function", _twice(batch)
            case EnsembleReward():
                members = [f"{name}/{own}" for own in reward_names(config.members)]
                options = {"under": f"{key}.members", "asks_services": asks_services}
                try_sources(config.members, members, batch, tokenizer, **options)
            case HttpReward() if asks_services:
                source = http_source(config, name, key, tokenizer)
            case JudgeReward() if asks_services:  # without a number for the first answer, there will be none for any
                source = judge_source(config.model_copy(update={"missing": None}), name, key)
        if source is None:
            continue
        try:
            source.score(tried)
        except RewardError as error:
            why = error.__cause__
            if isinstance(why, NoScore) and not isinstance(why, NoNumber) and config.missing is not None:
                continue  # a content filter rejected the first answer
            # other errors of a function may come from answers that are alike, which have no spread for example
            if what == "service" or isinstance(why, _MISTAKES) or isinstance(error, NotAScore):
                told = why if isinstance(why, NoNumber) else error
                raise ConfigError(f"{key}: the {what} failed to score a test answer: {told}") from error


def _twice(batch: RewardBatch) -> RewardBatch:
    """The answers of a batch, and all of them once more."""
    lists = {f.name: 2 * value for f in fields(batch) if isinstance(value := getattr(batch, f.name), list)}
    return replace(batch, **lists, columns={name: 2 * values for name, values in batch.columns.items()})


def _model_source(
    config: OwnModelReward,
    name: str,
    key: str,
    policy_tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    *,
    now: str | None,
    offload_idle: bool,
    is_sharded: bool,
) -> RewardSource | ToSpread:
    model, head = _model_and_head(config, device)
    tokenizer = load_tokenizer(config.path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    parts = [model] if head is None else [model, head]
    waits = offload_idle if config.offload is None else config.offload
    fetched = nullcontext
    if waits and not is_sharded and not is_quantized(model) and has_own_memory(device):
        fetched = Offloaded(*parts, device=device).fetched
    elif not is_sharded:
        for part in parts:
            placed(part, device)
    if config.compile:
        compile_whole(model if head is None else model.base_model)
    options = {
        "name": name,
        "input_format": config.input_format,
        "batch_size": config.batch_size,
        "max_length": config.max_length,
        "device": device,
        "special_tokens": config.special_tokens,
        "now": now,
        "missing": Missing(config.missing, name, key),
        "fetched": fetched,
    }
    if head is None:
        source = EncoderSource(model, tokenizer, **options)
    else:
        source = ModelSource(model, head, tokenizer, policy_tokenizer, **options)
    return ToSpread(source, parts, waits) if is_sharded else source


def _is_sharded(config: OwnModelReward) -> bool:
    """Whether a model's weights are sharded if the engine shards weights."""
    return config.processes in (None, "sharded") and config.can_be_sharded and not _has_few_bits(config)


def _has_few_bits(config: OwnModelReward) -> bool:
    """Whether the checkpoint itself holds quantized weights; an adapter is merged into unquantized ones."""
    if is_adapter(config.path, config.revision):
        return False
    origin = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return has_few_bits(load_config(config.path, **origin))


def _model_and_head(config: OwnModelReward, device: torch.device) -> tuple[PreTrainedModel, nn.Module | None]:
    """The model of a source, and the head that reads its last token's state; None if the model pools differently."""
    options = {
        "dtype": weight_dtype(config.dtype, None),
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "device": device,
    }
    if config.quantization is not None:
        compute_dtype = torch.bfloat16 if bf16_supported(device) else torch.float32
        options["few_bits"] = FewBits(config.quantization, device, compute_dtype)
    if isinstance(config, ValueHeadReward):
        return load_value_head_model(config.path, **options)
    model = load_reward_model(config.path, label=config.label, **options)
    return model, model.score if reads_last_token(model) else None


def _check_reward_adapter(path: str, key: str) -> None:
    """Raises ``ModelError`` if a local folder is something else than a reward adapter."""
    if not Path(path).is_dir():
        return
    if not is_adapter(path):
        raise ModelError(f"{key}: {path} is a full model, not an adapter; use type model, or give the adapter's folder")
    if value_head_file(path) is None:
        check_adapter_head(path, key)
