"""Python functions as judges: what they are given, what they may answer, how their mistakes are told."""

import asyncio
import importlib
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.rewards.batches import text_batch
from tether.errors import ConfigError, RewardError, RewardResponseError
from tether.rewards.function import FunctionSource, check_columns, load_function
from tether.rewards.loop import event_loop

MESSAGES = [{"role": "system", "content": "be nice"}, {"role": "user", "content": "hi"}]


def scores(function, batch):
    return FunctionSource(function, "brevity").score(batch).scores


def test_text_prompts_come_as_text_and_chat_prompts_as_messages():
    seen = SimpleNamespace()

    def judge(prompts, completions):
        seen.prompts, seen.completions = prompts, completions
        return [0.0] * len(prompts)

    scores(judge, text_batch("yes", "no", prompts=["why?", MESSAGES]))
    assert seen.prompts == ["why?", MESSAGES]
    assert seen.completions == ["yes", [{"role": "assistant", "content": "no"}]]


def test_only_columns_that_the_signature_names_are_passed():
    def judge(prompts, completions, *, answer, unused=None):
        assert unused is None
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert scores(judge, text_batch("4", "5", answer=["4", "6"], source=["x", "y"])) == [1.0, 0.0]


def test_keyword_arguments_take_every_column():
    def judge(completions, **kwargs):
        assert sorted(kwargs) == ["answer", "prompts", "source"]
        return [0.0] * len(completions)

    assert scores(judge, text_batch("4", answer=["4"], source=["x"])) == [0.0]


def test_a_column_never_replaces_prompts_or_completions():
    assert scores(lambda prompts, completions: [len(completions[0])], text_batch("four", completions=["x"])) == [4.0]


def test_a_required_column_that_is_missing_is_named_with_those_there_are():
    def judge(prompts, completions, answer):
        return [0.0]

    with pytest.raises(RewardError, match=r"brevity needs answer, .* columns are source; "):
        scores(judge, text_batch("4", source=["x"]))
    with pytest.raises(ConfigError, match=r"rewards\.1: function brevity needs answer, .* columns are source, id; "):
        check_columns(judge, ["source", "id"], "brevity", "rewards.1")
    check_columns(judge, ["answer"], "brevity", "rewards.1")


def test_no_opinion_is_an_error_unless_it_has_a_score():
    def judge(prompts, completions):
        return [None if completion == "?" else 1.0 for completion in completions]

    batch = text_batch("yes", "?", "no", "?")
    with pytest.raises(RewardResponseError, match=r"returned None for answer 1 of 4 .* set the reward's `missing`"):
        scores(judge, batch)
    output = FunctionSource(judge, "brevity", missing=-0.5).score(batch)
    assert (output.scores, output.components) == ([1.0, -0.5, 1.0, -0.5], {"missing": [0.0, 1.0, 0.0, 1.0]})
    with pytest.raises(RewardResponseError, match=r"returned nan .* for answer 0 of 1"):
        FunctionSource(lambda prompts, completions: [float("nan")], "brevity", missing=0.0).score(text_batch("a"))
    with pytest.raises(RewardResponseError, match="returned 1 score for 2 answers"):
        FunctionSource(lambda prompts, completions: [None], "brevity", missing=0.0).score(text_batch("a", "b"))


@pytest.mark.parametrize("answer", [[1.0, None], [1.0, float("nan")]], ids=repr)
def test_a_missing_score_is_an_error_that_names_function_and_row(answer):
    with pytest.raises(RewardResponseError, match=r"reward function brevity returned .* for answer 1 of 2"):
        scores(lambda prompts, completions: answer, text_batch("a", "b"))


@pytest.mark.parametrize("missing", [None, -1.0])
def test_scores_may_come_from_an_iterator(missing):
    source = FunctionSource(lambda completions, **_: map(len, completions), "brevity", missing=missing)
    assert source.score(text_batch("yes", "no")).scores == [3.0, 2.0]


def test_a_file_does_not_inherit_how_tether_reads_annotations(tmp_path):
    text = "def f(prompts: list, completions: list) -> list:\n    return [0.0 for _ in completions]\n"
    (tmp_path / "r.py").write_text(text)
    assert load_function(str(tmp_path / "r.py"), "f", "rewards.0").__annotations__["completions"] is list


def test_an_exception_names_the_answer_that_causes_it():
    def judge(prompts, completions):
        return [1 / len(completion) for completion in completions]

    with pytest.raises(RewardError, match=r"brevity raised ZeroDivisionError.*answer 2 of 3.*: 'prompt 2'") as caught:
        scores(judge, text_batch("a", "b", ""))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\n  two\x1b[31m"), r"raised ValueError: one two\\x1b\[31m \(answer 0"),
        (ValueError("x" * 5000), r"raised ValueError: x{999}… \(answer 0"),
        (AssertionError(), r"raised AssertionError \(answer 0"),
    ],
    ids=["lines and escapes", "long", "none"],
)
def test_what_an_exception_says_is_shown_on_one_line(error, told):
    def judge(prompts, completions):
        raise error

    with pytest.raises(RewardError, match=told):
        scores(judge, text_batch("a"))


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_in_an_iterator_of_scores_names_the_answer_too(is_async):
    def judge(prompts, completions):
        return (1 / len(completion) for completion in completions)

    async def judge_later(prompts, completions):
        return judge(prompts, completions)

    with pytest.raises(RewardError, match=r"brevity raised ZeroDivisionError.*answer 1 of 2, .*: 'prompt 1'"):
        scores(judge_later if is_async else judge, text_batch("a", ""))


def test_an_exception_that_no_answer_causes_alone_names_them_all():
    def judge(prompts, completions):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(RewardError, match=r"brevity raised RuntimeError: too many \(answers 0 to 2 .*'user: hi.*why"):
        scores(judge, text_batch("a", "b", "c", prompts=[[MESSAGES[1], {"role": "user", "content": "why"}], "q", "r"]))


def test_async_functions_find_the_accelerator_of_their_process(monkeypatch):
    """The current device belongs to a thread, and would be the first one in a new thread."""
    chosen = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: chosen.append((index, threading.current_thread().name))
    )
    others = set(threading.enumerate())
    loop = event_loop.__wrapped__()
    (thread,) = set(threading.enumerate()) - others
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60)
        assert chosen == [(3, thread.name)]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_async_functions_share_one_event_loop():
    loops = []

    async def judge(prompts, completions):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [float(len(completion)) for completion in completions]

    source = FunctionSource(judge, "brevity")
    assert source.score(text_batch("a", "bb")).scores == [1.0, 2.0]
    assert source.score(text_batch("ccc")).scores == [3.0]
    assert loops[0] is loops[1]


def test_async_functions_run_inside_a_running_loop():
    async def judge(prompts, completions):
        await asyncio.sleep(0)
        return [1.0]

    async def notebook():
        return scores(judge, text_batch("a"))

    assert asyncio.run(notebook()) == [1.0]


def test_an_exception_in_an_async_function_is_told_like_any_other():
    async def judge(prompts, completions):
        raise KeyError("gone")

    with pytest.raises(RewardError, match="brevity raised KeyError: 'gone'"):
        scores(judge, text_batch("a"))


def test_two_files_of_one_name_do_not_meet(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "judge.py").write_text(f"def f(prompts, completions): return [{number}]")
    before = set(sys.modules)
    one, two = (load_function(str(tmp_path / n / "judge.py"), "f", "rewards.0") for n in ("1", "2"))
    assert (one([], []), two([], [])) == ([1], [2])
    assert "judge" not in set(sys.modules) - before


def test_a_file_runs_once_until_it_changes(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("calls = []\ndef f(prompts, completions): calls.append(1); return [len(calls)]")
    first = load_function(str(file), "f", "rewards.0")
    assert load_function(str(file), "f", "rewards.0") is first
    file.write_text("calls = []\ndef f(prompts, completions): calls.append(2); return [len(calls)]")
    assert load_function(str(file), "f", "rewards.0") is not first


def test_dataclasses_with_text_annotations_work_in_a_file(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "from __future__ import annotations\nimport pickle\nfrom dataclasses import dataclass, KW_ONLY\n"
        "@dataclass\nclass Score:\n    _: KW_ONLY\n    value: float = 1.5\n"
        "def f(prompts, completions): return [pickle.loads(pickle.dumps(Score(value=2.5))).value]"
    )
    assert load_function(str(file), "f", "rewards.0")([], []) == [2.5]


def test_functions_come_from_import_paths_too():
    assert load_function("tests.rewards.judges", "length", "rewards.0")(["p"], ["four"]) == [4.0]


@pytest.fixture
def as_command(monkeypatch, tmp_path):
    """Modules are looked for as under the command ``tether``: not in the current folder."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_imports_its_neighbours_at_once_and_when_it_is_called(tmp_path, as_command):
    (tmp_path / "first_neighbour.py").write_text("factor = 2.0\n")
    (tmp_path / "later_neighbour.py").write_text("offset = 0.5\n")
    (tmp_path / "json.py").write_text("raise ImportError('no neighbour hides what others import')\n")
    file = tmp_path / "judge.py"
    file.write_text(
        "from first_neighbour import factor\n"
        "def f(prompts, completions):\n"
        "    from later_neighbour import offset\n"
        "    return [factor * len(text) + offset for text in completions]\n"
    )
    function = load_function(str(file), "f", "rewards.0")
    del sys.modules["json"]
    importlib.import_module("json")
    assert scores(function, text_batch("four")) == [8.5]
    assert sys.path.count(str(tmp_path)) == 1


def test_an_import_path_starts_from_the_current_folder(tmp_path, as_command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_judges").mkdir()
    (tmp_path / "package_of_judges" / "short.py").write_text("def f(prompts, completions): return [1.5]\n")
    assert load_function("package_of_judges.short", "f", "rewards.0")([], []) == [1.5]


def test_what_cannot_be_loaded_is_told_with_key_got_and_wanted(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "import math\nlimit = 3\ndef short(prompts, completions): ...\ndef blind(prompts): ...\n"
        "def by_place(prompts, completions, /): ...\n"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_at_all")
    path = str(file)
    for arguments, message in {
        (str(tmp_path / "none.py"), "f"): r"rewards\.1\.path: there is no file .*none\.py",
        (str(broken), "f"): r"rewards\.1\.path: .*broken\.py cannot be run: ModuleNotFoundError: .*no_such_module",
        ("no.such.module", "f"): r"rewards\.1\.path: cannot import no\.such\.module: .*wanted a \.py file",
        (path, "shrot"): r"rewards\.1\.name: .*judge\.py has no shrot; it has blind, by_place, short",
        (path, "limit"): r"rewards\.1\.name: limit in .* is a int, wanted a function",
        (path, "blind"): r"rewards\.1\.name: blind\(prompts\) in .* does not take completions; wanted f\(prompts",
        (path, "by_place"): r"does not take prompts and completions",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_function(*arguments, "rewards.1")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path):
    file = tmp_path / "broken_judge.py"
    file.write_text("raise ValueError('on purpose')")
    with pytest.raises(ConfigError, match="ValueError: on purpose"):
        load_function(str(file), "f", "rewards.0")
    assert not [name for name in sys.modules if "broken_judge" in name]


def test_a_function_that_ends_the_process_is_an_error(tmp_path):
    def gives_up(prompts, completions):
        sys.exit(0)

    with pytest.raises(RewardError, match="reward function judge raised SystemExit: 0"):
        FunctionSource(gives_up, "judge").score(text_batch("one", "two"))
    file = tmp_path / "exits.py"
    file.write_text("import sys\nsys.exit(0)")
    with pytest.raises(ConfigError, match="cannot be run: SystemExit: 0"):
        load_function(str(file), "f", "rewards.0")


def test_an_async_function_that_ends_the_process_is_an_error_and_others_are_still_waited_for():
    async def gives_up(prompts, completions):
        await asyncio.sleep(0)
        sys.exit(3)

    async def fine(prompts, completions):
        return [1.0]

    with pytest.raises(RewardError, match="reward function judge raised RuntimeError: SystemExit: 3"):
        FunctionSource(gives_up, "judge").score(text_batch("one"))
    assert scores(fine, text_batch("one")) == [1.0]


def test_what_a_function_changes_is_its_own():
    def joins(prompts, completions, tests, completion_ids):
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt += completion
            prompt[0]["content"] = "changed"
        for each in tests:
            each.pop()
        completion_ids[0].append(7)
        return [0.0] * len(prompts)

    messages, tests = [dict(message) for message in MESSAGES], ["one", "other"]
    batch = text_batch("yes", "no", prompts=[messages, messages], tests=[tests, tests])
    batch = replace(batch, decode=str)  # somebody's ids
    ids = [list(each) for each in batch.response_ids]
    scores(joins, batch)
    assert messages == MESSAGES and tests == ["one", "other"] and batch.response_ids == ids
