"""A scoring service as a reward source. docs/rewards.md has the protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config.rewards import HttpReward
from tether.errors import ConfigError, RewardError, RewardResponseError
from tether.report.read import MISSING
from tether.report.text import one_line
from tether.rewards.base import answer_of, checked, listed
from tether.rewards.early import Asked, Begun, InGroups, joined, named, whole
from tether.rewards.missing import Missing
from tether.rewards.service import SHOWN, Post, Service, service_of
from tether.rewards.tokens import judged
from tether.types import RewardBatch, RewardOutput

Payload = Callable[[RewardBatch, Sequence[int]], Mapping[str, Any]]
"""Makes the payload for these rows of a batch."""
WANTED = 'JSON {{"{}": [...]}} with one number per answer'


class HttpSource:
    """Scores answers by a service, several requests at a time.

    Args:
        service: the service that receives the requests.
        payload: makes the requests' payloads.
        batch_size: maximum number of answers per request.
        takes_steps: whether an answer may have scores of its steps in place of one number.
        missing: score of answers for which the service returns null.
        under: the key of the scores in what it returns.
    """

    def __init__(
        self,
        service: Service,
        payload: Payload,
        *,
        batch_size: int,
        takes_steps: bool,
        missing: Missing,
        under: str = "scores",
    ) -> None:
        self.service = service
        self.payload = payload
        self.batch_size = batch_size
        self.takes_steps = takes_steps
        self.missing = missing
        self.under = under

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The service's scores and components.

        Raises:
            RewardTimeout: the service did not answer in time, nor on any retry.
            RewardResponseError: it returned anything but one finite number per answer, or per step.
            RewardError: it could not be reached, or the batch cannot be written as JSON.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Sends a request as soon as its answers are finished."""
        session = self.service.session()
        return InGroups(
            self.batch_size,
            lambda rows: session.start(partial(self._scored, batch, rows)),
            partial(self._joined, batch),
            session.close,
        )

    def _joined(self, batch: RewardBatch, asked: Asked[RewardOutput]) -> RewardOutput:
        """The service's scores of the batch's answers."""
        groups = [(rows, future.result()) for rows, future in asked]
        return joined(groups, batch, self.service.place)

    async def _scored(self, batch: RewardBatch, rows: Sequence[int], post: Post) -> RewardOutput:
        """The service's scores of these rows."""
        answer = await post(self.payload(batch, rows))
        asked = f", asked for {named(rows)}," if len(rows) < len(batch) else ""
        place = self.service.place + asked
        if not isinstance(answer, dict) or self.under not in answer:
            got = type(answer).__name__
            if isinstance(answer, dict):
                got = f"the keys {one_line(self.service.without_key(', '.join(answer)), SHOWN) or 'none'}"
            raise RewardResponseError(f"{place} returned JSON with {got}; wanted {WANTED.format(self.under)}")
        given, components = (self.service.without_keys(answer.get(name)) for name in (self.under, "components"))
        components = {} if components is None else components
        if not isinstance(components, dict):
            raise RewardResponseError(
                f"{place} returned components of type {type(components).__name__}; wanted names with lists of numbers"
            )
        if self.missing.score is not None and MISSING in components:
            raise RewardResponseError(
                f"{place} returned a component {MISSING}, a name reserved for counting answers without a score; "
                "rename it, or leave out the reward's `missing`"
            )
        scores = self.missing.filled(given, place)
        if self.takes_steps:
            output = judged(scores, batch, place, by_token=False, rows=rows)
        else:
            output = RewardOutput(checked(scores, len(rows), place))
        parts = {}
        for name, values in components.items():
            source = f"{self.service.place}, component {name}{asked or ','}"
            parts[name] = checked(self.missing.filled(values, source), len(rows), source)
        return self.missing.marked(replace(output, components=parts), listed(given))


def http_source(config: HttpReward, name: str, key: str, tokenizer: PreTrainedTokenizerBase | None) -> HttpSource:
    """The source that a reward section describes.

    Args:
        name: name of the source.
        key: the section's configuration key, which messages about it begin with.
        tokenizer: the policy's; None will do for protocol tether.

    Raises:
        ConfigError: the service's key is not set.
    """
    under = "rewards" if config.protocol == "openrlhf" else "scores"
    match config.protocol:
        case "tether":
            payload = tether_payload(f"reward {name}", config.columns)
        case "openrlhf":
            payload = openrlhf_payload(f"reward {name}", tokenizer, *(config.columns or ()))
        case "llamafactory":
            payload = llamafactory_payload(tokenizer)
    return HttpSource(
        service_of(config, config.url, name=name, key=key, wanted=WANTED.format(under)),
        payload,
        batch_size=config.batch_size,
        takes_steps=config.protocol == "tether",
        missing=Missing(config.missing, name, key),
        under=under,
    )


def check_sent_columns(config: HttpReward, columns: Sequence[str], key: str) -> None:
    """Checks that the dataset has every column to be sent.

    Raises:
        ConfigError: it lacks one.
    """
    missing = [name for name in config.columns or () if name not in columns]
    if missing:
        raise ConfigError(
            f"{key}.columns: the dataset has no column {', '.join(missing)}; its columns are "
            f"{', '.join(columns) or 'none'}"
        )


def check_sent_values(config: HttpReward, prompt: Any, columns: Mapping[str, Any]) -> None:
    """Checks that a row's payload can be written as JSON.

    Args:
        prompt: the prompt as in the dataset.
        columns: the row's other columns.

    Raises:
        RewardError: it cannot; names the column.
    """
    sent = {name: value for name, value in columns.items() if config.columns is None or name in config.columns}
    for name, value in {"prompt": prompt, **sent}.items():
        _check_json(value, f"column {name}")


def tether_payload(name: str, columns: Sequence[str] | None) -> Payload:
    """Requests in Tether's protocol: prompts as in the dataset, responses as text, and columns.

    Args:
        name: the source's name in messages.
        columns: columns to send. None: all.
    """

    def payload(batch: RewardBatch, rows: Sequence[int]) -> Mapping[str, Any]:
        sent = {
            column: [values[row] for row in rows]
            for column, values in batch.columns.items()
            if columns is None or column in columns
        }
        prompts = [batch.prompts[row] for row in rows]
        for column, values in {"prompt": prompts, **sent}.items():
            for row, value in zip(rows, values, strict=True):
                _check_json(value, f"{name}: column {column} of {answer_of(row, len(batch))}")
        return {"prompts": prompts, "responses": [batch.responses[row] for row in rows], "columns": sent}

    return payload


def llamafactory_payload(tokenizer: PreTrainedTokenizerBase) -> Payload:
    """Requests in LLaMA-Factory's protocol: prompt and answer as one text, special tokens visible.

    Args:
        tokenizer: the policy's.
    """

    def payload(batch: RewardBatch, rows: Sequence[int]) -> Mapping[str, Any]:
        ids = [batch.read_ids(row) for row in rows]
        return {"model": "model", "messages": tokenizer.batch_decode(ids, skip_special_tokens=False)}

    return payload


def openrlhf_payload(name: str, tokenizer: PreTrainedTokenizerBase, label: str | None = None) -> Payload:
    """Requests in OpenRLHF's protocol: prompts with the chat template applied, alone and with their answers.

    Args:
        name: the source's name in messages.
        tokenizer: the policy's.
        label: column to send as labels. Default: empty labels, as there.
    """
    texts = llamafactory_payload(tokenizer)

    def payload(batch: RewardBatch, rows: Sequence[int]) -> Mapping[str, Any]:
        labels = [batch.columns[label][row] if label is not None else "" for row in rows]
        for row, value in zip(rows, labels, strict=True):
            _check_json(value, f"{name}: column {label} of {answer_of(row, len(batch))}")
        return {
            "query": texts(batch, rows)["messages"], "prompts": [batch.queries[row] for row in rows], "labels": labels
        }  # fmt: skip

    return payload


def _check_json(value: Any, where: str) -> None:
    """Raises ``RewardError`` if the value cannot be written as JSON; ``where`` names it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"{where} cannot be sent as JSON: {error}; change the dataset, or name the columns to send in `columns`"
        ) from error
