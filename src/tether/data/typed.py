"""Special tokens typed into a message: treated as ordinary text, not as control tokens.

A message that holds ``<|im_end|>`` would otherwise end its own turn, and could open the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.types import Message

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Delimiters of a mark: private-use characters, which do not occur in text."""
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_TEXTS, _TRIED = ("\n", "."), ("b", " b", "\nb")
"""Texts that others are encoded behind, and texts to try that with."""


class TypedTokens:
    """Keeps typed special tokens apart from those that the chat template writes.

    Args:
        tokenizer: the tokenizer that defines the special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token.content: (number, token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content
        }
        self._numbers = {number for number, _ in self._special.values()} - {tokenizer.unk_token_id}
        self._names = sorted(self._special, key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._control = self._stand_in()

    def hidden(self, messages: Sequence[Message]) -> list[Message] | None:
        """The messages with a mark in place of each typed special token; None if there is none. Roles stay as they are;
        everything else may be typed: contents, names, thoughts, and the arguments of calls."""
        typed = [{name: value for name, value in message.items() if name != "role"} for message in messages]
        if not self.are_in(typed):
            return None
        return [{**message, **self.marked(own)} for message, own in zip(messages, typed, strict=True)]

    def are_in(self, value: Any) -> bool:
        """Whether any text in a value, at whatever depth, holds the name of a special token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.are_in(part) for pair in value.items() for part in pair)
        return isinstance(value, list | tuple) and any(map(self.are_in, value))

    def marked(self, value: Any) -> Any:
        """A value with a mark in place of each special token in its texts, at whatever depth."""
        if isinstance(value, str):
            return self._pattern.sub(self._marked, _bare(value))
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(part) for name, part in value.items()}
        return [self.marked(part) for part in value] if isinstance(value, list | tuple) else value

    def encoded(self, rendered: str, *, goes_on: bool = False) -> tuple[str, list[int]]:
        """Text and token ids of the chat template's rendering of ``hidden`` messages: special tokens that it wrote
        itself are control tokens, typed ones are encoded as ordinary characters.

        Args:
            goes_on: whether it continues another text, without the blank that some tokenizers put before a text.
        """
        ids: list[int] = []
        start, before = 0, _TEXTS if goes_on else ()
        for match in self._pattern.finditer(rendered):
            number, token = self._special[match[0]]
            text = rendered[start : match.start()]
            ids += self._plain(text.rstrip() if token.lstrip else text, *before)
            ids.append(number)
            start, before = match.end(), (self._control,)
            if token.rstrip:
                start += len(rendered[start:]) - len(rendered[start:].lstrip())
        ids += self._plain(rendered[start:], *before)
        return self._typed(rendered), ids

    def _marked(self, match: re.Match[str]) -> str:
        return f"{_OPEN}{self._names.index(match[0])}{_CLOSE}"

    def _typed(self, text: str) -> str:
        return _MARK.sub(lambda match: self._names[int(match[1])], text)

    def _plain(self, text: str, *before: str) -> list[int]:
        """Ids of text, none of them that of a control token.

        Args:
            before: as in ``_encoded``.
        """
        ids = self._encoded(self._typed(text), *before)
        if self._numbers.isdisjoint(ids):
            return ids
        # A vocabulary that holds the token's name as a word finds it anyway, unless it comes in two pieces.
        names = {str(i): f"{name[0]}{_OPEN}{name[1:]}" for i, name in enumerate(self._names)}
        first, *others = _MARK.sub(lambda match: names[match[1]], text).split(_OPEN)
        pieces = [self._encoded(first, *before), *(self._encoded(piece, *_TEXTS) for piece in others)]
        return [number for piece in pieces for number in piece if number not in self._numbers]

    def _stand_in(self) -> str:
        """A text behind which others have the same ids as behind a control token; empty if these are the ids that they
        have alone. Some tokenizers put a blank only before the first word of all, which control tokens may precede."""
        plain = [name for name in self._names if not (self._special[name][1].rstrip or self._special[name][1].lstrip)]
        for name in plain[:1]:
            ids = [self._tokenizer(f"{name}{text}", add_special_tokens=False)["input_ids"] for text in _TRIED]
            wanted = [each[1:] for each in ids if each[:1] == [self._special[name][0]]]
            for before in ("", *_TEXTS):
                if [self._encoded(text, before) for text in _TRIED] == wanted:
                    return before
        return ""

    def _encoded(self, text: str, *before: str) -> list[int]:
        """Ids of text behind the first of several other texts that lets it keep ids of its own; alone if none does.

        Args:
            before: other texts; empty if there is nothing before it.
        """
        if not text:
            return []
        for start in filter(None, before):
            ids, own = self._ids(start + text), self._ids(start)
            if ids[: len(own)] == own:
                return ids[len(own) :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _bare(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")
