"""A language model as a reward source: it reads a rubric and replies with a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tether.config.keys import counted
from tether.config.rewards import JudgeReward
from tether.errors import RewardResponseError
from tether.report.text import one_line, prompt_text
from tether.rewards.base import answer_of
from tether.rewards.early import Asked, Begun, InGroups, whole
from tether.rewards.missing import Missing
from tether.rewards.service import NoScore, Post, Service, service_of
from tether.types import RewardBatch, RewardOutput

WANTED = 'JSON {"choices": [{"message": {"content": "..."}}]}'

_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_LINE = re.compile(rf"(?:[^:=：]{{1,40}}[:=：]\s*)?({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?\s*\.?")
_MARKS = str.maketrans("", "", "*_`#")


class NoNumber(NoScore):
    """A judge replied, and never in the form of a score."""


class JudgeSource:
    """Scores answers by a chat model's verdict on each, several at a time.

    Args:
        service: the model's address for chat completions.
        request: the request without its messages.
        rubric: text with ``{prompt}`` and ``{response}``.
        scale: lowest and highest number.
        attempts: maximum number of times that the judge is asked.
        missing: the score of answers to which it gives no number.
    """

    def __init__(
        self,
        service: Service,
        request: Mapping[str, Any],
        *,
        rubric: str,
        scale: tuple[float, float],
        attempts: int,
        missing: Missing,
    ) -> None:
        self.service = service
        self.request = request
        self.rubric = rubric
        self.scale = scale
        self.attempts = attempts
        self.missing = missing

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The numbers that the judge replies with.

        Raises:
            RewardTimeout: the service did not answer in time, nor on any retry.
            RewardResponseError: its answer holds no reply, or the judge never gave a number on the scale.
            RewardError: it could not be reached.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks about each answer as soon as it is finished."""
        session = self.service.session()

        def in_order(asked: Asked[float | None]) -> RewardOutput:
            by_row = {row: future.result() for (row,), future in asked}
            scores = [by_row[row] for row in range(len(batch))]
            return self.missing.output(scores, self.service.place)

        return InGroups(1, lambda rows: session.start(partial(self._graded, batch, rows[0])), in_order, session.close)

    def seen(self, batch: RewardBatch) -> list[str]:
        """What the judge is asked about each answer."""
        return [self._question(batch, row) for row in range(len(batch))]

    def _question(self, batch: RewardBatch, row: int) -> str:
        texts = {"prompt": prompt_text(batch.prompts[row]), "response": batch.responses[row]}
        return re.sub(r"\{(prompt|response)\}", lambda match: texts[match[1]], self.rubric)

    async def _graded(self, batch: RewardBatch, row: int, post: Post) -> float | None:
        """The judge's number for one answer; None if it gives none and that is not an error."""
        try:
            return await self._number(batch, row, post)
        except NoScore as error:
            if self.missing.score is None:
                raise RewardResponseError(f"{error}. Or {self.missing.way_out}") from error
            self.missing.tell(str(error))
            return None

    async def _number(self, batch: RewardBatch, row: int, post: Post) -> float:
        """The judge's number for one answer; asked again, it is reminded of the form."""
        lowest, highest = self.scale
        question = self._question(batch, row)
        reminder = f"\n\nReply with one number from {lowest:g} to {highest:g} and nothing else."
        for attempt in range(self.attempts):
            content = question + (reminder if attempt else "")
            messages = [{"role": "user", "content": content}]
            text, was_cut = self._reply(await post({**self.request, "messages": messages}))
            number = None if was_cut else last_number(text, self.scale)
            if number is not None:
                return number
        cut = ", cut off at max_tokens" if was_cut else ""
        raise NoNumber(
            f"{self.service.place} gave no number from {lowest:g} to {highest:g} for {answer_of(row, len(batch))} in "
            f"{counted(self.attempts, 'attempt')}; the last reply{cut}: "
            f"{one_line(self.service.without_key(text), 300)!r}. Wanted the number alone on the last line, or after a "
            "label as in Score: 7"
        )

    def _reply(self, answer: Any) -> tuple[str, bool]:
        """The judge's text, and whether it was cut off."""
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            got = one_line(self.service.without_key(repr(answer)), 300)
            raise RewardResponseError(f"{self.service.place} returned {got}; wanted {WANTED}") from error
        return text if isinstance(text, str) else "", choice.get("finish_reason") == "length"


def judge_source(config: JudgeReward, name: str, key: str) -> JudgeSource:
    """The source that a reward section describes.

    Args:
        name: name of the source.
        key: the section's configuration key, which messages about it begin with.

    Raises:
        ConfigError: the service's key is not set.
    """
    address = urlsplit(config.base_url)
    url = address._replace(path=f"{address.path.rstrip('/')}/chat/completions").geturl()
    request = {"model": config.model, "temperature": config.temperature, "max_tokens": config.max_tokens}
    return JudgeSource(
        service_of(config, url, name=name, key=key, wanted=WANTED),
        {field: value for field, value in request.items() if value is not None} | config.extra_body,
        rubric=config.rubric,
        scale=(config.scale[0], config.scale[1]),
        attempts=config.attempts,
        missing=Missing(config.missing, name, key),
    )


def last_number(reply: str, scale: tuple[float, float]) -> float | None:
    """The number that stands alone on a reply's last line, apart from a label, Markdown and "/10"; None if there is
    none.

    Nothing is guessed: a number in a sentence, off the scale, or out of a maximum other than the scale's does not
    count.
    """
    lines = reply.strip().splitlines()
    match = _LINE.fullmatch(lines[-1].translate(_MARKS).strip()) if lines else None
    if match is None or (match[2] is not None and float(match[2]) != scale[1]):
        return None
    number = float(match[1])
    return number if scale[0] <= number <= scale[1] else None
