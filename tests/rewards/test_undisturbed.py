"""What reward code sets for the whole process is set back: training depends on it."""

import asyncio
import gc
import io
import os
import random
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.rewards.batches import text_batch
from tests.train.runs import REWARD, tiny_run
from tests.train.test_run import weights
from tether.errors import ConfigError, RewardError
from tether.rewards.function import FunctionSource, load_function
from tether.rewards.loop import awaited
from tether.rewards.undisturbed import undisturbed
from tether.train.run import train_policy

CHANGES = {
    "torch's grad mode": ("torch.set_grad_enabled(False)", torch.is_grad_enabled),
    "torch's inference mode": (
        "sys.mode = torch.inference_mode(); sys.mode.__enter__()",
        lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
    ),
    "torch's autocast": (
        "torch.autocast('cpu', torch.float16).__enter__()",
        lambda: (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.autocast_increment_nesting() - 1 == torch.autocast_decrement_nesting() == 0,
        ),
    ),
    "torch's default dtype": ("torch.set_default_dtype(torch.float64)", torch.get_default_dtype),
    "torch's default device": ("torch.set_default_device('meta')", torch.get_default_device),
    "torch's number of threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", torch.get_num_threads),
    "torch's deterministic algorithms": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    ),
    "torch's precision of float32 products": (
        "torch.set_float32_matmul_precision('medium')", torch.get_float32_matmul_precision,
    ),
    "the flags of cuDNN": (
        "torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True",
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    ),
    "torch's anomaly detection": ("torch.autograd.set_detect_anomaly(True)", torch.is_anomaly_enabled),
    "the current folder": ("os.chdir('/')", os.getcwd),
    "filters that make warnings exceptions": (
        "warnings.simplefilter('error', BytesWarning)",
        lambda: [each for each in warnings.filters if each[0] == "error"],
    ),
    "the handlers of signals that stop a run": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)", lambda: signal.getsignal(signal.SIGTERM),
    ),
    "sys.stdout or sys.stderr": ("sys.stdout = io.StringIO()", lambda: sys.stdout),
}  # fmt: skip
OF_MAIN_THREAD = list(CHANGES)[-2:]
IMPORTS = "import io, os, signal, sys, torch, warnings\n"


@pytest.mark.parametrize("where", ["file", "function", "async function"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_reward_code_changes_is_set_back_and_told_once(tmp_path, what, where, caplog):
    change, read = CHANGES[what]
    if where == "async function" and what in OF_MAIN_THREAD:
        pytest.skip("other threads cannot change handlers, and the main thread may change streams meanwhile")
    at_import, in_call = (change, "pass") if where == "file" else ("", change)
    is_async = where == "async function"
    file = tmp_path / "judge.py"
    file.write_text(
        f"{IMPORTS}{at_import}\n{'async ' if is_async else ''}def f(prompts, completions):\n"
        f"    {in_call}\n    return [1.0] * len(prompts)\n"
    )

    def seen():
        async def on_the_loop():
            return read()

        return read(), awaited(on_the_loop())

    before = seen()
    source = FunctionSource(load_function(str(file), "f", "rewards.0"), f"{what} in a {where}")
    for _ in range(2):
        assert source.score(text_batch("a")).scores == [1.0]
        assert seen() == before
    assert caplog.text.count(f"changed {what} for the whole process") == 1


def test_inference_mode_is_set_back_every_time_by_one_object_and_nothing_with_it():
    """In a thread of its own: when the judge's objects are freed, each sets the thread back to what it was before."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(score_in_inference_mode).result()
    assert not torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled()


def score_in_inference_mode():
    kept = []

    def judge(prompts, completions):
        if not kept:
            torch.autocast("cpu", torch.float16).__enter__()
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
        return [1.0] * len(prompts)

    def own():
        gc.collect()
        return sum(type(each) is torch.inference_mode for each in gc.get_objects()) - len(kept)

    before, source = own(), FunctionSource(judge, "in inference mode")
    for _ in range(5):
        source.score(text_batch("a"))
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    assert own() <= before + 1


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_function_that_raises_leaves_nothing_changed(error):
    def judge(prompts, completions):
        torch.set_grad_enabled(False)
        raise error("on purpose")

    with pytest.raises(RewardError, match="on purpose"):
        FunctionSource(judge, "raises").score(text_batch("a"))
    assert torch.is_grad_enabled()


def test_calls_that_take_turns_in_one_thread_are_set_back_when_the_last_one_ends():
    """Each may be in a context of its own while others begin and end."""
    seen = []

    async def call(turns):
        with undisturbed("call"), torch.no_grad():
            for _ in range(turns):
                await asyncio.sleep(0)
        seen.append(torch.is_grad_enabled())

    async def calls():
        await asyncio.gather(call(1), call(3), call(2))
        return torch.is_grad_enabled()

    assert asyncio.run(calls()) and len(seen) == 3


def test_what_a_call_sets_holds_until_its_own_end():
    async def call(turns):
        with undisturbed("call"):
            torch.set_default_dtype(torch.float64)
            for _ in range(turns):
                await asyncio.sleep(0)
            return torch.get_default_dtype()

    async def calls():
        return await asyncio.gather(call(1), call(3))

    assert asyncio.run(calls()) == 2 * [torch.float64] and torch.get_default_dtype() == torch.float32


def test_a_closed_stream_is_an_error_that_can_still_be_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(RewardError, match=r"judge closed sys\.stdout, which the run writes to"), undisturbed("judge"):
        sys.stdout.close()
    print("goes nowhere")
    (tmp_path / "judge.py").write_text("import sys\nsys.stderr.close()\n")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ConfigError, match=r"rewards\.0\.path: .* cannot be run: RewardError: .* closed sys\.stderr"):
        load_function(str(tmp_path / "judge.py"), "f", "rewards.0")


def test_random_numbers_are_a_functions_own():
    """Nothing of a run draws from the global generators; setting them back would repeat them."""

    def judge(prompts, completions):
        return [random.random() + np.random.random() + torch.rand(()).item()]

    source = FunctionSource(judge, "random")
    assert source.score(text_batch("a")).scores != source.score(text_batch("a")).scores


def test_filters_that_hide_warnings_stay():
    def judge(prompts, completions):
        warnings.filterwarnings("ignore", "a message of the test")
        warnings.filterwarnings("error", "a message that ends the run")
        return [1.0]

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        FunctionSource(judge, "hides").score(text_batch("a"))
        warnings.warn("a message of the test", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    assert [str(each.message) for each in shown] == ["another one"]


def test_a_run_is_the_same_whatever_its_reward_code_sets(tmp_path, monkeypatch):
    """Files of the run are named relatively to the current folder."""
    changes = "\n    ".join(change for change, _ in CHANGES.values())
    monkeypatch.chdir(tmp_path)
    config = {"data__prompts": "prompts.jsonl", "train__max_steps": 1, "train__log_samples": 1}
    train_policy(tiny_run(tmp_path, **config, output_dir="usual"))
    config = tiny_run(tmp_path, **config, output_dir="changed")
    body = REWARD.replace("    return", "    change()\n    return")
    (tmp_path / "rewards.py").write_text(f"{IMPORTS}\ndef change():\n    {changes}\nchange()\n{body}")
    train_policy(config)
    usual, changed = (weights(tmp_path / name) for name in ("usual", "changed"))
    assert usual.keys() == changed.keys() and all(torch.equal(usual[name], changed[name]) for name in usual)


def test_what_code_raises_is_not_hidden_by_a_stream_that_it_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(ValueError, match="boom"), undisturbed("judge"):
        sys.stdout.close()
        raise ValueError("boom")
    with undisturbed("judge"):
        print("it can be written to")
