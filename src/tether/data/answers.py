"""Answers contained in a dataset: found in its rows, and encoded as the policy would have written them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.data.forms import ROLES, content_told, is_given, role_told
from tether.data.queries import QueryFormat
from tether.data.sources import Row
from tether.data.typed import TypedTokens
from tether.errors import ConfigError, DataError
from tether.types import Message

_ANSWER = "Xyzzy, said he."
"""A placeholder answer that no chat template writes by itself."""
_BLANKS = ("▁", "Ġ")
"""How tokens write a blank: those of SentencePiece, and those of bytes."""


def last_turn(conversation: Any, where: str) -> tuple[list[Any], str]:
    """The messages before a conversation's last one, and the text of that one, the assistant's.

    Raises:
        DataError: it is not a list of messages, or its last one is not the assistant's; ``where`` names the row.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or len(conversation) == 0:
        raise DataError(f"{where}: got {conversation!r}, wanted text or a list of chat messages")
    last = conversation[-1]
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        told = f"{where}: the last message is {reprlib.repr(last)}, wanted the assistant's, with text as content"
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            told += f": its {content_told(last.get('content'))}"
        elif isinstance(last, Mapping) and last.get("role") not in (None, *ROLES):
            told += f": {role_told(last.get('role'), where)}"
        raise DataError(told)
    return list(conversation[:-1]), last["content"]


def before_answer(value: Any, where: str) -> tuple[list[Any], str]:
    """The messages of a conversation before its answer, and that answer.

    Raises:
        DataError: it is not a conversation; ``where`` names the row.
    """
    if isinstance(value, str):
        raise DataError(f"{where}: got text, but there is no column prompt to show where the answer begins")
    return last_turn(value, where)


def prompt_and_answer(row: Row, name: str, where: str) -> tuple[Any, str]:
    """Prompt and answer in column ``name``. Of several messages, all but the last belong to the prompt: they continue
    the column ``prompt``, or are a whole conversation, which needs no such column and may begin with it.

    Raises:
        DataError: the column holds neither text nor a conversation that ends with the assistant's message.
    """
    prompt, value = row.get("prompt"), row.get(name)
    if isinstance(value, str):
        return prompt, value
    before, answer = last_turn(value, where)
    if not before and prompt is None:
        raise DataError(f"{where}: one message and no column prompt; wanted the whole conversation")
    if not before or not is_given(prompt):
        return before or prompt, answer
    goes_on = name in ("completion", "response") or _role(before[0]) == "assistant"
    turns = _turns(prompt)
    return [*turns, *before] if goes_on and before[: len(turns)] != turns else before, answer


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _turns(prompt: Any) -> list[Any]:
    """A prompt as messages, unchecked."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt) if isinstance(prompt, Sequence) else [prompt]


def check_answers(prompts: Sequence[object | None], answers: Sequence[Sequence[str]], source: str) -> None:
    """Raises ``DataError`` if all answers of a dataset begin with their prompt, which would then be there twice.

    Some of many may repeat it by themselves, and so may one row alone.

    Args:
        prompts: prompt of each row; only those that are text count.
        answers: answers of each row.
        source: the dataset, for messages.
    """
    rows = [(prompt, each) for prompt, each in zip(prompts, answers, strict=True) if isinstance(prompt, str)]
    if len(rows) > 1 and all(answer.startswith(prompt) for prompt, each in rows for answer in each):
        raise DataError(
            f"{source}: all answers begin with their prompt, which would be there twice; wanted answers without it: "
            "remove it from them"
        )


def answer_ids(
    answers: Sequence[str], prompts: Sequence[str | list[Message] | None], form: QueryFormat, closing_id: int
) -> list[list[int]]:
    """Token ids of answers after their prompts, as in ``encoded_answers``. One in a conversation follows what the chat
    template writes before it, and special tokens in it are those of a message; see ``QueryFormat``.

    Args:
        prompts: prompts from ``checked_prompt``; None if answers are whole texts.
        closing_id: id of the end token; see ``closing_token``.
    """
    lead, plain = answer_lead(form.tokenizer), None if form.special_tokens else TypedTokens(form.tokenizer)
    are_messages = [prompt is not None and form.conversation(prompt) is not None for prompt in prompts]
    leads = [
        lead if is_message else "" if prompt is None else None
        for prompt, is_message in zip(prompts, are_messages, strict=True)
    ]
    typed = [plain if is_message else None for is_message in are_messages]
    return encoded_answers(answers, leads, form.tokenizer, closing_id, typed=typed)


def encoded_answers(
    answers: Sequence[str],
    leads: Sequence[str | None],
    tokenizer: PreTrainedTokenizerBase,
    closing_id: int,
    *,
    typed: Sequence[TypedTokens | None] | None = None,
) -> list[list[int]]:
    """Token ids of answers, each closed by one end token, also if its text ends with one already.

    Args:
        leads: what each answer begins with, unless it begins with a blank already; see ``answer_lead``. None: the
            answer continues the text of its prompt, with nothing in between, not even the tokenizer's blank.
        closing_id: id of the end token; see ``closing_token``.
        typed: encodes special tokens typed into an answer as ordinary characters; None for an answer in which they are
            control tokens. Default: in all of them.
    """
    ends = (tokenizer.eos_token, tokenizer.convert_ids_to_tokens(closing_id))
    bare = [
        ("" if answer[:1].isspace() else lead or "") + _unclosed(answer, ends)
        for answer, lead in zip(answers, leads, strict=True)
    ]
    encoded = _ids(bare, tokenizer)
    going_on = [i for i, lead in enumerate(leads) if lead is None]
    for i, ids in zip(going_on, _continuing([bare[i] for i in going_on], tokenizer), strict=True):
        encoded[i] = ids
    for i, own in enumerate(typed or ()):
        marked = None if own is None else own.hidden([{"role": "assistant", "content": bare[i]}])
        if marked is not None:
            encoded[i] = own.encoded(marked[0]["content"], goes_on=leads[i] is None)[1]
    return [[*ids, closing_id] for ids in encoded]


def _unclosed(answer: str, ends: Sequence[str]) -> str:
    """An answer without the end token that its text ends with, if it does, and without blanks behind that."""
    bare = answer.rstrip()
    return next((bare.removesuffix(end) for end in ends if bare.endswith(end)), answer)


def _continuing(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of texts as they continue another text.

    Tokenizers that put a blank before every text are given each behind a character, whose tokens are then left out.
    """
    encoded, (letter,) = _ids(texts, tokenizer), _ids(["b"], tokenizer)
    before = tokenizer.decode(letter)  # some keep the blank in front of a whole text
    if tokenizer.decode([*letter, *letter]) == f"{before}b":
        return encoded
    for start in ("\n", ".") if texts else ():
        (first,) = _ids([start], tokenizer)
        behind = _ids([start + text for text in texts], tokenizer)
        for i, (text, ids) in enumerate(zip(texts, behind, strict=True)):
            own = ids[len(first) :]
            is_wrong = tokenizer.decode([*letter, *encoded[i]]) != before + text
            if is_wrong and tokenizer.decode([*letter, *own]) == before + text:
                encoded[i] = own
    return encoded


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def answer_lead(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The blank that the chat template writes between prompt and answer, if it belongs to the answer's first token.

    Empty without a template, or if the tokenizer itself puts a blank before every text. None if it does, but the prompt
    already ends with a blank or a line break, behind which the template writes no other.
    """
    if tokenizer.chat_template is None:
        return ""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        before = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # templates raise whatever their authors chose; rows that they refuse are reported one by one
        return ""
    writes_blank = text.startswith(f"{before} b")
    if "".join(tokenizer.tokenize("b")).startswith(_BLANKS):
        return None if before[-1:].isspace() and not writes_blank else ""
    return " " if writes_blank else ""


def closing_token(tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> int:
    """The token that ends an answer: the first end token that the chat template puts after one, else the tokenizer's.

    Args:
        end_ids: ids of the tokens that end an answer of the policy.

    Raises:
        ConfigError: the tokenizer has no end token.
        DataError: the chat template refuses a conversation with an answer.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.path: the tokenizer has no end token (eos_token), which closes every answer; set one")
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # templates raise whatever their authors chose
            raise DataError(f"the chat template refuses a user's turn with its answer: {error}") from error
        behind = text.rpartition(_ANSWER)[2]
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        if (found := next((token for token in ids if token in end_ids), None)) is not None:
            return found
    return tokenizer.eos_token_id
