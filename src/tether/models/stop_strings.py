"""Answers as text, and strings that end them: ``sampling.stop_strings``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from tether.models.chat import turn_end
from tether.types import Sampling

BROKEN = "\ufffd"
"""What bytes are decoded to that are no character, or not yet."""
SLACK = 8
"""Number of characters at the beginning of the last tokens of a text that may read differently there than in the whole
text: a blank that is dropped, the end of a character, a contraction that the tokenizer cleans up."""
_LONGEST_CHARACTER = 4
"""Number of tokens that may hold one character, its bytes."""


class StopStrings:
    """Ends an answer as soon as its text contains one of some strings.

    The text is that of the answer, read with special tokens and read without them: a string may contain the name
    of a special token, and no special token within a string hides it. All tokens stay part of the answer; its text ends
    before the first string.

    Nothing is kept of an answer that is being written. Only a token that may complete a string makes its last tokens be
    decoded, and only if these contain a string, the whole answer, whose text decides. A token's text may depend on its
    neighbors: several tokens may hold the bytes of one character, and many tokenizers drop the first blank of a text.

    Args:
        tokenizer: the policy's.
        strings: at least one, none of them empty.
        longest: maximum number of tokens of an answer, for which judges have room; None if there is no limit.

    ``before``, an argument of its methods, is ``Prompt.before``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], *, longest: int | None = None
    ) -> None:
        assert strings and all(strings)
        self._tokenizer, self._strings, self._longest = tokenizer, tuple(strings), longest
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = added | set(tokenizer.all_special_ids)
        self._least = max(map(len, strings)) + SLACK
        self._last = {string[-1] for string in strings}
        # A blank may belong to the next token, and cleaning up may pull a string together that ended before.
        self._any_completes = any(map(str.isspace, self._last)) or bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False)
        )
        ends = (turn_end(tokenizer), tokenizer.eos_token_id)
        self._end = [token for token in ends if token is not None][:1]
        self._completing: dict[int, int] = {}

    def ends(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether an answer that did not end before its last token ends with it."""
        if (size := self._size(token_ids[-1])) == 0:
            return False
        whole = [*_context(before, self._tokenizer), *token_ids] if before else token_ids
        readings = [whole]
        if not self._special.isdisjoint(whole):
            readings.append([token for token in whole if token not in self._special])
        return any(self._start(self._tail(ids, size)) is not None for ids in readings) and (
            self._cut(token_ids, before) is not None
        )

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """An answer as text, without special tokens, up to the first string."""
        return self._read(token_ids, before) if (cut := self._cut(token_ids, before)) is None else cut[1]

    def closed(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """The tokens of an answer up to the first string and an end token, if the tokenizer has one; as they are if the
        answer contains no string.

        A token that holds the beginning of the string is replaced by tokens of what stands before it, or left out if
        judges have no room for these.
        """
        if (cut := self._cut(token_ids, before)) is None:
            return list(token_ids)
        count, text = cut
        ids = whole = list(token_ids[:count])
        if (held := self._read(whole, before)) != text:
            rest = self._encoded(text[len(held) :])
            ways = [*([*whole, *ids] for ids in rest), *self._encoded(text)]
            ids = next((ids for ids in ways if self._read(ids, before) == text), ways[2])
        if self._longest is not None and len(ids) + len(self._end) > self._longest:
            ids = whole
        return ids + self._end

    def settled(self, text: str) -> str:
        """The text of an unfinished answer without the beginning of a string at its end."""
        held = max(
            (
                size
                for string in self._strings
                for size in range(1, min(len(string), len(text) + 1))
                if text.endswith(string[:size])
            ),
            default=0,
        )
        return text[: len(text) - held]

    def _size(self, token: int) -> int:
        """Number of characters at the end of an answer in which a string may be that this token completes; 0 if it
        completes none."""
        if token not in self._completing:
            text = self._tokenizer.decode([token])
            completes = self._any_completes or BROKEN in text or not self._last.isdisjoint(text)
            self._completing[token] = self._least + len(text) if completes else 0
        return self._completing[token]

    def _tail(self, token_ids: Sequence[int], size: int) -> str:
        """The end of a text, at least ``size`` characters if it has as many."""
        count = size
        while True:
            text = self._tokenizer.decode(token_ids[-count:])
            if BROKEN in text:
                # Some tokenizers read no byte of a row of bytes that begins within a character.
                texts = [text, *(self._tokenizer.decode(token_ids[-count - more :]) for more in (1, 2, 3))]
                text = min(texts, key=lambda text: text.count(BROKEN))
            if len(text) >= size or count >= len(token_ids):
                return text
            count *= 2

    def _cut(self, token_ids: Sequence[int], before: Sequence[int]) -> tuple[int, str] | None:
        """Number of tokens before the one that the first string begins in, and the text before it; None if there is no
        string."""
        for is_plain in (True, False):
            whole = self._read(token_ids, before, is_plain=is_plain)
            if (start := self._start(whole)) is None:
                continue
            count, held = len(token_ids), whole
            while len(held) > start or not whole.startswith(held):
                count -= 1
                held = self._read(token_ids[:count], before, is_plain=is_plain)
            if is_plain:
                return count, whole[:start]
            plain, text = self._read(token_ids, before), self._read(token_ids[:count], before)
            rest = whole[len(held) : start]
            if token_ids[count] not in self._special and plain.startswith(text + rest):
                text += rest
            return count, text
        return None

    def _start(self, text: str) -> int | None:
        """Where the first string begins; None if there is none."""
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        return min(starts, default=None)

    def _read(self, token_ids: Sequence[int], before: Sequence[int], *, is_plain: bool = True) -> str:
        return continued(token_ids, before, self._tokenizer, skip_special_tokens=is_plain)

    def _encoded(self, text: str) -> list[list[int]]:
        """Token ids of text as a text of its own, and behind a line break, where no tokenizer puts a blank before it;
        none of them special by its name."""
        whole, after, start = (
            list(self._tokenizer(each, add_special_tokens=False, split_special_tokens=True)["input_ids"])
            for each in (text, f"\n{text}", "\n")
        )
        return [whole, after[len(start) :]]


def answer_text(
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    before: Sequence[int] = (),
) -> str:
    """An answer as everything reads it: without special tokens, and without the token or string that ended it.

    Args:
        tokenizer: the policy's.
        sampling: how it was sampled.
        before: ``Prompt.before``.
    """
    if sampling.text_ends is not None:
        text = sampling.text_ends.text(token_ids, before)
        if text != continued(token_ids, before, tokenizer):
            return text
    if token_ids and token_ids[-1] in sampling.stop_token_ids:
        token_ids = token_ids[:-1]  # it need not be a special token
    return continued(token_ids, before, tokenizer)


def continued(
    token_ids: Sequence[int],
    before: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    skip_special_tokens: bool = True,
) -> str:
    """What tokens add to the text of those before them, so that both texts joined are the text of both.

    On their own, tokens may read differently: many tokenizers drop the first blank of a text, and some put blanks
    between tokens. A character whose first bytes are in ``before`` belongs to what follows.

    Args:
        before: ``Prompt.before``; if empty, the tokens are a text of their own.
    """
    if not before:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    start = _context(before, tokenizer)
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    whole = decode([*start, *token_ids])
    for count in range(len(start), max(len(start) - _LONGEST_CHARACTER, -1), -1):
        if whole.startswith(text := decode(start[:count])):
            return whole[len(text) :]
    shared = min(len(text), len(whole))  # a blank before that is cleaned up
    return whole[next((i for i in range(shared) if text[i] != whole[i]), shared) :]


def _context(before: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """The last tokens before an answer, as many as decide how it reads."""
    for count in (SLACK, len(before)):
        text = tokenizer.decode(before[-count:], skip_special_tokens=True)
        if text.strip() and BROKEN not in text:
            break
    return before[-count:]
