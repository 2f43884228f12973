import io
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from rich.console import Console

from tether.cli.display import Pace, RunDisplay
from tether.models.roles import ModelRoles, RoleRow
from tether.train.build import tell_roles
from tether.train.display import Display, NullDisplay

HOSTILE = "[bold red]m[/] \x1b[31mred\x1b[2J \x9b0m \x07 \u202egpj\u202c \ud83d :smile:"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log(width: int = 100, encoding: str = "utf-8"):
    """A display that writes to a log, its clock, and what it has written so far."""
    clock, stream = Clock(), io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    display = RunDisplay(Console(file=stream, width=width, _environ={}), interval=5.0, clock=clock)

    def written() -> str:
        stream.flush()
        return stream.buffer.getvalue().decode(encoding)

    return display, clock, written


def terminal(width: int = 100):
    """The same on a terminal."""
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, width=width, height=30, force_terminal=True, _environ={"TERM": "xterm-256color"})
    return RunDisplay(console, interval=5.0, clock=clock), clock, stream.getvalue


def run_updates(display: Display, clock: Clock, *, first: int, last: int, total: int, seconds: float) -> None:
    for step in range(first, last + 1):
        display.phase("rollout", 0, 64)
        clock.now += seconds
        display.update(step, total, {"objective/scores": 0.1 * step, "objective/kl": 0.5 * step, "lr": 1.0})


def test_a_log_line_has_phase_updates_time_left_reward_and_kl():
    display, clock, written = log()
    run_updates(display, clock, first=1, last=2, total=10, seconds=12.0)
    display.phase("rollout", 24, 64)
    assert written().splitlines() == [
        "rollout 0/64",
        "update 1/10 · 1 min 48 s left · reward 0.1 · KL 0.5",
        "update 1/10 · rollout 0/64 · 1 min 48 s left · reward 0.1 · KL 0.5",
        "update 2/10 · 1 min 36 s left · reward 0.2 · KL 1",
        "update 2/10 · rollout 24/64 · 1 min 36 s left · reward 0.2 · KL 1",
    ]


def test_fast_updates_write_a_line_every_few_seconds_and_the_first_and_last_always():
    display, clock, written = log()
    run_updates(display, clock, first=1, last=100, total=100, seconds=0.1)
    lines = [line for line in written().splitlines() if line.startswith("update") and "rollout" not in line]
    assert lines[0].startswith("update 1/100") and lines[-1] == "update 100/100 · reward 10 · KL 50"
    assert len(lines) == 3
    assert len(written().splitlines()) <= 6


def test_without_a_kl_none_is_shown():
    display, _, written = log()
    display.update(1, 2, {"objective/scores": 1.0})
    assert written() == "update 1/2 · reward 1\n"


def test_before_the_first_update_the_time_to_the_end_of_the_phase_is_shown():
    display, clock, written = log()
    display.phase("reward model", 0, 40)
    clock.now += 30.0
    display.phase("reward model", 10, 40)
    assert written().splitlines()[-1] == "reward model 10/40 · 1 min 30 s left in this phase"


def test_pace_is_the_median_of_recent_updates_without_what_lies_between_them():
    pace = Pace()
    assert pace.left(10, 0.0) is None
    now = 0.0
    for step, seconds in enumerate([10, 10, 500, 10, 10], start=1):
        now += 1000.0  # an evaluation
        pace.begin(now)
        pace.begin(now + 1)
        now += seconds
        pace.finish(step, now)
    assert pace.left(5, now + 7.0) == 50.0
    pace.begin(now)
    assert pace.left(5, now + 4.0) == 46.0
    assert pace.left(1, now + 4000.0) == 0.0


def test_pace_shares_the_time_between_updates_that_were_reported_together():
    pace = Pace()
    pace.begin(0.0)
    pace.finish(10, 20.0)
    pace.begin(20.0)
    pace.finish(20, 60.0)
    assert pace.left(1, 60.0) == (20.0 + 4.0) / 2


def test_pace_after_a_resume_and_without_phases():
    pace = Pace()
    pace.finish(500, 0.0)
    assert pace.left(1, 0.0) is None
    pace.finish(501, 3.0)
    assert pace.left(2, 3.0) == 6.0


def test_a_live_line_moves_on_a_terminal_and_goes_away():
    display, clock, written = terminal()
    run_updates(display, clock, first=1, last=3, total=10, seconds=12.0)
    display.phase("optimizer step", 2, 4)
    display.close()
    assert re.search(r"update 3/10 · optimizer step 2/4 · 1 min 24 s left · reward 0.3 · KL 1.5", written())
    display.close()
    assert written().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")
    display.message("saved")
    assert written().endswith("saved\n")


def test_a_terminal_keeps_a_line_for_updates_but_not_for_phases():
    display, clock, written = terminal()
    run_updates(display, clock, first=1, last=3, total=3, seconds=12.0)
    display.close()
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written()).splitlines()
    assert [line[:10] for line in lines if line.startswith(("update", "rollout"))] == [
        f"update {i}/3" for i in (1, 2, 3)
    ]


def test_the_live_line_is_never_wider_than_the_terminal():
    display, clock, written = terminal(width=40)
    display.phase("a phase with a name that is far longer than any terminal is wide " * 3, 1, 1000)
    clock.now += 5.0
    display.update(1, 1000, {"objective/scores": 1.0, "objective/kl": 1.0})
    display.phase("another", 1, 1000)
    display.close()
    drawn = re.findall("━+ [^\n\r]*", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written()))
    assert any("update 1/1000" in line for line in drawn)
    assert all(len(line) <= 40 for line in drawn)


def test_a_dumb_terminal_is_a_log():
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "dumb"})
    display = RunDisplay(console, clock=Clock())
    display.phase("rollout", 1, 2)
    display.close()
    assert stream.getvalue() == "rollout 1/2\n"


@pytest.mark.parametrize("make", [log, terminal])
def test_hostile_text_is_shown_and_does_nothing(make):
    display, _, written = make(width=200)
    display.phase(HOSTILE[:30], 1, 2)
    display.message(HOSTILE)
    display.samples([{"prompt": [{"role": "user", "content": HOSTILE}], "response": HOSTILE, "score": 1.0}])
    display.table(HOSTILE, [HOSTILE], [[HOSTILE]])
    display.close()
    text = written()
    shown = r"[bold red]m[/] \x1b[31mred\x1b[2J \x9b0m \x07 \u202egpj\u202c \ud83d :smile:"
    assert text.count(shown) == 5
    assert not re.search("[\x07\x9b\u202e\u202c\ud83d]|\x1b\\[31m|\x1b\\[2J", text)
    if make is log:
        assert "\x1b" not in text


def test_a_log_that_knows_ascii_only():
    display, clock, written = log(encoding="ascii")
    run_updates(display, clock, first=1, last=1, total=2, seconds=3.0)
    display.message("− naïve 日本 …")
    display.samples([{"prompt": "é", "response": "日本" * 300, "score": -0.5}])
    display.table("täble", ["ä"], [[-1.5]])
    text = written()
    assert text.isascii()
    assert "update 1/2 | 3 s left | reward 0.1 | KL 0.5" in text
    assert r"- na\xefve \u65e5\u672c ..." in text and "-0.5" in text and "-1.5" in text


def test_samples_show_a_few_short_rows():
    display, _, written = log(width=90)
    rows = [
        {"prompt": f"prompt {i}", "response": f"line one\nline two {'long ' * 500}", "score": 0.5} for i in range(20)
    ]
    display.samples([{"prompt": None, "response": "", "score": None}, *rows])
    text = written()
    assert "prompt 4" in text and "prompt 5" not in text
    assert "(empty)" in text and "line one line two long" in text and "…" in text
    assert max(map(len, text.splitlines())) <= 90
    display.samples([])


def test_a_table_of_numbers_and_texts():
    display, _, written = log()
    display.table("roles", ["role", "parameters", "lr"], [["policy", 134515008, 3e-4], ["critic", 0, None]])
    text = written()
    assert "roles" in text and "134,515,008" in text and "3e−4" in text
    assert re.search(r"│ critic │ +0 │", text)
    display.table("", [], [])


def test_the_roles_of_a_run_break_neither_a_path_nor_a_number_on_80_columns():
    path = "/mnt/models/of-the-whole-group/checkpoints/2026-11/Qwen2.5-7B-Instruct-sft"
    rows = [
        RoleRow("policy", path, 7_655_986_688, 40_370_176, "bfloat16 + float32", "adapter on the base", 0),
        RoleRow("reference", path, 7_615_616_512, 0, "bfloat16", "the base, adapters off", 0),
    ]
    display, _, written = log(width=80)
    tell_roles(Mock(spec=ModelRoles, table=lambda: rows), display)
    lines = written().splitlines()
    assert f"  policy: {path} (adapter on the base)" in lines
    assert "│ policy    │ 7,655,986,688 │ 40,370,176 │ bfloat16 + float32 │" in lines
    assert "│ reference │ 7,615,616,512 │          0 │ bfloat16           │" in lines


def test_long_paths_stay_in_one_piece_and_huge_messages_are_cut():
    display, _, written = log(width=40)
    path = "/long" * 60
    display.message(f"policy: {path}\nreport: {path}")
    assert written().splitlines() == [f"policy: {path}", f"report: {path}"]
    display.message("x" * 10**6)
    assert len(written()) < 10_000


def test_a_second_run_starts_afresh():
    display, clock, written = log()
    with display as same:
        run_updates(same, clock, first=1, last=4, total=4, seconds=60.0)
    clock.now += 10.0
    display.phase("rollout", 0, 8)
    assert written().splitlines()[-1] == "rollout 0/8"


def test_an_error_closes_the_live_line():
    display, _, written = terminal()
    with pytest.raises(KeyError), display:
        display.phase("rollout", 1, 2)
        raise KeyError
    assert written().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_null_display_is_a_display_that_says_nothing(capsys):
    display: Display = NullDisplay()
    display.phase("rollout", 1, 2)
    display.update(1, 2, {"objective/scores": 1.0})
    display.message("text")
    display.samples([{"prompt": "p", "response": "r", "score": 1.0}])
    display.table("t", ["a"], [[1]])
    display.close()
    assert capsys.readouterr() == ("", "")


class Gone(io.StringIO):
    """A stream that takes no more than so many writes."""

    def __init__(self, error, after):
        super().__init__()
        self.error, self.after = error, after

    def write(self, text):
        self.after -= 1
        if self.after < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "pipe"), OSError(5, "terminal"), OSError(28, "disk")])
def test_what_can_be_written_no_more_silences_the_display_and_nothing_else(error, after, is_terminal):
    stream = Gone(error, after)
    console = Console(file=stream, width=80, force_terminal=is_terminal, _environ={"TERM": "xterm-256color"})
    with RunDisplay(console, interval=0.0) as display:
        for step in range(1, 4):
            display.phase("rollout", 0, 64)
            if display._live is not None:
                display._live.refresh()  # as its thread does
            display.update(step, 3, {"objective/scores": 0.1})
        print("what a library prints goes through the live line")
        display.message("done")
        display.samples([{"prompt": "p", "response": "r", "score": 1.0}])
        display.table("t", ["a"], [[1]])
    assert stream.after < 0 and "done" not in stream.getvalue()


def test_a_stream_that_reward_code_closes_does_not_hide_the_message_of_it():
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm-256color"})
    with pytest.raises(KeyError, match="told"), RunDisplay(console, interval=0.0) as display:
        display.phase("rollout", 0, 64)
        stream.close()
        display.message("nobody reads this")
        raise KeyError("told")


def test_a_pipe_that_breaks_does_not_end_the_process():
    script = (
        "import sys\nfrom tether.cli.display import RunDisplay\n"
        "with RunDisplay() as display:\n"
        "    sys.stdin.read()\n"
        "    for _ in range(9):\n"
        "        display.message('x' * 4000)\n"
        "print('more')\nsys.exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1)
    process.stdout.close()
    process.stdin.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait(60)) == (b"", 7)
