"""Python functions as reward sources: ``f(prompts, completions, **columns) -> list[float | list | None]``."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tether.config.places import why_not_there
from tether.errors import ConfigError, RewardError
from tether.report.text import one_line, prompt_text
from tether.rewards.base import listed
from tether.rewards.beside import clash
from tether.rewards.early import Asked, AtOnce, Begun, InGroups, joined, named
from tether.rewards.files import file_module, imports_from
from tether.rewards.foreign import QUERIES, adapted
from tether.rewards.loop import awaited, started
from tether.rewards.missing import Missing
from tether.rewards.tokens import judged
from tether.rewards.undisturbed import undisturbed
from tether.types import RewardBatch, RewardOutput

RewardFunction = Callable[..., Any]

_OURS = ("prompts", "completions")
_IDS = "completion_ids"
_SEARCH_SECONDS = 10.0
GROUP = 16
"""Number of answers for which an ``async`` function is called while others are still being generated."""


class FunctionSource:
    """Scores answers by a Python function, called once per batch; an ``async`` function is called as answers finish.

    Prompts that the dataset had as chat messages are given as messages, and their completions as
    ``[{"role": "assistant", "content": text}]``; text is given as text. Of the dataset's other columns the function
    gets those that its signature names, or all if it takes ``**kwargs``; and ``completion_ids``, the answers as the
    policy's token ids, and ``rendered_prompts``, the prompts as the policy reads them, if its signature names them.

    Args:
        function: returns one number per answer, in order, or the scores of its parts as
            ``tether.rewards.tokens.judged`` reads them, or None for an answer on which it has no opinion.
        name: its name in messages.
        missing: score of answers on which it has no opinion. Default: such an answer is an error.
        section: its configuration key, if it has one.
    """

    def __init__(
        self, function: RewardFunction, name: str, *, missing: float | None = None, section: str | None = None
    ) -> None:
        self.function = function
        self.name = name
        self.missing = Missing(missing, name, section)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The function's scores.

        Raises:
            RewardError: the function raised, or needs a column that the dataset lacks, or token ids that are not
                available.
            RewardResponseError: it did not return one finite number for each answer, or for each part of it.
        """
        self._check(batch)
        rows = range(len(batch))
        try:
            scores = self._call(batch, rows)
        except (Exception, SystemExit) as error:
            raise self._failure(error, batch, rows) from error
        return self._output(scores, batch, rows)

    def begin(self, batch: RewardBatch) -> Begun:
        """Calls an ``async`` function for every ``GROUP`` finished answers; any other function once for all."""
        if not inspect.iscoroutinefunction(self.function):
            return AtOnce(self, batch)
        self._check(batch)
        return InGroups(GROUP, lambda rows: started(self._result(batch, rows)), partial(self._joined, batch))

    def _joined(self, batch: RewardBatch, asked: Asked[Any]) -> RewardOutput:
        """What the function returned for the batch's answers."""
        groups = []
        for rows, future in asked:
            try:
                scores = future.result()
            except (Exception, SystemExit) as error:
                raise self._failure(error, batch, rows) from error
            groups.append((rows, self._output(scores, batch, rows)))
        return joined(groups, batch, f"reward function {self.name}")

    def _check(self, batch: RewardBatch) -> None:
        """Raises ``RewardError`` if the function needs what the batch does not have."""
        missing = missing_columns(self.function, batch.columns)
        if missing:
            raise RewardError(_missing_message(f"reward function {self.name}", missing, batch.columns))
        if _names(self.function, _IDS) and batch.decode is None:
            raise RewardError(
                f"reward function {self.name} asks for {_IDS}, which come from the policy's tokenizer: set "
                "model.path to the policy"
            )

    def _failure(self, error: BaseException, batch: RewardBatch, rows: Sequence[int]) -> RewardError:
        """The error to raise if the function raised for these rows."""
        where = self._where(batch, rows)
        said = ": ".join(part for part in (type(error).__name__, one_line(str(error), 1000)) if part)
        return RewardError(f"reward function {self.name} raised {said} ({where})")

    def _output(self, scores: Any, batch: RewardBatch, rows: Sequence[int]) -> RewardOutput:
        """What the function returned for these rows, checked."""
        asked = f", asked for {named(rows)}," if len(rows) < len(batch) else ""
        source = f"reward function {self.name}{asked}"
        output = judged(self.missing.filled(scores, source), batch, source, by_token=True, rows=rows)
        return self.missing.marked(output, listed(scores))

    def _call(self, batch: RewardBatch, rows: Sequence[int]) -> Any:
        """What the function returns for these rows of the batch; awaits it if necessary."""
        result = self._result(batch, rows)
        return awaited(result) if inspect.isawaitable(result) else result

    def _result(self, batch: RewardBatch, rows: Sequence[int]) -> Any:
        """What the function, called with these rows of the batch, returns.

        It receives copies of messages and columns: the run uses its own again in a later epoch.
        """
        prompts = [deepcopy(batch.prompts[row]) for row in rows]
        completions = [
            batch.responses[row]
            if isinstance(batch.prompts[row], str)
            else [{"role": "assistant", "content": batch.responses[row]}]
            for row in rows
        ]
        columns = {
            name: [deepcopy(values[row]) for row in rows]
            for name, values in batch.columns.items()
            if name not in (*_OURS, _IDS, QUERIES) and _accepts(self.function, name)
        }
        if _names(self.function, QUERIES):
            columns[QUERIES] = [batch.queries[row] for row in rows]
        if _names(self.function, _IDS):
            columns[_IDS] = [list(batch.response_ids[row]) for row in rows]
        with undisturbed(f"reward function {self.name}"):
            result = self.function(prompts=prompts, completions=completions, **columns)
            return self._awaited(result) if inspect.isawaitable(result) else _whole(result)

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        """What an ``async`` function returns."""
        with undisturbed(f"reward function {self.name}"):
            return _whole(await result)

    def _where(self, batch: RewardBatch, rows: Sequence[int]) -> str:
        """The first row that fails alone, or all rows if none does within a few seconds, with its prompt."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        for row in rows:
            if time.monotonic() > deadline:
                break
            try:
                self._call(batch, [row])
            except (Exception, SystemExit) as error:
                found = f"answer {row} of {len(batch)}, counted from 0, also fails alone, with {type(error).__name__}"
                return f"{found}; its prompt: {_prompt(batch, row)}"
        return f"{named(rows)} of one batch; the first prompt: {_prompt(batch, rows[0])}"


def _whole(scores: Any) -> Any:
    """What a function returned; as a list if it can be read only once, which is then part of its call."""
    return list(scores) if isinstance(scores, Iterator) else scores


def _prompt(batch: RewardBatch, row: int) -> str:
    """The prompt of an answer, short enough for a message."""
    return repr(one_line(prompt_text(batch.prompts[row]), 80))


def load_function(
    path: str, name: str, key: str, label: str | None = None, arguments: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The function ``name`` of a ``.py`` file or of an importable module; one for OpenRLHF or verl as one of ours.

    A file is run under a module name made from its full path (``tether.rewards.files``), and only once unless it
    changes. A file may import modules from its own folder, a module from the current folder, however the process was
    started.

    Args:
        key: the configuration key with which messages begin.
        label: the column of a function with OpenRLHF's signature.
        arguments: further arguments, the same in every call.

    Raises:
        ConfigError: no such file, module or function; the file fails to import, or imports a module that would be
            another reward file's; the function does not take ``prompts`` and ``completions`` by name, or
            what OpenRLHF or verl calls it with; or it does not take one of ``arguments``.
    """
    module = _file_module(path, key) if path.endswith(".py") else _import(path, key)
    function = getattr(module, name, None)
    if function is None:
        defined = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise ConfigError(f"{key}.name: {path} has no {name}; it has {', '.join(sorted(defined)) or 'no functions'}")
    if not callable(function):
        raise ConfigError(f"{key}.name: {name} in {path} is a {type(function).__name__}, wanted a function")
    if isinstance(function, type):
        raise ConfigError(
            f"{key}.name: {name} in {path} is a class, wanted a function, or an object of the class that can be "
            f"called: scorer = {name}(...)"
        )
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.name: {name} in {path} has no readable signature: {error}") from error
    if arguments:
        function = _with_arguments(function, arguments, f"{name}{inspect.signature(function)} in {path}", key)
    refused = [ours for ours in _OURS if not _accepts(function, ours)]
    try:
        foreign = None if _names(function, _OURS[1]) else adapted(function, label)
    except TypeError as error:
        raise ConfigError(
            f"{key}.name: {name}{inspect.signature(function)} in {path} cannot be called as its project calls it: "
            f"{error}; further arguments need a default or a value in {key}.arguments"
        ) from error
    if label is not None and (foreign is None or label not in inspect.signature(foreign).parameters):
        raise ConfigError(
            f"{key}.label: {name}{inspect.signature(function)} in {path} takes columns by their own names; leave it "
            "out: it names the labels of a function f(queries, prompts, labels)"
        )
    if foreign is not None:
        return foreign
    if refused:
        raise ConfigError(
            f"{key}.name: {name}{inspect.signature(function)} in {path} does not take {' and '.join(refused)}; "
            "wanted f(prompts, completions, **columns)"
        )
    return function


def _with_arguments(function: RewardFunction, arguments: Mapping[str, Any], what: str, key: str) -> RewardFunction:
    """The function with arguments that its signature then no longer has."""
    for name in arguments:
        if name in (*_OURS, _IDS, QUERIES):
            raise ConfigError(f"{key}.arguments.{name}: the run itself gives {what} this argument; leave it out")
        if not _accepts(function, name):
            raise ConfigError(f"{key}.arguments.{name}: {what} takes no argument of this name; leave it out")

    def called(*given: Any, **named: Any) -> Any:
        return function(*given, **{**named, **deepcopy(dict(arguments))})

    async def awaits(*given: Any, **named: Any) -> Any:
        return await called(*given, **named)

    bound = awaits if inspect.iscoroutinefunction(function) else called
    own = inspect.signature(function)
    bound.__signature__ = own.replace(parameters=[each for n, each in own.parameters.items() if n not in arguments])
    return bound


def missing_columns(function: RewardFunction, columns: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Arguments that the function requires and that are not among the dataset's columns."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and parameter.name not in (*_OURS, _IDS, QUERIES)
        and parameter.name not in columns
    ]


def check_columns(function: RewardFunction, columns: Sequence[str], name: str, key: str) -> None:
    """Checks that the dataset has every column that the function requires.

    Raises:
        ConfigError: it lacks one.
    """
    missing = missing_columns(function, columns)
    if missing:
        raise ConfigError(f"{key}: " + _missing_message(f"function {name}", missing, columns))


def _missing_message(what: str, missing: Sequence[str], columns: Mapping[str, Any] | Sequence[str]) -> str:
    return (
        f"{what} needs {', '.join(missing)}, but the dataset's columns are {', '.join(columns) or 'none'}; "
        "give the argument a default or add the column"
    )


def _names(function: RewardFunction, name: str) -> bool:
    """Whether the function's signature names this argument."""
    return name in inspect.signature(function).parameters


def _accepts(function: RewardFunction, name: str) -> bool:
    """Whether the function takes an argument of this name."""
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (p.kind in by_name and p.name == name) for p in parameters)


def _file_module(path: str, key: str) -> ModuleType:
    if (why := why_not_there(path)) is not None:
        raise ConfigError(f"{key}.path: {why}")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{key}.path: there is no file {file}")
    try:
        if (told := clash(file)) is None:
            with undisturbed(f"{key}: {path}"):
                return file_module(file, file.read_bytes())
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}.path: {path} cannot be run: {type(error).__name__}: {error}") from error
    raise ConfigError(f"{key}.path: {told}")


def _import(path: str, key: str) -> ModuleType:
    try:
        with undisturbed(f"{key}: {path}"), imports_from(Path.cwd()):
            return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}.path: cannot import {path}: {type(error).__name__}: {error}; "
            "wanted a .py file, or the import path of a module that is installed or in the current folder"
        ) from error
