"""A run on the terminal: one live line on a terminal, plain lines in logs and CI.

Both show the same: phase, updates done, time left, reward, KL. Text from a model or dataset reaches the terminal only
after ``report.text.visible`` has escaped its control characters, and Rich's markup is never interpreted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tether.report.text import duration, number, one_line, prompt_text, visible

FIRST_PHASE = "rollout"
"""The phase with which an update begins: evaluations and saving before it do not count towards its time."""
RECENT = 10
"""Number of updates whose median duration predicts the time left."""
SETTLING = 2.0
"""Seconds into a phase before its own pace is meaningful."""
SHOWN_ROWS = 6
SHOWN_METRICS = (
    ("reward", "objective/scores"),
    ("KL", "objective/kl"),
    ("loss", "loss"),
    ("token accuracy", "mean_token_accuracy"),
    ("accuracy", "accuracy"),
)
"""Metrics that the progress line shows for an update, if measured."""
PROMPT, ANSWER, CELL, MESSAGE = 80, 240, 400, 4_000
"""Maximum number of characters of a prompt and an answer in the table of samples, of a cell in another table, of a
message."""
_ASCII = str.maketrans({"·": "|", "…": "...", "−": "-", "–": "-"})


class Pace:
    """Measures how long updates take."""

    def __init__(self) -> None:
        # a tuple, never changed in place: the live line reads it from another thread
        self._durations: tuple[float, ...] = ()
        self._begun: float | None = None
        self._last: tuple[int, float] | None = None

    def begin(self, now: float) -> None:
        """Marks the beginning of the current update, unless it has begun already."""
        if self._begun is None:
            self._begun = now

    def finish(self, step: int, now: float) -> None:
        """Marks the end of update ``step``; updates since the last call share the time."""
        done = step - self._last[0] if self._last else 1
        begun = self._begun if self._begun is not None else self._last[1] if self._last else None
        if begun is not None and done > 0:
            self._durations = (*self._durations, (now - begun) / done)[-RECENT:]
        self._begun, self._last = None, (step, now)

    def left(self, updates: int, now: float) -> float | None:
        """Seconds for ``updates`` more updates, including the current one; None before the first is done."""
        if not self._durations:
            return None
        each = statistics.median(self._durations)
        spent = now - self._begun if self._begun is not None else 0.0
        return updates * each - min(spent, each)


class Outlet:
    """A stream that falls silent when it is closed, or when a write fails because the terminal or the reader of a pipe
    is gone, or the disk is full. The run continues regardless.

    Args:
        stream: the text stream to write to.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._is_gone = stream, False

    def write(self, text: str) -> int:
        """Writes, or drops what can no longer be read; returns the number of characters in it."""
        if not self._has_gone():
            try:
                self._stream.write(text)
            except OSError:
                self._fall_silent()
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        if not self._has_gone():
            try:
                self._stream.flush()
            except OSError:
                self._fall_silent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _has_gone(self) -> bool:
        return self._is_gone or self._stream.closed

    def _fall_silent(self) -> None:
        self._is_gone = True
        with suppress(OSError):  # buffered data would fail again when Python exits
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class RunDisplay:
    """A ``Display`` on the terminal, silent once that is gone. Also a context manager that closes itself.

    Args:
        console: where to write. Default: standard output.
        interval: minimum number of seconds between two lines about updates, and between two about phases.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, console: Console | None = None, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console()
        self.console.file = Outlet(self.console.file)
        self._interval, self._clock = interval, clock
        self._live: Live | None = None
        self._written: dict[str, float] = {}
        self._forget()

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The callbacks

    def phase(self, name: str, done: int, total: int) -> None:
        """Shows the progress of the current phase."""
        now = self._clock()
        if name == FIRST_PHASE:
            self._pace.begin(now)
        if name != self._phase[0]:
            self._entered = now
        self._phase = (name, done, total)
        if self.console.is_interactive:
            self._show_live()
        else:
            self._write_line("phase")

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished update; leaves a line, always for the first and the last one."""
        self._pace.finish(step, self._clock())
        is_edge = self._updates[1] != total or step >= total
        self._updates, self._metrics, self._phase = (step, total), dict(metrics), ("", 0, 0)
        self._write_line("update", force=is_edge)
        if self.console.is_interactive:
            self._show_live()

    def message(self, text: str) -> None:
        """Shows a permanent message."""
        self._print(self._text(visible(text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…")))

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows the first few answers with their prompts and scores."""
        table = Table(box=self._box, show_lines=True, expand=True)
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("answer", ratio=5, overflow="fold")
        table.add_column("score", justify="right", no_wrap=True)
        for row in rows[:SHOWN_ROWS]:
            prompt, answer = prompt_text(row.get("prompt")), str(row.get("response", ""))
            cells = (one_line(prompt, PROMPT), one_line(answer, ANSWER) or "(empty)", _cell(row.get("score")))
            table.add_row(*map(self._text, cells))
        self._print(table)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a permanent table; columns of numbers are right-aligned."""
        table = Table(title=self._text(one_line(title, CELL)), title_justify="left", box=self._box)
        cells = [[self._text(_cell(value)) for value in row] for row in (columns, *rows)]
        widths = _column_widths(list(zip(*cells, strict=True)), self.console.width - 3 * len(columns) - 1)
        for i, (heading, width) in enumerate(zip(cells[0], widths, strict=True)):
            is_numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
            table.add_column(heading, justify="right" if is_numeric else "left", overflow="fold", width=width)
        for row in cells[1:]:
            table.add_row(*row)
        self._print(table)

    def close(self) -> None:
        """Removes the live line and resets the progress; messages, or another run, may follow."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._forget()

    # Appearance

    def _live_line(self) -> Table:
        """A bar and the progress, never wider than the terminal."""
        done, total = self._updates if self._updates[1] else self._phase[1:]
        width = min(24, max(6, self.console.width // 5))
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(ProgressBar(total=max(1, total), completed=done, width=width), self._text(self._progress()))
        return grid

    def _progress(self) -> str:
        """Phase, updates done, time left, reward and KL, as far as known."""
        (step, steps), (name, done, total) = self._updates, self._phase
        parts = [f"update {step}/{steps}"] if steps else []
        if name:
            parts.append(one_line(name, 40) + (f" {done}/{total}" if total > 1 else ""))
        if (left := self._time_left()) is not None:
            parts.append(left)
        for label, metric in SHOWN_METRICS:
            if (value := self._metrics.get(metric)) is not None:
                parts.append(f"{label} {number(value)}")
        return " · ".join(parts)

    def _time_left(self) -> str | None:
        """Time to the last update; before the first is done, time to the end of the phase."""
        now, (step, steps), (_, done, total) = self._clock(), self._updates, self._phase
        if step < steps and (left := self._pace.left(steps - step, now)) is not None:
            return f"{duration(left)} left"
        spent = now - self._entered
        if not steps and 0 < done < total and spent >= SETTLING:
            return f"{duration(spent / done * (total - done))} left in this phase"
        return None

    def _show_live(self) -> None:
        """Starts the live line; it then redraws itself."""
        if self._live is None:
            # it leaves nothing behind: permanent lines are printed above it
            self._live = Live(
                get_renderable=self._live_line, console=self.console, refresh_per_second=8, transient=True
            )
            self._live.start()

    def _write_line(self, kind: str, *, force: bool = False) -> None:
        """Writes the progress as a permanent line, unless one of its kind was written a moment ago."""
        now = self._clock()
        if force or now - self._written.get(kind, float("-inf")) >= self._interval:
            self._written[kind] = now
            self._print(self._text(self._progress()))

    def _print(self, content: Text | Table) -> None:
        # soft wrap: a path longer than a line can still be copied, and a log has no width
        self.console.print(content, markup=False, highlight=False, emoji=False, soft_wrap=isinstance(content, Text))

    def _text(self, text: str) -> Text:
        """Text without markup, limited to characters of the terminal's encoding."""
        if not self._is_unicode:
            encoding = self.console.encoding
            text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
        return Text(text)

    @property
    def _is_unicode(self) -> bool:
        return self.console.encoding.lower().startswith("utf")

    @property
    def _box(self) -> box.Box:
        return box.ROUNDED if self._is_unicode else box.ASCII

    def _forget(self) -> None:
        self._phase: tuple[str, int, int] = ("", 0, 0)
        self._updates: tuple[int, int] = (0, 0)
        self._metrics: Mapping[str, float] = {}
        self._entered = 0.0
        self._pace = Pace()


def _cell(value: Any) -> str:
    """A readable number, or text on one line."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return one_line("" if value is None else str(value), CELL)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _column_widths(columns: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Widths that together fit into ``room``: the widest columns wrap first, and no word is broken while that helps."""
    widths = [max(cell.cell_len for cell in column) for column in columns]
    words = [max(cell_len(word) for cell in column for word in cell.plain.split() or [""]) for column in columns]
    for least in (words, [1] * len(columns)):
        while sum(widths) > room and (wide := [i for i, width in enumerate(widths) if width > least[i]]):
            widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths
