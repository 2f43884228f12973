"""Each row of benchmarks/tricks.py does the same work on both sides, and the trick on one of them alone."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks import tricks
from tests.tiny import save_tiny
from tether.generation import batch as decoding_batch
from tether.generation.caches import RoomyLayer
from tether.models import attention, forward, merging, products
from tether.models.compiled import is_compiled


@dataclass
class Done:
    """What one side did: how often it called something, and what came out of its work."""

    calls: list[tuple] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def sides(monkeypatch, model):
    """Both sides of each row of a trick that takes time, run once instead of measured, by the row's name."""

    def run(trick, place, name, note=lambda *args, **kwargs: ()):
        done = {}

        def seconds(bench, without, with_trick, clock=None):
            return ran(without, place, name, note), ran(with_trick, place, name, note)

        monkeypatch.setattr(tricks.Bench, "seconds", seconds)
        for row, unit, *both in trick(tricks.Bench(model, 0, small=True)):
            if unit == "s":
                done[row] = both
        assert done
        return done

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def ran(action, place, name, note) -> Done:
    """What an action did.

    Args:
        place, name: what its calls are counted of.
        note: what to remember of a call.
    """
    done = Done()
    called, outputs = getattr(place, name), tricks.response_outputs
    backward, answers = torch.Tensor.backward, tricks.HFGenerator.generate

    def counted(*args, **kwargs):
        done.calls.append(note(*args, **kwargs))
        return called(*args, **kwargs)

    def scored(*args, **kwargs):
        out = outputs(*args, **kwargs)
        done.logprobs.append(out.logprobs.sum().item())
        return out

    def differentiated(loss, *args, **kwargs):
        done.losses.append(loss.item())
        return backward(loss, *args, **kwargs)

    def answered(generator, *args):
        for i, answer in answers(generator, *args):
            done.answers[i] = list(answer.token_ids)
            yield i, answer

    with ExitStack() as stack:
        for owner, key, spy in (
            (tricks, "response_outputs", scored),
            (torch.Tensor, "backward", differentiated),
            (tricks.HFGenerator, "generate", answered),
            (place, name, counted),
        ):
            stack.enter_context(mock.patch.object(owner, key, spy))
        action()
    return done


def assert_same_work(without: Done, with_trick: Done, tolerance: float = 1e-5):
    assert sum(with_trick.losses) == pytest.approx(sum(without.losses), rel=tolerance)
    if without.logprobs and with_trick.logprobs:
        assert sum(with_trick.logprobs) == pytest.approx(sum(without.logprobs), rel=tolerance)
    assert with_trick.answers == without.answers
    assert with_trick.losses or with_trick.logprobs or with_trick.answers


def assert_on_one_side(done: dict[str, list[Done]], tolerance: float = 1e-5):
    for row, (without, with_trick) in done.items():
        assert not without.calls and with_trick.calls, row
        assert_same_work(without, with_trick, tolerance)


@pytest.mark.parametrize("kind", ["as it is", "fast by oneDNN", "slow with few rows"])
@pytest.mark.parametrize("trick, way", [("products", "by_onednn"), ("few_rows", "transposed")])
def test_float32_is_multiplied_in_two_ways_on_every_processor(monkeypatch, sides, trick, way, kind):
    for limit in ("LEAST", "LEAST_OF_FEW"):
        monkeypatch.setattr(products, limit, 1)
    if kind != "as it is":
        monkeypatch.setattr(products, "onednn_is_faster", lambda: kind == "fast by oneDNN")
        monkeypatch.setattr(products, "few_rows_are_slow", lambda: kind == "slow with few rows")
    done = sides(getattr(tricks, trick), products, way)
    assert len(done) == 2
    assert_on_one_side(done)


def test_half_precision_is_widened_on_one_side(monkeypatch, sides):
    monkeypatch.setattr(products, "least_rows", lambda dtype: 1)
    done = sides(tricks.half, products, "widened")
    assert [row.rpartition(": ")[2] for row in done] == ["scoring", "forward and backward", "decoding"]
    decoded = done.pop("products of bfloat16 in float32: decoding")  # whose tokens rounding may change
    assert not decoded[0].calls and decoded[1].calls and decoded[0].answers.keys() == decoded[1].answers.keys()
    assert_on_one_side(done, 0.02)


@pytest.mark.skipif(not tricks.is_x86(), reason="the gradient of attention is computed in float32 on x86")
def test_the_gradient_of_attention_is_wide_on_one_side(sides):
    done = sides(tricks.gradients, attention._Attention, "backward")
    assert len(done) == 2
    assert_on_one_side(done)


def test_logits_and_the_gradient_of_the_head_are_in_one_place_on_one_side(sides):
    done = sides(tricks.logits, forward, "linear_logprobs")
    assert len(done) == 2
    assert_on_one_side(done)


def test_micro_batches_sorted_by_length_have_less_padding(sides):
    def read(backbone, batch):
        return batch.token_ids.numel(), int(batch.attention_mask.sum()), int(batch.response_mask.sum())

    [(without, with_trick)] = sides(tricks.lengths, forward, "_response_states", read).values()
    padded, *real = (sum(column) for column in zip(*without.calls, strict=True))
    less_padded, *as_real = (sum(column) for column in zip(*with_trick.calls, strict=True))
    assert padded > less_padded >= real[0] and as_real == real
    assert len(without.calls) == len(with_trick.calls)
    assert_same_work(without, with_trick)


def test_rows_leave_and_prompts_are_read_once_on_one_side(sides):
    def rows(batch, model):
        return len(batch._inputs), batch._inputs.shape[1]

    done = sides(tricks.rows, decoding_batch.Batch, "_forward", rows)
    leaving, shared = done.values()
    for without, with_trick in done.values():
        assert_same_work(without, with_trick)
        asked = len(without.answers)
        assert {count for count, _ in without.calls[3:]} == {asked}  # the first three test the cache
    ended = sorted(map(len, leaving[0].answers.values()))
    assert ended[0] < ended[-1]
    with_rows = [count for count, _ in leaving[1].calls]
    assert with_rows == [sum(length > step for length in ended) for step in range(ended[-1])]
    assert shared[1].calls == [(1, 32)]


def test_keys_and_values_have_room_on_one_side(sides):
    assert_on_one_side(sides(tricks.cache, RoomyLayer, "update"))


def test_tokens_are_drawn_by_gumbel_max_on_one_side(sides):
    done = sides(tricks.draws, tricks, "drawn_tokens")
    assert [[len(side.calls) for side in both] for both in done.values()] == [[0, 10], [0, 10]]


def test_adamw_is_fused_and_gradients_are_summed_on_one_side(sides):
    kernels = sides(tricks.optimizer, torch, "_fused_adamw_")["AdamW in one kernel"]
    assert [len(side.calls) for side in kernels] == [0, 1]
    tests = sides(tricks.optimizer, torch, "isfinite")["finite gradients seen from their sums"]
    assert len(tests[0].calls) > 10 and len(tests[1].calls) == 1


def test_a_head_on_the_policy_needs_one_pass_of_the_trunk(sides):
    [(without, with_trick)] = sides(tricks.roles, forward, "_response_states").values()
    assert len(without.calls) == 2 and len(with_trick.calls) == 1


def test_one_base_is_held_instead_of_three_models(monkeypatch, model):
    made, build = [], tricks.build_roles
    monkeypatch.setattr(tricks, "build_roles", lambda *given, **more: made.append(build(*given, **more)) or made[-1])
    bench = tricks.Bench(model, 0, small=True)
    _, unit, without, with_trick = next(tricks.roles(bench))
    assert unit == "MiB" and [len({role.model for role in roles.all}) for roles in made] == [3, 1]
    assert [[role.name for role in roles.all] for roles in made] == [["policy", "reference", "value"]] * 2
    of_one = sum(p.numel() * p.element_size() for p in bench.model.parameters()) / 2**20
    of_all = {p for role in made[1].all for part in (role.model, role.head) if part for p in part.parameters()}
    assert without == pytest.approx(3 * of_one, rel=0.01)
    assert with_trick == pytest.approx(sum(p.numel() * p.element_size() for p in of_all) / 2**20, rel=0.01)


def test_an_adapter_is_merged_on_one_side(sides):
    assert_on_one_side(sides(tricks.merged, merging, "_merged"))


def test_passes_are_under_autocast_on_one_side(sides):
    done = sides(tricks.autocast, forward, "_response_states", lambda *given: torch.is_autocast_enabled("cpu"))
    [(without, with_trick)] = done.values()
    assert not any(without.calls) and all(with_trick.calls) and with_trick.calls
    assert_same_work(without, with_trick, 0.02)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_layers_are_compiled_on_one_side(monkeypatch, sides):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(tricks, "check_compile", lambda *given: None)  # which needs no compiler
    done = sides(tricks.compiled, forward, "_response_states", lambda model, *_, **__: is_compiled(model))
    for without, with_trick in (both for row, both in done.items() if row.endswith("once compiled")):
        assert (without.calls, with_trick.calls) == ([False], [True])
        assert_same_work(without, with_trick)


@pytest.mark.parametrize(
    "trick, owner, name, told",
    [
        ("products", torch.backends.mkldnn, "is_available", "this torch has no oneDNN"),
        ("gradients", tricks, "is_x86", "only on x86 processors"),
    ],
)
def test_a_way_that_this_machine_lacks_is_no_row(monkeypatch, capsys, model, trick, owner, name, told):
    monkeypatch.setattr(owner, name, lambda: False)
    assert list(getattr(tricks, trick)(tricks.Bench(model, 0, small=True))) == []
    assert told in capsys.readouterr().err
