"""The demo for several seeds, against its promises: python benchmarks/demo.py [--seeds 1 2 3] [-o FOLDER]

Each seed trains its own reward model and its own policy. Prints a table with one row per seed and exits with 1 if any
of them breaks a promise.

    reward    held-out reward rises by at least 0.8 standard deviations of the start policy's own scores
    VADER     sentiment, which was not used in training, rises by at least 0.25
    ended     the share of answers that end by themselves falls by at most two standard errors
    KL        at most 8 nats per answer
    answers   at least 128 held-out answers were judged
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tether.cli.display import RunDisplay
from tether.demo.run import DemoResult, run_demo


def promises(result: DemoResult) -> dict[str, tuple[str, bool]]:
    """Each promise: what was measured, and whether it was kept."""
    held_out = result.outcome
    ended = held_out.ended
    return {
        "reward": (f"{held_out.reward_rise_in_std:+.2f} sd", held_out.reward_rise_in_std >= 0.8),
        "VADER": (
            f"{held_out.sentiment.means[0]:.2f} → {held_out.sentiment.means[1]:.2f}",
            held_out.sentiment.rise >= 0.25,
        ),
        "ended": (f"{ended.means[0]:.2f} → {ended.means[1]:.2f}", ended.rise >= -2 * ended.rise_error),
        "KL": (f"{held_out.kl.means[1]:.1f} nats", held_out.kl.means[1] <= 8.0),
        "answers": (str(len(held_out.answers)), len(held_out.answers) >= 128),
    }


def main() -> int:
    """Runs the demo once per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-demo"))
    given = parser.parse_args()

    names = ["reward", "VADER", "ended", "KL", "answers"]
    table = Table("seed", *names, "minutes", title="the demo, held-out prompts")
    kept = True
    for seed in given.seeds:
        with RunDisplay() as display:
            result = run_demo(given.output / f"seed-{seed}", seed=seed, display=display)
        if result is None:
            return 130
        measured = promises(result)
        kept = kept and all(ok for _, ok in measured.values())
        cells = [text if ok else f"[red]{text} ✗[/red]" for text, ok in (measured[name] for name in names)]
        table.add_row(str(seed), *cells, f"{sum(result.seconds.values()) / 60:.1f}")
    Console().print(table)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
