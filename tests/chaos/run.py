"""Kills, faults and nonsense, in large numbers.

    python -m tests.chaos.run [--kills 100] [--calls 1000] [--parsed 10000] [--trained 300] [--seed N] [--only PART …]

    kills     runs killed at random points that go on: bitwise the ends of runs that nobody killed
    calls     reward calls with random faults in a run that goes on after each: no update lost, doubled or wrong
    parsed    fuzzed configurations and dataset files: accepted, or refused with a message
    trained   random configurations that were accepted: each trains all its updates

Everything is drawn from the seed, which is said at the start, but for where a run is at a millisecond. Ends with a
table of what was tried; exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tests.chaos.children import Failed
from tests.chaos.configurations import run_parsing, run_trainings
from tests.chaos.kills import run_kills
from tests.chaos.services import run_faults

PARTS = {"parsed": run_parsing, "calls": run_faults, "kills": run_kills, "trained": run_trainings}
COUNTS = {"kills": 100, "calls": 1000, "parsed": 10_000, "trained": 300}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.splitlines()[0])
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    print(f"seed {arguments.seed}", flush=True)
    table: list[tuple[str, ...]] = [("part", "wanted", "seconds", "", "what came of it")]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for name in arguments.only:
            start, count = time.monotonic(), getattr(arguments, name)
            print(f"{name}: {count} wanted", flush=True)
            try:
                came, held = PARTS[name](Path(folder) / name, count, arguments.seed, _tell), True
            except Failed as error:
                came, held = "see above", False
                print(f"{name}: FAILED: {error}", flush=True)
            seconds = f"{time.monotonic() - start:.0f}"
            table.append((name, str(count), seconds, "held" if held else "FAILED", came))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)
    return int(any(row[3] == "FAILED" for row in table))


def _tell(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
