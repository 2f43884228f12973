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
    from tether.inference.chat import Chat


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
            chat.system = text.removeprefix("/system").strip() or None
            chat.forget()
            console.print(f"a new conversation, with {'this' if chat.system else 'no'} system prompt", markup=False)
        elif text.startswith("/"):
            console.print("/new forgets the conversation, /system TEXT sets a system prompt, /quit ends", markup=False)
        elif text:
            try:
                _show(chat, chat.say(text), console)
            except (ConfigError, DataError) as error:
                without = ", /system alone removes the system prompt" if chat.system else ""
                console.print(f"{visible(str(error))}; /new starts over{without}", markup=False)


def _show(chat: Chat, answers: list[str], console: Console) -> None:
    """Shows answers side by side, under their models' names."""
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for speaker in chat.speakers:
        table.add_column(Text(visible(speaker.name)), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(answer) or "(nothing)") for answer in answers))
    console.print(table)
