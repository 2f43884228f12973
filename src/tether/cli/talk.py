"""A conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.errors import ConfigError, DataError
from tether.report.text import visible

if TYPE_CHECKING:
    from tether.inference.chat import Chat, Speaker


def talk(chat: Chat) -> None:
    """Reads lines until /quit or end of input, and shows every model's answer to each."""
    console = Console()
    is_typed = sys.stdin.isatty()
    while True:
        if is_typed:
            console.print("[bold]›[/bold] ", end="")
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text in ("/quit", "/exit"):
            return
        if text == "/new":
            chat.forget()
            console.print("a new conversation", markup=False)
        elif text.startswith("/system"):
            try:
                chat.instruct(text.removeprefix("/system").strip() or None)
            except ConfigError as error:
                console.print(visible(str(error)), markup=False)
                continue
            console.print(f"a new conversation, with {'this' if chat.system else 'no'} system prompt", markup=False)
        elif text.startswith("/"):
            console.print("/new forgets the conversation, /system TEXT sets a system prompt, /quit ends", markup=False)
        elif text:
            try:
                _answer(chat, text, console)
            except (ConfigError, DataError) as error:
                without = ", /system alone removes the system prompt" if chat.system else ""
                console.print(f"{visible(str(error))}; /new starts over{without}", markup=False)


def _answer(chat: Chat, text: str, console: Console) -> None:
    """Shows every model's answer: on a terminal as it is written, one after the other; otherwise side by side."""
    if not console.is_terminal:
        _show(chat, chat.say(text), console)
        return
    speaking = None

    def tell(speaker: Speaker, text: str) -> None:
        nonlocal speaking
        if speaker is not speaking:
            if speaking is not None:
                console.print()
            console.print(Text(visible(speaker.name), style="bold"))
            speaking = speaker
        console.print(Text(visible(text)), end="", soft_wrap=True)

    try:
        answers = chat.say(text, tell)
    finally:
        if speaking is not None:
            console.print()
    for speaker, answer in zip(chat.speakers, answers, strict=True):
        if not answer:
            console.print(Text(visible(f"{speaker.name}: (nothing)")))


def _show(chat: Chat, answers: list[str], console: Console) -> None:
    """Shows answers side by side, under their models' names."""
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for speaker in chat.speakers:
        table.add_column(Text(visible(speaker.name)), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(answer) or "(nothing)") for answer in answers))
    console.print(table)
