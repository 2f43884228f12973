"""Conversations as text, in the chat template of a tokenizer, at a given date."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.types import Message

_CLOCK = "strftime_now"
"""The function by which a template asks for the present date and time, in a format of C's strftime."""
_DIRECTIVES = [flag + letter for flag in ("", "-") for letter in "aAbBcCdDeFgGhHIjklmMnprRStTuUVwWxXyYzZf"]


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], now: str | None = None, **arguments: Any
) -> str:
    """The text of a conversation in the tokenizer's chat template.

    Args:
        now: date and time, in ISO form, for templates that print the present ones; None: the present ones.
        arguments: further arguments of ``apply_chat_template``.
    """
    template = tokenizer.get_chat_template(arguments.pop("chat_template", None), arguments.get("tools"))
    if now is not None and _CLOCK in template and _CLOCK not in arguments:
        template = _stopped_clock(now) + template
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)


@lru_cache
def _stopped_clock(now: str) -> str:
    """The beginning of a template in which ``strftime_now`` gives this date and time.

    transformers passes no functions to a template, so this writes a macro, with the text of every directive. The line
    break at its end belongs to the macro, so what follows reads as at the beginning of a template.
    """
    moment, replaced = datetime.fromisoformat(now), ""
    for directive in _DIRECTIVES:
        try:
            text = moment.strftime(f"%{directive}")
        except ValueError:  # "-", which some systems do not have
            continue
        replaced += f".replace({'%' + directive!r}, {text!r})"
    return (
        f"{{%- macro {_CLOCK}(format) -%}}{{%- for text in format.split('%%') -%}}"
        f"{{{{ '' if loop.first else '%' }}}}{{{{ text{replaced} }}}}"
        "{%- endfor -%}{%- endmacro %}\n"
    )
