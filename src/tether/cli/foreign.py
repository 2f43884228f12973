"""What is shown about a file in another system's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tether.cli.display import RunDisplay
    from tether.compat.translation import Translation


def announce(translation: Translation | None, display: RunDisplay) -> None:
    """Shows how every key was translated; nothing for a file in our own format."""
    if translation is None:
        return
    display.table(f"{translation.source} is read as", [translation.system, "Tether"], translation.table)
    for note in translation.notes:
        display.message(note)


def plot(translation: Translation | None, folder: Path, display: RunDisplay) -> None:
    """Writes the curves as PNG files if the file requests them."""
    if translation is None or not translation.plots:
        return

    from tether.report.plots import write_plots

    for path in write_plots(folder):
        display.message(f"plot: {path}")
