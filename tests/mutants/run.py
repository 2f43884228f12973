"""Plants one defect at a time in a copy of the source and runs the tests that should notice it.

    python -m tests.mutants.run [--only WORDS] [--jobs 2] [--list]

A defect is killed if a test fails, and has survived if all pass: then a test is missing. Anything else, such as a copy
that cannot be imported, says nothing about the tests and is an error. The tests run on the copy without any defect
first, since a test that fails anyway kills nothing.

What the tests import besides Tether is imported once; then each defect gets a process of its own by fork.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.defects import DEFECTS, ROOT, SOURCE, Defect

TIME_LIMIT = 120
"""Seconds of processor time after which a defect counts as killed, as it made the tests run on, or ten times as many of
real time."""
PRELOADED = (
    "accelerate", "beartype.vale", "jaxtyping", "peft", "pydantic.main", "torch",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.trainer_callback",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a test run came to."""

    verdict: str
    """``killed``, ``survived`` or ``broken``."""
    why: str
    """The test that failed first, or what else explains the verdict."""
    seconds: float


class Witness:
    """A pytest plugin that remembers which test failed first; an error of collection is no failed test."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class TestRun:
    """A pytest process on one copy of the source, the folder ``tether`` in ``folder``."""

    __test__ = False

    def __init__(self, folder: Path, tests: Sequence[str], time_limit: int | None = None) -> None:
        self.folder, self.start = folder, time.monotonic()
        self.pipe, sender = multiprocessing.Pipe(duplex=False)
        arguments = folder, tests, time_limit, sender
        process = multiprocessing.get_context("fork").Process(target=_child, args=arguments, daemon=True)
        process.start()
        sender.close()
        self._process = process

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def outcome(self) -> Outcome:
        """What the run came to, once its pipe has something to say."""
        try:
            status, failed, origin = self.pipe.recv()
        except EOFError:
            self._process.join()
            if self._process.exitcode == -signal.SIGXCPU:
                return self._ended("killed", "by the time limit")
            verdict, why = "broken", f"the process died with status {self._process.exitcode}"
        else:
            if origin is None or not Path(origin).is_relative_to(self.folder):
                verdict, why = "broken", f"tether was imported from {origin}, not from the copy"
            elif status == pytest.ExitCode.OK:
                verdict, why = "survived", "all tests passed"
            elif status == pytest.ExitCode.TESTS_FAILED and failed is not None:
                verdict, why = "killed", failed
            else:
                verdict, why = "broken", f"no test failed, but pytest ended with status {status}"
        return self._ended(verdict, why)

    def out_of_time(self) -> Outcome:
        """Ends the run and all that it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        return self._ended("killed", "by the time limit")

    def output(self) -> str:
        """What pytest wrote."""
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def _ended(self, verdict: str, why: str) -> Outcome:
        self._process.join()
        self.pipe.close()
        return Outcome(verdict, why, self.seconds)


def _child(folder: Path, tests: Sequence[str], time_limit: int | None, sender: Connection) -> None:
    """Runs pytest on the copy in ``folder``; sends its status, the first failed test, and where Tether came from."""
    os.setsid()
    if time_limit is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (time_limit, time_limit + 10))
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # for tests that start a process of their own
    # The same examples each time, and none of the time that it takes to make a failing one smaller.
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("once", derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("once")
    witness = Witness()
    imported_before = "ignore::pytest.PytestAssertRewriteWarning"  # plugins' packages, whose asserts are not ours
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", imported_before, f"--basetemp={folder / 'tmp'}"]
    status = pytest.main([*options, *tests], plugins=[witness])
    origin = sys.modules["tether"].__file__ if "tether" in sys.modules else None
    sender.send((int(status), witness.failed, origin))


def planted(defect: Defect, clean: Path, folder: Path) -> None:
    """Copies the clean source to ``folder`` and makes the defect's one edit."""
    shutil.copytree(clean, folder)
    path = folder / "tether" / defect.file
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(defect.planted(path.read_text(encoding="utf-8")), encoding="utf-8")


def outcomes(defects: Sequence[Defect], clean: Path, jobs: int) -> Iterator[tuple[Defect, Outcome, str]]:
    """Each defect with its outcome and what pytest wrote, in the order in which they end."""
    waiting, running = list(reversed(defects)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            defect = waiting.pop()
            folder = Path(tempfile.mkdtemp(dir=clean.parent)) / "copy"
            planted(defect, clean, folder)
            run = TestRun(folder, defect.tests, TIME_LIMIT)
            running[run.pipe] = defect, run
        ended = {pipe: running[pipe][1].outcome() for pipe in wait(list(running), timeout=1)}
        late = {pipe: run for pipe, (_, run) in running.items() if pipe not in ended and run.seconds > 10 * TIME_LIMIT}
        ended |= {pipe: run.out_of_time() for pipe, run in late.items()}
        for pipe, outcome in ended.items():
            defect, run = running.pop(pipe)
            yield defect, outcome, run.output()
            shutil.rmtree(run.folder.parent)


def check(defects: Sequence[Defect], jobs: int, console: Console) -> bool:
    """Whether every defect is killed; says so line by line."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        clean = Path(name) / "clean"
        shutil.copytree(SOURCE, clean / "tether", ignore=shutil.ignore_patterns("__pycache__"))
        tests = sorted({test for defect in defects for test in defect.tests})
        # A node of a file that is there as a whole would run twice.
        first = TestRun(clean, [test for test in tests if test.partition("::")[0] not in tests or "::" not in test])
        outcome = first.outcome()
        if outcome.verdict != "survived":
            console.print(f"The tests fail on the source as it is: {outcome.why}\n{escape(first.output())}")
            return False
        console.print(f"The tests pass on the source as it is, in {outcome.seconds:.0f} s")
        shutil.rmtree(clean / "tmp", ignore_errors=True)
        left: list[tuple[Defect, Outcome]] = []
        for number, (defect, outcome, output) in enumerate(outcomes(defects, clean, jobs), start=1):
            colour = {"killed": "green", "survived": "red", "broken": "magenta"}[outcome.verdict]
            console.print(
                f"{number:3}/{len(defects)} [{colour}]{outcome.verdict:8}[/] {outcome.seconds:5.1f} s  "
                f"{escape(defect.name)} [dim]({escape(outcome.why)})[/]"
            )
            if outcome.verdict != "killed":
                left.append((defect, outcome))
            if outcome.verdict == "broken":
                console.print(escape("\n".join(output.splitlines()[-20:])))
    if left:
        table = Table("defect", "file", "verdict", "why", title="Not killed")
        for defect, outcome in left:
            table.add_row(*map(escape, (defect.name, defect.file, outcome.verdict, outcome.why)))
        console.print(table)
    return not left


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="WORDS", default="", help="defects whose file and name hold these words")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (2)")
    parser.add_argument("--list", action="store_true", help="name the defects and stop")
    options = parser.parse_args(arguments)
    defects = [defect for defect in DEFECTS if options.only in f"{defect.file}: {defect.name}"]
    console = Console(soft_wrap=True, highlight=False)
    if options.list:
        for defect in defects:
            console.print(escape(f"{defect.file}: {defect.name}"))
        return 0
    if not defects:
        parser.error(f"no defect is called {options.only!r}; --list names them")
    for defect in defects:
        defect.planted((SOURCE / defect.file).read_text(encoding="utf-8"))  # an entry that went stale says so now
    start = time.monotonic()
    # Before anything is imported that reads them; one thread each, since the processes share the cores.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.chdir(ROOT)
    for module in PRELOADED:
        importlib.import_module(module)
    is_clean = check(defects, options.jobs, console)
    seconds = time.monotonic() - start
    share = "All" if is_clean else "Not all"
    console.print(f"{share} of {len(defects)} defects killed, in {seconds // 60:.0f} min {seconds % 60:.0f} s")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
