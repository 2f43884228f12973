"""What TRL's users pass as ``reward_model``, as reward sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.compat.trl.models import (
    CLASSIFIER,
    backbone_of,
    check_classifier,
    inside,
    name_of,
    scalar_head,
    with_scalar_head,
)
from tether.config.rewards import ModelReward
from tether.data.collate import pad_around
from tether.errors import ConfigError, RewardError
from tether.models.paths import check_model_path
from tether.rewards.base import checked, scores_in_batches
from tether.rewards.build import Shared, ToSpread, build_rewards, check_conversations, check_rewards
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.function import FunctionSource, check_columns
from tether.rewards.model import ModelSource
from tether.types import Prompt, RewardBatch, RewardOutput, RewardSource

WANTED = (
    f"{CLASSIFIER}, the path of one, a function f(prompts, completions, **columns) that returns a number for each "
    "answer, a module with base_model_prefix, the backbone of that name, and score, or a list of these"
)


class Judges:
    """The members of ``reward_model``; their scores are added up.

    Args:
        reward_model: a sequence classifier, a path, a function, or a list of these.

    Raises:
        ConfigError, ModelError: a member is something else, or cannot serve as a reward.
    """

    def __init__(self, reward_model: Any) -> None:
        self.members: list[Any] = list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
        if not self.members:
            raise ConfigError(f"reward_model: got an empty list, wanted {WANTED}")
        self.members = [inside(member) for member in self.members]
        for member in self.members:
            _check(member)
        self.names = _unique([_name(member) for member in self.members])

    def sections(self, batch_size: int) -> list[dict[str, Any]]:
        """One section of a run's configuration per member."""
        return [_section(member, name, batch_size) for member, name in zip(self.members, self.names, strict=True)]

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises ``ConfigError`` if a function requires a column that the dataset lacks."""
        for member, name in zip(self.members, self.names, strict=True):
            if _is_function(member):
                check_columns(member, columns, name, "reward_model")

    def check_conversations(
        self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, now: str | None
    ) -> None:
        """Raises ``ConfigError`` if a judge given by a path, with a tokenizer other than the policy's, cannot read one
        of the conversations."""
        for path in self.paths.values():
            try:
                check_conversations([ModelReward(type="model", path=path)], prompts, tokenizer, now)
            except ConfigError as error:
                raise ConfigError(
                    f"reward_model: {path} reads text, as its tokenizer is not the policy's, but cannot be shown the "
                    "prompts, which are conversations: its tokenizer has no chat template, or one that refuses them. "
                    f"Save it with another, or pass a function that scores with it ({error})"
                ) from error

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The members that are models in memory, by name."""
        named = zip(self.names, self.members, strict=True)
        return {name: member for name, member in named if isinstance(member, PreTrainedModel)}

    @property
    def paths(self) -> dict[str, str]:
        """The members given by a path, by argument and name."""
        named = zip(self.names, self.members, strict=True)
        return {f"reward_model {name}": str(member) for name, member in named if isinstance(member, str | Path)}

    def source(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        device: torch.device | str,
        now: str | None,
        shards: bool,
        shared: Shared,
    ) -> RewardSource:
        """Their sum, each member a component under its name. Models in memory read the policy's token ids.

        Args:
            now: date and time for the chat templates of judges that read text.
            shards: whether ``shared`` shards the weights of models, which wait on the CPU.
            shared: turns a source of one process into one for all processes.
        """
        parts = []
        for member, name in zip(self.members, self.names, strict=True):
            if isinstance(member, PreTrainedModel):
                source = shared(partial(_in_memory, member, name, tokenizer, batch_size, device, shards), None, False)
            elif _is_function(member):
                source = shared(lambda _, own=member, name=name: FunctionSource(own, name), None, False)
            elif _is_judge(member):
                judge = partial(TrlJudge, member, name, batch_size=batch_size, device=device)
                source = shared(lambda _, make=judge: make(), None, False)
            else:
                config = ModelReward(**_section(member, name, batch_size))
                options = {"tokenizer": tokenizer, "device": device, "now": now, "shards": shards, "shared": shared}
                built = build_rewards([config], [name], roles=None, **options)
                assert isinstance(built, WeightedSum), "sources are summed"
                source = built.parts[0].source
            parts.append(Part(name, 1.0, source))
        return WeightedSum(parts)


class TrlJudge:
    """A module that scores as TRL's trainer asks it to, such as a wrapper around a model or around rules.

    Its backbone, the module under the name in ``base_model_prefix``, turns token ids into hidden states; its ``score``
    turns the last of them into a number at each token, of which the one at an answer's last token counts. Token ids are
    laid out as in TRL: queries padded on the left, answers on the right, by 0.

    Args:
        name: its name in messages.
        batch_size: number of answers in one forward.
    """

    def __init__(self, judge: Any, name: str, *, batch_size: int, device: torch.device | str) -> None:
        self.judge, self.name, self.batch_size, self.device = judge, name, batch_size, device
        if isinstance(judge, nn.Module):
            judge.requires_grad_(False).eval()
        if hasattr(judge, "to"):
            judge.to(device)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The module's scores.

        Raises:
            RewardError: it has no number for each token.
            RewardResponseError: a score is not finite.
        """
        queries = batch.query_ids
        answers = [batch.read_ids(row)[len(query) :] for row, query in enumerate(queries)]
        lengths = [len(query) + len(answer) for query, answer in zip(queries, answers, strict=True)]

        def run(rows: Sequence[int]) -> list[float]:
            return self._scores([queries[row] for row in rows], [answers[row] for row in rows])

        scores = scores_in_batches(lengths, run, batch_size=self.batch_size)
        return RewardOutput(checked(scores, len(batch), f"reward {self.name}"))

    def _scores(self, queries: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float]:
        """Scores of one padded batch."""
        ids, mask, positions = (tensor.to(self.device) for tensor in pad_around(queries, answers))
        backbone = getattr(self.judge, self.judge.base_model_prefix)
        output = backbone(
            input_ids=ids, attention_mask=mask, position_ids=positions, return_dict=True, output_hidden_states=True,
            use_cache=False,
        )  # fmt: skip
        scores = self.judge.score(output.hidden_states[-1])
        if scores.numel() != ids.numel() or scores.shape[:2] != ids.shape:
            raise RewardError(
                f"reward {self.name}: score returned a tensor of shape {tuple(scores.shape)} for {len(ids)} answers of "
                f"{ids.shape[1]} tokens, prompts included; wanted one number for each token"
            )
        width = max(map(len, queries))
        last = torch.tensor([width + len(answer) - 1 for answer in answers], device=scores.device)
        return scores.reshape(ids.shape)[torch.arange(len(ids), device=scores.device), last].tolist()


class WithoutEnd:
    """Subtracts a penalty from the score of every answer that contains no end token.

    TRL's rule, here for answers that only the length limit ends.

    Args:
        penalty: what to subtract at the moment; None for nothing.
    """

    def __init__(self, rewards: RewardSource, *, end_id: int | None, penalty: Callable[[], float | None]) -> None:
        self.rewards, self.end_id, self.penalty = rewards, end_id, penalty

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The scores of the source minus the penalty."""
        output, penalty = self.rewards.score(batch), self.penalty() or 0.0
        scores = [
            score if self.end_id in ids else score - penalty
            for score, ids in zip(output.scores, batch.response_ids, strict=True)
        ]
        return replace(output, scores=scores)


def _in_memory(
    model: PreTrainedModel,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    device: torch.device | str,
    shards: bool,
    most: int | None,
) -> RewardSource | ToSpread:
    """A classifier in memory, in place, that reads the policy's token ids."""
    model.requires_grad_(False).eval()
    head = with_scalar_head(model) if shards else scalar_head(model)  # whose weights are sharded with the model's
    if not shards:
        model.to(device)
    options = {"name": name, "input_format": "auto", "batch_size": batch_size, "max_length": None, "device": device}
    source = ModelSource(model, head, tokenizer, tokenizer, **options)
    return ToSpread(source, (model, head)) if shards else source


def _is_function(member: Any) -> bool:
    return callable(member) and not isinstance(member, torch.nn.Module | type) and not _is_judge(member)


def _is_judge(member: Any) -> bool:
    """Whether it is no classifier of ``transformers``, but has what TRL's trainer asks a reward model for."""
    return backbone_of(member) is not None


def _check(member: Any) -> None:
    if isinstance(member, PreTrainedModel | PeftModel):
        check_classifier(member, "reward_model", WANTED)
    elif isinstance(member, str | Path):
        check_model_path(str(member), "reward_model")
        check_rewards([ModelReward(type="model", path=str(member))])
    elif _is_function(member):
        parameters = inspect.signature(member).parameters.values()
        takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not takes_all and not takes >= {"prompts", "completions"}:
            raise ConfigError(
                f"reward_model: {_name(member)}{inspect.signature(member)} does not take prompts and completions; "
                "wanted f(prompts, completions, **columns)"
            )
    elif not _is_judge(member):
        raise ConfigError(f"reward_model: got {type(member).__name__}, wanted {WANTED}")


def _name(member: Any) -> str:
    if isinstance(member, str | Path):
        return Path(member).name
    if isinstance(member, PreTrainedModel):
        return Path(name_of(member)).name
    return getattr(member, "__name__", type(member).__name__)


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with a number appended to duplicates."""
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]


def _section(member: Any, name: str, batch_size: int) -> dict[str, Any]:
    if _is_function(member) or _is_judge(member):
        return {"type": "function", "path": _file(member if _is_function(member) else type(member)), "name": name}
    path = name_of(member) if isinstance(member, PreTrainedModel) else str(member)
    return {"type": "model", "path": path, "name": name, "batch_size": batch_size}


def _file(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsourcefile(function) or "in memory"
    except (TypeError, OSError):
        return "in memory"
