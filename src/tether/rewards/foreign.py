"""Reward functions with the signatures of OpenRLHF and verl, called as these call them."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tether.errors import RewardError
from tether.rewards.base import listed, shown

Function = Callable[..., Any]

QUERIES = "rendered_prompts"
"""Argument in which a function gets the prompts as text, with the policy's chat template applied."""
_TRUTH = "reward_model"
"""Column of verl's data that holds the ground truth."""
_EXTRA = "extra_info"
_OTHERS = ("data_source", _EXTRA)
_OF_ROLLOUT = {"num_turns": 2, "rollout_reward_scores": {}}
"""What verl adds to every row's ``extra_info``: turns of the conversation, one of them the answer, and scores that its
rollout gave; there are none here, nor in verl's own rollout of one answer."""


def adapted(function: Function, label: str | None) -> Function | None:
    """The function as one that takes ``prompts`` and ``completions``; None if its signature is neither project's.

    OpenRLHF calls ``f(queries, prompts, labels)``, where queries are prompts with their answers, and reads a tensor or
    the ``rewards`` of a dict. verl calls ``f(data_source, solution_str, ground_truth, extra_info)`` for each answer,
    or for a batch the same names in the plural, and reads a number or the ``score`` of a dict.

    Args:
        label: column that OpenRLHF's ``labels`` are taken from. Default: they are empty, as there.

    Raises:
        TypeError: it requires an argument that its project does not call it with; names the argument.
    """
    names = list(inspect.signature(function).parameters)
    if names[:2] == ["queries", "prompts"]:
        return _of_openrlhf(function, label)
    for plural in ("", "s"):
        if {f"solution_str{plural}", f"ground_truth{plural}"} <= set(names):
            return _of_verl(function, plural)
    return None


def _of_openrlhf(function: Function, label: str | None) -> Function:
    third = list(inspect.signature(function).parameters.values())[2:3]
    takes_labels = any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in third)
    inspect.signature(function).bind(*["queries", "prompts", "labels"][: 2 + takes_labels])

    def called(completions: Sequence[Any], **columns: Any) -> Any:
        prompts = list(columns[QUERIES])
        queries = [prompt + _text(answer) for prompt, answer in zip(prompts, completions, strict=True)]
        labels = [columns[label] if label is not None else [""] * len(prompts)] if takes_labels else []
        return _then(function(queries, prompts, *labels), _rewards)

    return _taking(function, called, QUERIES, *([label] if label is not None and takes_labels else []))


def _rewards(given: Any) -> Any:
    """The rewards in what OpenRLHF's function returns: a tensor, a list, or a dict or dicts of them."""
    if isinstance(given, Mapping):
        return _rewards(_of_dict(given, "rewards"))
    if isinstance(given, Tensor | np.ndarray):
        return given.flatten().tolist()
    if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping | Tensor | np.ndarray):
        parts = [_rewards(each) for each in given]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return given


def _of_verl(function: Function, plural: str) -> Function:
    own = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in own.values())
    columns = {name: own.get(f"{name}{plural}") for name in _OTHERS if takes_all or f"{name}{plural}" in own}
    inspect.signature(function).bind(**{f"{name}{plural}": name for name in ("solution_str", "ground_truth", *columns)})

    def rows(completions: Sequence[Any], given: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
        for i, (completion, truth) in enumerate(zip(completions, given[_TRUTH], strict=True)):
            row = {name: given[name][i] if name in given else None for name in columns}
            if _EXTRA in row and (row[_EXTRA] is None or isinstance(row[_EXTRA], Mapping)):
                row[_EXTRA] = {**(row[_EXTRA] or {}), **copy.deepcopy(_OF_ROLLOUT)}
            row |= {"solution_str": _text(completion), "ground_truth": truth["ground_truth"]}
            yield {f"{name}{plural}": value for name, value in row.items()}

    def called(completions: Sequence[Any], **given: Any) -> Any:
        arguments = list(rows(completions, given))
        if plural:
            of_batch = {name: [row[name] for row in arguments] for name in arguments[0]}
            return _then(function(**of_batch), _scores)
        scores = [function(**row) for row in arguments]
        return _gathered(scores) if any(map(inspect.isawaitable, scores)) else list(map(_score, scores))

    needed = [name for name, known in columns.items() if known is not None and known.default is known.empty]
    ours = _taking(function, called, _TRUTH, *needed, optional=[name for name in columns if name not in needed])
    ours.reads_truth = True
    return ours


def check_truth(function: Function, columns: Mapping[str, Any]) -> None:
    """Raises ``RewardError`` if a row has no ground truth for a function that ``adapted`` made of one of verl's."""
    truth = columns.get(_TRUTH)
    if getattr(function, "reads_truth", False) and not (isinstance(truth, Mapping) and "ground_truth" in truth):
        raise RewardError(f"column {_TRUTH} holds {shown(truth)}; wanted {{'ground_truth': ...}}, as verl has it")


async def _gathered(scores: Sequence[Any]) -> list[Any]:
    return list(map(_score, await asyncio.gather(*scores)))


def _scores(given: Any) -> Any:
    """The scores in what verl's function for batches returns."""
    return given if (values := listed(given)) is None else list(map(_score, values))


def _score(given: Any) -> Any:
    """The number in what verl's function returns for an answer."""
    if isinstance(given, Mapping):
        return _score(_of_dict(given, "score"))
    return given.item() if isinstance(given, Tensor | np.ndarray) and np.prod(given.shape) == 1 else given


def _of_dict(given: Mapping[str, Any], name: str) -> Any:
    """The entry of a returned dict that is read.

    Raises:
        TypeError: it has none.
    """
    if name not in given:
        raise TypeError(f"it returned a dict of {', '.join(map(str, given)) or 'nothing'}; wanted one with {name}")
    return given[name]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _then(given: Any, read: Function) -> Any:
    """What ``read`` makes of a result that may have to be awaited first."""

    async def awaited() -> Any:
        return read(await given)

    return awaited() if inspect.isawaitable(given) else read(given)


def _taking(function: Function, called: Function, *needed: str, optional: Sequence[str] = ()) -> Function:
    """The function as one of ours, with a signature that names its columns; an ``async`` one if it is one.

    Args:
        called: calls it.
    """

    def ours(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        return called(completions, **columns)

    async def awaiting(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        return await called(completions, **columns)

    ours = awaiting if inspect.iscoroutinefunction(function) else ours
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    known = dict.fromkeys(("prompts", "completions", *needed), empty) | dict.fromkeys(optional)
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in known.items()]
    ours.__signature__ = inspect.Signature(parameters)
    return ours
