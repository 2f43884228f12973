"""The demo's benchmark fails if any of its promises is broken."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import demo

KEPT = {"reward": 0.8, "sentiment": 0.25, "ended": -0.2, "kl": 8.0, "answers": 128}


def result_of(*, reward, sentiment, ended, kl, answers):
    compared = {
        "sentiment": SimpleNamespace(means=(0.5, 0.5 + sentiment), rise=sentiment),
        "ended": SimpleNamespace(means=(0.5, 0.5 + ended), rise=ended, rise_error=0.1),
        "kl": SimpleNamespace(means=(0.0, kl)),
    }
    outcome = SimpleNamespace(reward_rise_in_std=reward, answers=[None] * answers, **compared)
    return SimpleNamespace(outcome=outcome, seconds={"policy": 60.0})


@pytest.mark.parametrize(
    "change",
    [{}, {"reward": 0.79}, {"sentiment": 0.24}, {"ended": -0.21}, {"kl": 8.1}, {"answers": 127}, {"kl": float("nan")}],
)
def test_every_promise_counts(monkeypatch, tmp_path, change):
    seeds = []

    def run_demo(folder, *, seed, display):
        seeds.append(seed)
        return result_of(**KEPT | (change if seed == 1 else {}))

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(sys, "argv", ["demo", "-o", str(tmp_path)])
    assert demo.main() == (1 if change else 0)
    assert seeds == [1, 2, 3]
