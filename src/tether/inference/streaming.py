"""The text of an answer while it is being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from tether.models.stop_strings import BROKEN, SLACK, StopStrings, answer_text, continued
from tether.types import Sampling


class Streamed:
    """Tells the text of one answer bit by bit, as ``TextEnds`` of its sampling, which is asked after every token.

    Only what no later token can change is told: not half a character, not the beginning of a stop string, and no blanks
    at either end.

    Args:
        sampling: how the answer is sampled.
        tell: called with each bit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, tell: Callable[[str], None]) -> None:
        self._tokenizer, self._sampling, self._tell = tokenizer, sampling, tell
        self._open = SLACK if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0
        self._told = ""

    def ends(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether the answer's text ends it; tells what it has got so far."""
        inner = self._sampling.text_ends
        is_end = inner is not None and inner.ends(token_ids, before)
        if not is_end:
            text = continued(token_ids, before, self._tokenizer).rstrip(BROKEN)
            text = text[: len(text) - self._open]
            self._extend((inner.settled(text) if isinstance(inner, StopStrings) else text).strip())
        return is_end

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """As without streaming."""
        return answer_text(token_ids, self._tokenizer, self._sampling, before)

    def closed(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """As without streaming."""
        inner = self._sampling.text_ends
        return list(token_ids) if inner is None else inner.closed(token_ids, before)

    def finish(self, answer: str) -> None:
        """Tells the rest of the whole answer."""
        if answer.startswith(self._told):
            self._extend(answer)
        else:  # a tokenizer that reads a text anew with every token
            self._tell(f"\n{answer}")

    def _extend(self, text: str) -> None:
        if len(text) > len(self._told) and text.startswith(self._told):
            self._tell(text[len(self._told) :])
            self._told = text
