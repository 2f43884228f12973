"""The moving average of the policy: its recurrence by hand, and parameters that come back bitwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny import tiny_causal_lm
from tether.errors import CheckpointError
from tether.train.ema import PolicyAverage


def parameter(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def set_to(p, *values):
    with torch.no_grad():
        p.copy_(torch.tensor(values, dtype=p.dtype))


def average_of(average, name="w"):
    return average.state_dict()[name].tolist()


def test_recurrence_by_hand():
    p = parameter(1.0, -2.0, dtype=torch.float64)
    average = PolicyAverage({"w": p}, 0.75)
    assert average_of(average) == [1.0, -2.0], "it starts from the parameters"
    wanted = [1.0, -2.0]
    for new in ([5.0, 0.0], [-3.0, 8.0], [0.5, 0.5]):
        set_to(p, *new)
        average.update()
        wanted = [0.75 * old + 0.25 * x for old, x in zip(wanted, new, strict=True)]
        assert average_of(average) == pytest.approx(wanted, abs=1e-15)
    assert wanted == [0.6875, 0.78125], "27/64 · 1 + 9/64 · 5 − 3/16 · 3 + 1/4 · .5, and the like"


def test_decay_zero_is_the_policy_bitwise():
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(50, generator=generator))
    average = PolicyAverage({"w": p}, 0.0)
    set_to(p, *torch.randn(50, generator=generator).tolist())
    average.update()
    assert torch.equal(average.state_dict()["w"], p)


def test_parameters_at_rest_leave_the_average_at_rest():
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)))
    average = PolicyAverage({"w": p}, 0.992)
    for _ in range(20):
        average.update()
    assert torch.equal(average.state_dict()["w"], p)


def test_parameters_and_average_share_no_memory():
    for dtype in (torch.float32, torch.float64):
        p = parameter(1.0, 2.0, dtype=dtype)
        average = PolicyAverage({"w": p}, 0.5)
        set_to(p, 7.0, 7.0)
        assert average_of(average) == [1.0, 2.0]
        average.update()
        assert p.tolist() == [7.0, 7.0]
        with average.applied():
            set_to(p, 9.0, 9.0)
        assert average_of(average) == [4.0, 4.5]


def test_small_moves_of_bfloat16_parameters_are_not_lost():
    """From 1 to 1.0078125 is one step of bfloat16: at decay .9 a bfloat16 average would never leave 1."""
    p = parameter(1.0, dtype=torch.bfloat16)
    average = PolicyAverage({"w": p}, 0.9)
    set_to(p, 1.0078125)
    for n in range(1, 21):
        average.update()
        assert average_of(average)[0] == pytest.approx(1 + 0.0078125 * (1 - 0.9**n), abs=1e-6)
    assert average.state_dict()["w"].dtype == torch.float32
    set_to(p, 1.0)
    with average.applied():
        assert p.dtype == torch.bfloat16 and p.tolist() == [1.0078125], "rounded to the nearest"
    assert p.tolist() == [1.0]


def test_float64_stays_float64():
    average = PolicyAverage({"w": parameter(1.0 + 1e-12, dtype=torch.float64)}, 0.5)
    assert average_of(average) == [1.0 + 1e-12]


def test_applied_puts_the_average_in_and_the_trained_ones_back():
    p, frozen = parameter(1.0, -0.0), parameter(3.0)
    average = PolicyAverage({"w": p, "v": frozen}, 0.5)
    set_to(p, 3.0, float("nan"))
    average.update()
    set_to(p, 5.0, -0.0)
    before = p.detach().clone()
    with average.applied():
        assert p[0].item() == 2.0 and p[1].isnan() and frozen.tolist() == [3.0]
    assert torch.equal(p.view(torch.int32), before.view(torch.int32)), "the sign of a zero too"
    assert p.requires_grad and p.grad is None


def test_trained_parameters_come_back_after_an_exception():
    p = parameter(1.0)
    average = PolicyAverage({"w": p}, 0.5)
    set_to(p, 3.0)
    for _ in range(2):
        with pytest.raises(KeyError), average.applied():
            assert p.tolist() == [1.0]
            raise KeyError
        assert p.tolist() == [3.0]
    average.update()
    assert average_of(average) == [2.0]


def test_neither_nested_nor_updated_while_applied():
    average = PolicyAverage({"w": parameter(1.0)}, 0.5)
    with average.applied():
        with pytest.raises(AssertionError, match="the average already"), average.applied():
            pass
        with pytest.raises(AssertionError, match="the average now"):
            average.update()
    with average.applied():
        pass


def test_one_parameter_under_two_names():
    p = parameter(1.0)
    average = PolicyAverage({"in": p, "out": p}, 0.5)
    set_to(p, 3.0)
    average.update()
    assert average_of(average, "in") == average_of(average, "out") == [2.0]
    with average.applied():
        assert p.tolist() == [2.0]
    assert p.tolist() == [3.0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_answers_as_its_average(tied):
    model, other = (tiny_causal_lm("llama", tied=tied, seed=seed).eval() for seed in (0, 1))
    ids = torch.tensor([[5, 9, 12]])
    middle = tiny_causal_lm("llama", tied=tied, seed=0).eval()
    with torch.no_grad():
        for m, p in zip(middle.parameters(), other.parameters(), strict=True):
            m.copy_((m + p) / 2)
        average = PolicyAverage(dict(model.named_parameters()), 0.5)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_(q)
        average.update()
        with average.applied():
            torch.testing.assert_close(model(ids).logits, middle(ids).logits, atol=1e-5, rtol=0)
        assert torch.equal(model(ids).logits, other(ids).logits)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_state_goes_on_where_it_was_saved():
    p = parameter(1.0, 2.0)
    average = PolicyAverage({"w": p}, 0.9)
    set_to(p, 1.1, 5.3)
    average.update()
    saved = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    q = parameter(1.1, 5.3)
    resumed = PolicyAverage({"w": q}, 0.9)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state_dict()["w"], average.state_dict()["w"])
    for each in (p, q):
        set_to(each, -4.0, 0.7)
    average.update()
    resumed.update()
    assert torch.equal(resumed.state_dict()["w"], average.state_dict()["w"])
    assert saved["w"].tolist() != average_of(resumed), "what was loaded is a copy"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.zeros(2)}, r"^no match for 1 averaged tensor; the first is missing in the checkpoint: b$"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1), "d": torch.zeros(1)},
            r"^no match for 2 averaged tensors; the first is missing in this run's configuration: c$",
        ),
        ({"a": torch.zeros(2), "b": torch.zeros(1, 1)}, r"^b: the checkpoint's average has shape \[1, 1\], .* \[1\]$"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_state_of_another_run_is_refused_as_a_whole(state, message):
    average = PolicyAverage({"a": parameter(1.0, 2.0), "b": parameter(3.0)}, 0.5)
    with pytest.raises(CheckpointError, match=message):
        average.load_state_dict(state)
    assert average_of(average, "a") == [1.0, 2.0] and average_of(average, "b") == [3.0]
