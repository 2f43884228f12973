"""Plants one defect at a time in a copy of the source and runs the tests that should notice it.

    python -m tests.mutants.run [--only WORDS] [--jobs 2] [--list] [--record]

A defect is killed if a test fails, and has survived if all pass: then a test is missing. Anything else, such as a copy
that cannot be imported, says nothing about the tests and is an error. The tests run on the copy without any defect
first, since a test that fails anyway kills nothing.

killers.json names the test that killed a defect when it was last recorded. That one runs alone first, which is nearly
always enough; where it passes, all of the defect's tests run.

What the tests import besides Tether is imported once; then each defect gets a process of its own by fork.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.defects import DEFECTS, ROOT, SOURCE, Defect

KILLERS = Path(__file__).with_name("killers.json")
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
    untyped = "addopts="  # types and shapes are not checked: it takes most of the time, and no defect is left to it
    options = ["-x", "-q", "-o", untyped, "-p", "no:cacheprovider", "-W", imported_before]
    status = pytest.main([*options, f"--basetemp={folder / 'tmp'}", *tests], plugins=[witness])
    origin = sys.modules["tether"].__file__ if "tether" in sys.modules else None
    sender.send((int(status), witness.failed, origin))


def planted(defect: Defect, clean: Path, folder: Path) -> None:
    """Copies the clean source to ``folder`` and makes the defect's one edit."""
    shutil.copytree(clean / "tether", folder / "tether")
    path = folder / "tether" / defect.file
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(defect.planted(path.read_text(encoding="utf-8")), encoding="utf-8")


def outcomes(plan: Mapping[Defect, Sequence[str]], clean: Path, jobs: int) -> Iterator[tuple[Defect, Outcome, str]]:
    """Each defect with what its tests came to and what pytest wrote, in the order in which they end."""
    waiting, running = list(reversed(plan)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            defect = waiting.pop()
            folder = Path(tempfile.mkdtemp(dir=clean.parent)) / "copy"
            planted(defect, clean, folder)
            run = TestRun(folder, plan[defect], TIME_LIMIT)
            running[run.pipe] = defect, run
        ended = {pipe: running[pipe][1].outcome() for pipe in wait(list(running), timeout=1)}
        late = {pipe: run for pipe, (_, run) in running.items() if pipe not in ended and run.seconds > 10 * TIME_LIMIT}
        ended |= {pipe: run.out_of_time() for pipe, run in late.items()}
        for pipe, outcome in ended.items():
            defect, run = running.pop(pipe)
            yield defect, outcome, run.output()
            shutil.rmtree(run.folder.parent)


def is_passed(plan: Mapping[Defect, Sequence[str]], clean: Path, console: Console) -> bool:
    """Whether the tests of all defects pass on the source without any; says so."""
    tests = sorted({test for own in plan.values() for test in own})
    # A node of a file that is there as a whole would run twice.
    run = TestRun(clean, [test for test in tests if test.partition("::")[0] not in tests or "::" not in test])
    outcome = run.outcome()
    shutil.rmtree(clean / "tmp", ignore_errors=True)
    if outcome.verdict != "survived":
        console.print(f"The tests fail on the source as it is: {outcome.why}\n{escape(run.output())}")
        return False
    console.print(f"The tests pass on the source as it is, in {outcome.seconds:.0f} s")
    return True


def killed(defects: Sequence[Defect], killers: Mapping[str, str], jobs: int, console: Console) -> dict[Defect, str]:
    """The defects that were killed, each with the test that did it; says so line by line.

    Args:
        killers: by a defect's name, the test that is tried first.
    """
    found: dict[Defect, str] = {}
    left: dict[Defect, Outcome] = {}
    recorded = {defect: (killers[defect.name],) for defect in defects if defect.name in killers}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        clean = Path(name) / "clean"
        shutil.copytree(SOURCE, clean / "tether", ignore=shutil.ignore_patterns("__pycache__"))
        for is_last, plan in ((False, recorded), (True, {defect: defect.tests for defect in defects})):
            plan = {defect: tests for defect, tests in plan.items() if defect not in found}
            if plan and not is_passed(plan, clean, console):
                return {}
            for defect, outcome, output in outcomes(plan, clean, jobs):
                if outcome.verdict == "killed":
                    found[defect] = outcome.why
                elif is_last:
                    left[defect] = outcome
                else:
                    console.print(f"        not killed by the test that did it before: {escape(defect.name)}")
                    continue
                colour = {"killed": "green", "survived": "red", "broken": "magenta"}[outcome.verdict]
                console.print(
                    f"{len(found) + len(left):3}/{len(defects)} [{colour}]{outcome.verdict:8}[/] "
                    f"{outcome.seconds:5.1f} s  {escape(defect.name)} [dim]({escape(outcome.why)})[/]"
                )
                if outcome.verdict == "broken":
                    console.print(escape("\n".join(output.splitlines()[-20:])))
    if left:
        table = Table("defect", "file", "verdict", "why", title="Not killed")
        for defect, outcome in left.items():
            table.add_row(*map(escape, (defect.name, defect.file, outcome.verdict, outcome.why)))
        console.print(table)
    return found


def record(found: Mapping[Defect, str], killers: Mapping[str, str]) -> None:
    """Writes down which test killed which defect, in the order of the list."""
    known = {**killers, **{defect.name: test for defect, test in found.items() if "::" in test}}
    kept = {defect.name: known[defect.name] for defect in DEFECTS if defect.name in known}
    KILLERS.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="WORDS", default="", help="defects whose file and name hold these words")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (2)")
    parser.add_argument("--list", action="store_true", help="name the defects and stop")
    parser.add_argument("--record", action="store_true", help=f"write down in {KILLERS.name} which test killed which")
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
    killers = json.loads(KILLERS.read_text(encoding="utf-8"))
    start = time.monotonic()
    # Before anything is imported that reads them; one thread each, since the processes share the cores.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.chdir(ROOT)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each process would look through all that was imported, again and again
    found = killed(defects, killers, options.jobs, console)
    if options.record:
        record(found, killers)
    seconds = time.monotonic() - start
    share = "All" if len(found) == len(defects) else "Not all"
    console.print(f"{share} of {len(defects)} defects killed, in {seconds // 60:.0f} min {seconds % 60:.0f} s")
    return 0 if len(found) == len(defects) else 1


if __name__ == "__main__":
    sys.exit(main())
