"""What an update costs: seconds that add up, tokens, peak memory, and operations against those of matrix products."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.models.build import save_adapter
from tests.tiny import EOS, save_tiny
from tests.train.runs import tiny_run
from tests.train.trainers import trainer_of
from tether.generation.fake import FakeGenerator
from tether.metrics.reduce import Metrics
from tether.models import products
from tether.train.costs import Peak, matrix_rate, phase, timed, with_rates
from tether.train.run import train_policy
from tether.types import RewardOutput

RESPONSES = [[10, 11, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS]]
PHASES = {"rollout", "reward", "logprobs", "values", "reference", "update"}


class Judge:
    """Half a point more for each further answer, slowly."""

    def score(self, batch):
        time.sleep(0.02)
        return RewardOutput([i / 2 for i in range(len(batch))])


def update(tmp_path, **changes):
    """The metrics of an update on four answers, and the tokens of its queries and of its answers."""
    config = tiny_run(tmp_path, train__rollout_batch_size=4, train__micro_batch_size=2, **changes)
    trainer = trainer_of(config, Judge(), FakeGenerator(RESPONSES), stop_ids={EOS})
    draws = [trainer.parts.prompts[i] for i, _ in trainer.stream.batch(0)]
    return trainer.step(), sum(len(prompt.token_ids) for prompt in draws), sum(map(len, RESPONSES))


@pytest.mark.parametrize(
    ("changes", "without"),
    [({"value__kind": "model"}, set()), ({"value__kind": "head"}, {"values"}), ({"ppo__kl_coef": 0.0}, {"reference"})],
)
def test_seconds_and_memory_of_the_phases(tmp_path, changes, without):
    got, *_ = update(tmp_path, **{"value__kind": "model"} | changes)
    seconds = {name: number for name, number in got.items() if name.startswith("time/")}
    whole = seconds.pop("time/step_s")
    assert seconds.keys() == {f"time/{name}_s" for name in PHASES - without | {"rest"}}
    assert sum(seconds.values()) == pytest.approx(whole, rel=1e-9) and min(seconds.values()) > 0
    assert seconds["time/reward_s"] >= 0.02
    assert got["eps"] == pytest.approx(4 / whole, rel=1e-9)
    memory = {name: number for name, number in got.items() if name.startswith("memory/")}
    assert memory.keys() == {f"memory/{name}" for name in PHASES - without}


def test_roles_are_switched_and_phases_measured_once_however_many_micro_batches_there_are(tmp_path, monkeypatch):
    """In scoring, update, rewards and evaluation: either may take as long as a micro-batch's forward pass."""
    reward = save_adapter(tmp_path / "reward", save_tiny(tmp_path / "llama-tied"), reward=True)
    seen = Counter()
    for owner, name in ((BaseTunerLayer, "set_adapter"), (BaseTunerLayer, "enable_adapters"), (Peak, "__init__")):
        wrapped = getattr(owner, name)

        def noted(self, *args, wrapped=wrapped, **kwargs):
            seen[wrapped.__qualname__] += 1
            return wrapped(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    counts = []
    for size in (4, 1):
        changes = {"train__micro_batch_size": size, "train__max_steps": 1, "output_dir": str(tmp_path / str(size))}
        rewards = [{"type": "adapter", "path": str(reward), "batch_size": size}]
        config = tiny_run(tmp_path, rewards=rewards, model__lora={"r": 2}, data__eval_fraction=0.4, **changes)
        seen.clear()
        train_policy(config)
        counts.append(dict(seen))
    assert counts[0] == counts[1] and len(counts[0]) == 3


def test_a_phase_counts_the_seconds_in_which_the_device_does_its_work(monkeypatch):
    """A device that is given work and does it later, and a clock that moves only while something waits for it."""
    clock, queued, device = [0.0], [], torch.device("xpu")

    def synchronize(waited_for):
        assert waited_for == device
        clock[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr("tether.train.costs.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    metrics = Metrics()
    queued.append(16.0)  # of what was before
    with timed(metrics, "step", device):
        for name, seconds in (("rollout", 1.0), ("reward", 0.0), ("update", 2.0), ("update", 4.0)):
            with phase(metrics, name, device):
                queued.append(seconds)
        queued.append(8.0)
    got = with_rates(metrics.compute(), 1.0)
    seconds = {name: number for name, number in got.items() if name.startswith("time/")}
    wanted = {"rollout": 1.0, "reward": 0.0, "update": 6.0, "rest": 8.0, "step": 15.0}
    assert seconds == {f"time/{name}_s": number for name, number in wanted.items()}


def test_peak_memory_is_that_inside():
    metrics, device = Metrics(), torch.device("cpu")
    for name, mib in (("large", 192), ("small", 1)):
        with phase(metrics, name, device):
            torch.ones(mib * 2**18)
            time.sleep(0.03)
    large, small = (metrics.compute()[f"memory/{name}"] for name in ("large", "small"))
    assert 0 < small < large < small + 1


@pytest.mark.parametrize(
    ("changes", "passes"), [({"value__kind": "model"}, 2), ({"value__kind": "head"}, 1)], ids=["critic", "head"]
)
def test_tokens_and_operations_of_full_fine_tuning(tmp_path, changes, passes):
    got, of_queries, of_answers = update(tmp_path, ppo__num_ppo_epochs=3, **changes)
    both = of_queries + of_answers
    assert (got["tokens/rollout"], got["tokens/read"]) == (of_answers, both)
    assert got["tokens/update"] == 3 * passes * both
    # a layer of the tiny Llama: q and o 16 × 16, k and v 8 × 16, three of 16 × 32; its head 40 × 16
    trunk, head = 2 * (2 * 256 + 2 * 128 + 3 * 512), 40 * 16
    assert got["flops/update"] == pytest.approx(3 * 6 * (passes * trunk * both + head * of_answers) / 1e12, rel=1e-9)
    for name in ("rollout", "update"):
        assert got[f"speed/{name}"] == pytest.approx(got[f"tokens/{name}"] / got[f"time/{name}_s"], rel=1e-9)
    rate = matrix_rate(torch.device("cpu"), torch.float32)
    assert got["speed/mfu"] == pytest.approx(got["flops/update"] * 1e12 / got["time/update_s"] / rate, rel=1e-9)


def test_demonstrations_are_of_an_updates_tokens_and_operations(tmp_path):
    ptx = tmp_path / "ptx.jsonl"
    ptx.write_text('{"prompt": "the cat", "completion": "sees"}\n', encoding="utf-8")
    data = {"value__kind": "head", "ppo__num_ppo_epochs": 1, "data__chat_template": "none"}
    got, of_queries, of_answers = update(tmp_path, data__ptx=str(ptx), ppo__ptx_coef=1.0, **data)
    # as many as answers, each of two tokens, a word and an end token
    shown, closed = 4 * 4, 4 * 2
    assert got["tokens/update"] == of_queries + of_answers + shown
    trunk, head = 2 * (2 * 256 + 2 * 128 + 3 * 512), 40 * 16
    wanted = 6 * (trunk * (of_queries + of_answers + shown) + head * (of_answers + closed))
    assert got["flops/update"] == pytest.approx(wanted / 1e12, rel=1e-9)


def test_operations_of_lora_leave_out_gradients_of_frozen_weights(tmp_path):
    got, of_queries, of_answers = update(
        tmp_path, ppo__num_ppo_epochs=1, value__kind="head", model__lora={"r": 2, "target_modules": ["q_proj"]}
    )
    trunk, head, adapter = 2 * (2 * 256 + 2 * 128 + 3 * 512), 40 * 16, 2 * (2 * 16 + 16 * 2)
    both = of_queries + of_answers
    wanted = 4 * trunk * both + 6 * adapter * both + 4 * head * of_answers
    assert got["flops/update"] == pytest.approx(wanted / 1e12, rel=1e-9)


def test_the_rate_of_matrix_products_is_measured_once_and_quickly():
    matrix_rate.cache_clear()
    start = time.perf_counter()
    rate = matrix_rate(torch.device("cpu"), torch.float32)
    assert time.perf_counter() - start < 2 and 1e8 < rate < 1e15
    assert matrix_rate(torch.device("cpu"), torch.float32) == rate


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_rate_is_that_of_the_routine_that_models_use(monkeypatch, is_slow):
    seen, real = [], products.product
    monkeypatch.setattr(products, "half_is_slow", lambda dtype: is_slow)
    monkeypatch.setattr(products, "product", lambda *args: (seen.append(args[0].dtype), real(*args))[1])
    assert matrix_rate.__wrapped__(torch.device("cpu"), torch.bfloat16) > 0
    assert (torch.bfloat16 in seen) == is_slow
