"""How a judge reads an answer that another tokenizer wrote: as text, in its own chat template or joined.

If a judge's tokenizer is the policy's, it reads token ids instead, exactly as they were sampled. Otherwise special
tokens of the judge are ordinary text if typed into a prompt or spelled out by the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedTokenizerBase

from tether.data.queries import text_start
from tether.data.rendering import rendered
from tether.data.typed import TypedTokens
from tether.errors import RewardError
from tether.rewards.base import answer_of
from tether.rewards.missing import Missing
from tether.types import Message, RewardBatch

T = TypeVar("T")
InputFormat = Literal["auto", "chat", "joined", "pair", "response"]

READS_TO = "judge_reads_to"
"""What ``tether reward`` adds to the judge's tokenizer_config.json: the token that closed every answer in training, at
which the judge's score is that of the answer. A judge that reads text reads every answer to it; of the policy's token
ids it reads those that were sampled, also where an answer was cut off or ended by another token."""
_PROBE = "Hello, World!  It's 1234567.89 — naïve café,\n\n\tdef f(x): return x  # 漢字 🙂 <|end|> ."
LETTER = "a"
"""The shortest non-empty text."""


@dataclass(frozen=True)
class JudgedText:
    """What a judge reads for one answer, before encoding."""

    text: str
    """The text, or the first of two."""
    second: str | None = None
    """The second of two texts that the tokenizer joins."""
    is_templated: bool = False
    """Whether a chat template wrote it, special tokens included."""
    is_marked: bool = False
    """Whether it contains marks of ``TypedTokens`` in place of typed special tokens."""


@runtime_checkable
class Reads(Protocol):
    """A reward source with a model that reads text, which can be inspected."""

    def seen(self, batch: RewardBatch) -> list[str]:
        """What the model reads of each answer, special tokens visible."""
        ...


class Reader:
    """Puts prompts and answers into the form that a judge was trained on, and encodes them.

        auto      a conversation in the judge's chat template; plain text followed by the answer
        chat      always in the judge's chat template; a plain text is the user's turn
        joined    the contents of a conversation's messages and the answer, blank lines between; plain text as in auto
        pair      two texts: the prompt, a conversation's messages joined as above, and the answer
        response  the answer alone

    Args:
        tokenizer: the judge's.
        name: the source's name in messages.
        special_tokens: whether the judge's special tokens are control tokens within a prompt or an answer.
        now: date and time for the judge's chat template, as in ``rendered``.
        end_id: a token that ``features`` must hold, at the end if nothing else writes it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        input_format: InputFormat,
        name: str,
        *,
        special_tokens: bool = False,
        now: str | None = None,
        end_id: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._end_id = end_id
        self.now = now
        self.input_format = input_format
        self.name = name
        self.typed = None if special_tokens else TypedTokens(tokenizer)
        closing = tokenizer.init_kwargs.get(READS_TO)
        self._closing_id = None if closing is None else tokenizer.convert_tokens_to_ids(closing)

    def texts(self, batch: RewardBatch) -> list[JudgedText]:
        """What the judge reads of each answer.

        Raises:
            RewardError: a conversation cannot be put into the judge's chat template.
        """
        return [
            self.text(
                batch.prompts[row], batch.conversations[row], batch.responses[row], f"answer {row} of {len(batch)}"
            )
            for row in range(len(batch))
        ]

    def text(
        self, prompt: str | Sequence[Message], conversation: Sequence[Message] | None, response: str, where: str
    ) -> JudgedText:
        """What the judge reads of one answer.

        Args:
            prompt: the prompt as in the dataset; text if there is no conversation.
            conversation: the chat messages that the policy was shown, None for plain text.
            where: name of the answer in messages.

        Raises:
            RewardError: the conversation cannot be put into the judge's chat template, or there is none.
        """
        turns = [{"role": "user", "content": prompt}] if conversation is None else list(conversation)
        messages = [*turns, {"role": "assistant", "content": response}]
        marked = None if self.typed is None else self.typed.hidden(messages)
        is_marked = marked is not None
        messages = marked or messages
        *parts, answer = [message["content"] for message in messages]
        if self.input_format == "response":
            return JudgedText(answer, is_marked=is_marked)
        if self.input_format == "chat" and conversation is None and not prompt:
            raise RewardError(
                f"reward {self.name}: {where} (counted from 0) is a text without a prompt, for which input_format "
                "chat has no turn; wanted prompts with answers, or set input_format to auto"
            )
        if self.input_format == "chat" or (self.input_format == "auto" and conversation is not None):
            return JudgedText(self._rendered(messages, where), is_templated=True, is_marked=is_marked)
        if self.input_format == "pair":
            return JudgedText("\n\n".join(parts), answer, is_marked=is_marked)
        between = "" if conversation is None else "\n\n"
        return JudgedText(between.join([*parts, answer]), is_marked=is_marked)

    def token_ids(self, judged: JudgedText) -> list[int]:
        """Token ids for a decoder: the beginning-of-sequence token once, if the tokenizer or the template writes one.

        A template's text gets nothing else; other text gets what the tokenizer puts around text. If that is nothing, an
        empty text is read as the beginning-of-sequence token, or the end token of a tokenizer without one.

        A judge trained to read up to a closing token (``READS_TO``) reads up to it, whatever blanks its template writes
        after it.
        """
        ids = self._opened(judged)
        if self._closing_id is None:
            return ids
        end = len(ids) - ids[::-1].index(self._closing_id) if self._closing_id in ids else 0
        is_closed = end > 0 and not self.tokenizer.decode(ids[end:]).strip()
        return ids[:end] if is_closed else [*ids, self._closing_id]

    def _opened(self, judged: JudgedText) -> list[int]:
        """Token ids for a decoder, with what stands before the text."""
        if judged.is_templated:
            ids, start = self._bare(judged.text, judged.is_marked), text_start(self.tokenizer)
            return ids if ids[: len(start)] == start else start + ids
        ids = self._whole(judged)["input_ids"]
        if not ids:
            alone = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            return [token for token in alone if token is not None][:1]
        is_doubled = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id
        return ids[1:] if is_doubled else ids

    def features(self, judged: JudgedText) -> dict[str, list[int]]:
        """What the tokenizer makes of the text for its own family: token ids, mask and, if it has them, token types.

        Its special tokens surround the text once, even if a template wrote the first or the last one itself.
        """
        encoded = self._whole(judged)
        if judged.is_templated:
            ids, special = encoded["input_ids"], set(self.tokenizer.all_special_ids)
            start = int(ids[0] == ids[1] and ids[0] in special)
            end = len(ids) - int(ids[-1] == ids[-2] and ids[-1] in special)
            encoded = {name: values[start:end] for name, values in encoded.items()}
        if self._end_id is None or self._end_id in encoded["input_ids"]:
            return encoded
        of_end = {"input_ids": self._end_id, "attention_mask": 1}
        return {name: [*values, of_end.get(name, values[-1] if values else 0)] for name, values in encoded.items()}

    def _bare(self, text: str, is_marked: bool) -> list[int]:
        """Token ids of a text with nothing around it."""
        if is_marked:
            return self.typed.encoded(text)[1]
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _whole(self, judged: JudgedText) -> dict[str, list[int]]:
        """What the tokenizer makes of one text or two, with what it puts around them."""
        if not judged.is_marked:
            return dict(self.tokenizer(judged.text, judged.second))
        texts = [judged.text, judged.second] if judged.second else [judged.text]
        whole = dict(self.tokenizer(*(LETTER for _ in texts)))
        letter = self._bare(LETTER, is_marked=False)
        ids, size = whole["input_ids"], len(letter)
        places = [i for i in range(len(ids)) if ids[i : i + size] == letter]
        for place, text in reversed(list(zip((places[0], places[-1]), texts, strict=False))):
            found = self._bare(text, is_marked=True)
            for name, values in whole.items():
                middle = found if name == "input_ids" else values[place : place + 1] * len(found)
                whole[name] = values[:place] + middle + values[place + size :]
        return whole

    def _rendered(self, messages: Sequence[Message], where: str) -> str:
        """The whole conversation in the judge's chat template."""
        if self.tokenizer.chat_template is None:
            raise RewardError(
                f"reward {self.name}: {where} (counted from 0) is to be read as a conversation, but the reward model's "
                "tokenizer has no chat template. Set the reward's input_format to joined, pair or response, whichever "
                "the model was trained on, or give its tokenizer a chat template"
            )
        try:
            return rendered(self.tokenizer, messages, self.now)
        except Exception as error:  # templates raise whatever their authors chose
            roles = ", ".join(message["role"] for message in messages)
            raise RewardError(
                f"reward {self.name}: {where} (counted from 0) does not fit the reward model's chat template, which "
                f"refuses messages of the roles {roles}: {type(error).__name__}: {error}"
            ) from error


def readable(
    read: Sequence[T], lengths: Sequence[int], limit: int | None, name: str, missing: Missing
) -> list[T | None]:
    """What the judge reads for each answer; None if it cannot: the text is empty, or longer than the limit.

    Args:
        read: what it would read.
        lengths: number of tokens in each answer with its prompt.
        limit: maximum number of tokens; None if there is no limit.
        missing: the score of such answers.

    Raises:
        RewardError: it cannot read an answer, and that is an error; names the first.
    """
    able: list[T | None] = []
    for row, (each, length) in enumerate(zip(read, lengths, strict=True)):
        why = f"reward {name}: {answer_of(row, len(lengths))} "
        if length == 0:
            why += "is an empty text, and the reward model's tokenizer has no token to represent it"
            ways = [
                "give it a bos_token or an eos_token that the model knows",
                "set input_format to auto, joined or pair",
            ]
        elif limit is not None and length > limit:
            why += f"has {length} tokens with its prompt, but the limit is {limit}"
            key = "the reward's max_length" if missing.section is None else f"{missing.section}.max_length"
            ways = [
                f"raise {key} if the model can take more",
                "start a run with shorter prompts or answers (data.max_prompt_length, sampling.response_length)",
            ]
        else:
            able.append(each)
            continue
        if missing.score is None:
            ways = ways if missing.section is None else [missing.way_out, *ways]
            raise RewardError(f"{why}: {', or '.join(ways)}")
        missing.tell(why)
        able.append(None)
    return able


def with_stand_ins(read: Sequence[T | None], encode: Callable[[JudgedText], T]) -> list[T]:
    """The result of ``readable`` with a short text in place of each None: the number of forwards, which several
    processes may run in step, does not depend on what can be read."""
    return [encode(JudgedText(LETTER)) if each is None else each for each in read]


def scores_of_read(scores: Sequence[float], read: Sequence[Any]) -> list[float | None]:
    """The scores of ``with_stand_ins``, None in place of those of stand-ins."""
    return [None if each is None else score for score, each in zip(scores, read, strict=True)]


def same_tokenizer(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both write the same conversation as the same token ids; pad tokens may differ, as no text holds one."""
    return _fingerprint(tokenizer) == _fingerprint(other)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """What decides the token ids of a text."""
    return {
        "vocabulary": tokenizer.get_vocab(),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
        "probe": tokenizer(_PROBE)["input_ids"],
    }
