"""Special tokens typed into a message: treated as ordinary text, not as control tokens.

A message that holds ``<|im_end|>`` would otherwise end its own turn, and could open the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.types import Message

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Delimiters of a mark: private-use characters, which do not occur in text."""
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


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

    def hidden(self, messages: Sequence[Message]) -> list[Message] | None:
        """The messages with a mark in place of each typed special token; None if there is none."""
        if not any(self._pattern.search(message["content"]) for message in messages):
            return None
        contents = [self._pattern.sub(self._marked, _bare(message["content"])) for message in messages]
        return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]

    def encoded(self, rendered: str) -> tuple[str, list[int]]:
        """Text and token ids of the chat template's rendering of ``hidden`` messages: special tokens that it wrote
        itself are control tokens, typed ones are encoded as ordinary characters."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(rendered):
            number, token = self._special[match[0]]
            text = rendered[start : match.start()]
            ids += self._plain(text.rstrip() if token.lstrip else text)
            ids.append(number)
            start = match.end()
            if token.rstrip:
                start += len(rendered[start:]) - len(rendered[start:].lstrip())
        ids += self._plain(rendered[start:])
        return self._typed(rendered), ids

    def _marked(self, match: re.Match[str]) -> str:
        return f"{_OPEN}{self._names.index(match[0])}{_CLOSE}"

    def _typed(self, text: str) -> str:
        return _MARK.sub(lambda match: self._names[int(match[1])], text)

    def _plain(self, text: str) -> list[int]:
        """Ids of text, none of them that of a control token."""
        ids = self._encoded(self._typed(text))
        if self._numbers.isdisjoint(ids):
            return ids
        # A vocabulary that holds the token's name as a word finds it anyway, unless it comes in two pieces.
        names = {str(i): f"{name[0]}{_OPEN}{name[1:]}" for i, name in enumerate(self._names)}
        broken = _MARK.sub(lambda match: names[match[1]], text)
        ids = [number for piece in broken.split(_OPEN) for number in self._encoded(piece)]
        return [number for number in ids if number not in self._numbers]

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _bare(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")
