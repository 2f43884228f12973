"""Row 67 of the fault list, and memory that runs out: what does not fit is halved, and the results are the same."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch
from transformers import TrainerCallback

from tests.faults.test_bad_numbers import Heard
from tests.tiny import EOS, save_tiny
from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tests.train.trainers import trainer_of
from tether.errors import GenerationError, TrainingError
from tether.generation import batch
from tether.generation.fake import FakeGenerator
from tether.metrics.reduce import Metrics
from tether.metrics.writers import read_jsonl
from tether.models.roles import ModelRoles, Pass
from tether.rewards import model
from tether.rewards.fake import FakeRewards
from tether.train import evaluate, memory
from tether.train.batches import halves, mini_batches
from tether.train.inputs import load_data
from tether.train.run import train_policy
from tether.train.update import Update
from tether.types import Experience, MicroBatch

MINIS = {"ppo__num_mini_batches": 2, "train__max_steps": 1}


def small_machine(monkeypatch, owner, name, *, fits=2, after=0, times=1000):
    """Makes calls of a method run out of memory, when done, where its micro-batch has more than ``fits`` rows.

    Args:
        after: calls that fit however large they are.
        times: calls that fail.
    """
    wrapped, calls, widths = getattr(owner, name), {"fit": after, "fail": times}, []

    def method(self, *args, **kwargs):
        result = wrapped(self, *args, **kwargs)
        batch = next(getattr(x, "batch", x) for x in args if not isinstance(x, Pass))
        widths.append(tuple(batch.token_ids.shape))
        if len(batch.rows) > fits:
            if calls["fit"]:
                calls["fit"] -= 1
            elif calls["fail"]:
                calls["fail"] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(owner, name, method)
    return widths


def run(folder, name, **changes):
    return tiny_run(folder, output_dir=str(folder / name), **MINIS | changes)


def assert_nearly_same(one, other, start):
    """Weights that were trained, and moved by rounding alone: settled bounds of float32 at a learning rate of 1e-3."""
    assert max(float((one[key] - start[key]).abs().max()) for key in start) > 5e-4
    for key in one:
        torch.testing.assert_close(other[key], one[key], atol=1e-6, rtol=0)


@pytest.mark.parametrize("where", ["scoring", "first mini-batch", "its critic", "later mini-batch", "dry step"])
def test_what_does_not_fit_is_halved_and_results_move_by_rounding_alone(tmp_path, monkeypatch, where):
    """The same answers stay in the same mini-batches, and nothing of a failed attempt is left in a gradient."""
    usual = run(tmp_path, "usual")
    train_policy(usual)
    owner, name = (ModelRoles, "score_pass") if where == "scoring" else (Update, "accumulate")
    small_machine(monkeypatch, owner, name, after={"its critic": 1, "later mini-batch": 2}.get(where, 0))
    short, display = run(tmp_path, "short", train__dry_step=where == "dry step", train__save_steps=1), Heard()
    train_policy(short, display=display)
    assert_nearly_same(weights(usual.output_dir), weights(short.output_dir), weights(tmp_path / "llama-tied"))
    (expected,), (got,) = reproducible(usual.output_dir), reproducible(short.output_dir)
    assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert got["val/first_ratio_error"] == 0, "the passes of an update had different micro-batches"
    told = [text for text in display.said if "out of memory" in text]
    assert told == ["warning: out of memory; micro-batches are halved from now on, to at most 2 answers"]
    state = json.loads((short.output_dir / "checkpoint-1" / "tether_state" / "state.json").read_text())
    assert state["halvings"] == 1


def test_a_first_mini_batch_that_does_not_fit_is_scored_anew_in_halves(tmp_path, monkeypatch):
    scored = small_machine(monkeypatch, ModelRoles, "score_pass", times=0)
    small_machine(monkeypatch, Update, "accumulate")
    train_policy(run(tmp_path, "out"))
    assert [rows for rows, _ in scored] == [4] * 4 + [2] * 8, "all passes of an update have the same micro-batches"


class Living(TrainerCallback):
    """Bytes of the tensors that are alive after each update, weights and moments among them."""

    def __init__(self):
        self.bytes = []

    def on_step_end(self, args, state, control, **kwargs):
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # looking at everything that lives wakes what is deprecated
            tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]  # no fake ones
            storages = {x.untyped_storage() for x in tensors if not x.is_meta}
        self.bytes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))


@pytest.mark.parametrize("sharing", [{"value__kind": "model"}, {"model__lora": {"r": 2}}], ids=["full", "LoRA"])
def test_67_nothing_is_kept_from_one_update_to_the_next(tmp_path, sharing):
    living = Living()
    fixed = {"sampling__stop_token": None, "train__max_steps": 6, "ppo__num_ppo_epochs": 1}
    train_policy(tiny_run(tmp_path, **fixed | sharing), callbacks=[living])
    assert len(living.bytes) == 6
    assert max(living.bytes[2:]) == min(living.bytes[2:]), "after the optimizers' moments are there, nothing is added"


@pytest.mark.parametrize("sharing", [{"value__kind": "model"}, {"model__lora": {"r": 2}}], ids=["full", "LoRA"])
def test_gradients_of_policy_and_critic_are_never_there_together(tmp_path, monkeypatch, sharing):
    """Nor in the dry step, which is of an update that trains both, also where the first ones train the critic alone."""
    accumulate, there = Update.accumulate, []

    def noted(self, *args, **kwargs):
        accumulate(self, *args, **kwargs)
        there.append([one.name for one in self.optimizers if any(p.grad is not None for p in one.parameters)])

    monkeypatch.setattr(Update, "accumulate", noted)
    fixed = {"train__dry_step": True, "train__max_steps": 2, "value__warmup_steps": 1, "ppo__num_ppo_epochs": 1}
    train_policy(tiny_run(tmp_path, ppo__num_mini_batches=2, **fixed | sharing))
    policy, critic = ["policy"], ["value"]
    assert there == [policy, critic] + [critic] * 2 + [policy, critic] * 2


def test_mini_batches_hold_the_same_answers_however_often_they_are_halved(tmp_path):
    def item(rows, group):
        ids, mask = torch.zeros(len(rows), 1, dtype=torch.long), torch.ones(len(rows), 1, dtype=torch.bool)
        return Experience(MicroBatch(rows, ids, mask, ids, mask, group), ids.float(), ids.float(), mask)

    config = run(tmp_path, "out", train__rollout_batch_size=12, train__micro_batch_size=3, ppo__num_ppo_epochs=3)
    wholes = [tuple(range(start, start + 3)) for start in range(0, 12, 3)]
    groups = []
    for halvings in range(4):
        numbered = [(number, rows) for number, whole in enumerate(wholes) for rows in halves(whole, halvings)]
        parts = [item(rows, number if halvings else None) for number, rows in numbered]
        groups.append([[row for part in group for row in part.batch.rows] for group in mini_batches(parts, config, 7)])
    assert len(groups[0]) == 6 and all(len(group) == 6 for group in groups[0])
    assert groups[0] == groups[1] == groups[2] == groups[3]


def test_a_run_that_goes_on_keeps_the_smaller_micro_batches(tmp_path, monkeypatch):
    steady = {"train__lr_scheduler_type": "constant", "train__save_steps": 1}
    with monkeypatch.context() as patch:
        small_machine(patch, ModelRoles, "score_pass")
        train_policy(run(tmp_path, "out", **steady))
    widths = small_machine(monkeypatch, ModelRoles, "score_pass", times=0)
    train_policy(run(tmp_path, "out", resume=True, **steady | {"train__max_steps": 2}))
    assert [rows for rows, _ in widths] == [2] * 8, "by policy and critic"


def test_tokens_of_a_micro_batch_are_halved_where_they_are_its_measure(tmp_path, monkeypatch):
    budget = {"train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 120}
    usual, short = run(tmp_path, "usual", **budget), run(tmp_path, "short", **budget)
    train_policy(usual)
    widths = small_machine(monkeypatch, ModelRoles, "score_pass", fits=1)
    train_policy(short)
    assert widths[0][0] > 2 and widths[-1][0] == 1
    assert_nearly_same(weights(usual.output_dir), weights(short.output_dir), weights(tmp_path / "llama-tied"))


def test_one_answer_that_does_not_fit_ends_the_run_with_what_would_help(tmp_path, monkeypatch):
    small_machine(monkeypatch, Update, "accumulate", fits=0)
    with pytest.raises(TrainingError, match=r"one answer in a micro-batch .*2\.00 GiB.*train\.gradient_checkpointing"):
        train_policy(run(tmp_path, "out"))


@pytest.mark.parametrize("where", ["a step", "the critic's step", "a later mini-batch"])
def test_what_has_changed_weights_is_not_begun_anew(tmp_path, monkeypatch, where):
    """An update that ran out of memory past its first change would train on its answers twice."""
    scored = small_machine(monkeypatch, ModelRoles, "score_pass", times=0)
    if where == "a later mini-batch":
        small_machine(monkeypatch, Update, "accumulate", fits=0, after=8)
    else:
        wrapped = Update.take_step

        def step(self, optimizer):
            if (optimizer.name == "policy") == (where == "a step"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            wrapped(self, optimizer)

        monkeypatch.setattr(Update, "take_step", step)
    with pytest.raises(TrainingError, match=r"in the middle of update 1, .* cannot be repeated .*train\.dry_step"):
        train_policy(run(tmp_path, "out", value__kind="model", train__micro_batch_size=1))
    assert len(scored) == 16, "every answer once, by policy and critic"


@pytest.mark.parametrize("measure", ["answers", "tokens"])
def test_demonstrations_are_halved_until_they_fit(tmp_path, monkeypatch, measure):
    """In a later mini-batch, whose update cannot be repeated; also where answers are alone by then: demonstrations
    may be many more at a time."""
    (tmp_path / "ptx.jsonl").write_text('{"prompt": "the cat", "completion": " sees the dog"}\n' * 4)
    widths = small_machine(monkeypatch, Update, "imitate", fits=1, after={"answers": 2, "tokens": 1}[measure])
    budget = {"train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 34}
    changes = {"answers": {"train__micro_batch_size": 2}, "tokens": budget}[measure]
    train_policy(run(tmp_path, "out", data__ptx=str(tmp_path / "ptx.jsonl"), ppo__ptx_coef=1.0, **changes))
    assert widths[0][0] > 1 and widths[-1][0] == 1


def short_decoding(monkeypatch, fits):
    """Makes a step of decoding run out of memory where more than ``fits`` answers are written side by side; returns how
    many were, in each step that fitted."""
    wrapped, widths = batch.drawn_tokens, []

    def drawn(logits, generators, sampling):
        if len(generators) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        widths.append(len(generators))
        return wrapped(logits, generators, sampling)

    monkeypatch.setattr(batch, "drawn_tokens", drawn)
    return widths


@pytest.mark.parametrize("tried", [True, False], ids=["dry step", "rollout"])
def test_fewer_answers_are_decoded_side_by_side_where_so_many_do_not_fit(tmp_path, monkeypatch, caplog, tried):
    """In rollouts and evaluations, before training and in it; text, metrics and weights are the same."""
    common = {"data__eval_fraction": 0.5, "train__save_steps": 1, "train__lr_scheduler_type": "constant"}
    usual = run(tmp_path, "usual", **common | {"train__max_steps": 2})
    train_policy(usual)
    with monkeypatch.context() as patch:
        short_decoding(patch, 3)
        display = Heard()
        train_policy(run(tmp_path, "short", train__dry_step=tried, **common), display=display)
    told = [record.message for record in caplog.records if "out of memory" in record.message]
    assert [text.split("at most ")[1].split()[0] for text in told][-1] == "2"
    assert ["fit into memory in an update, 2 in decoding" in text for text in display.said].count(True) == tried
    widths = short_decoding(monkeypatch, 8)
    train_policy(run(tmp_path, "short", train__dry_step=False, resume=True, **common | {"train__max_steps": 2}))
    assert max(widths) == 2, "a run that goes on keeps it"
    assert_same_weights(weights(tmp_path / "short"), weights(usual.output_dir))
    assert answered(tmp_path / "short") == answered(usual.output_dir)


def answered(folder):
    return sorted((row["step"], row["row"], row["response"]) for row in read_jsonl(folder / "samples.jsonl"))


def test_a_run_whose_decoding_fits_no_more_says_where_to_go_on(tmp_path, monkeypatch):
    short_decoding(monkeypatch, 0)
    with pytest.raises(GenerationError, match="one answer being decoded"):
        train_policy(run(tmp_path, "start"))

    class Later(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            short_decoding(monkeypatch, 0)

    monkeypatch.undo()
    with pytest.raises(GenerationError) as caught:
        train_policy(run(tmp_path, "out", train__max_steps=2, train__save_steps=1), callbacks=[Later()])
    (note,) = caught.value.__notes__
    assert "the last good checkpoint is" in note and "checkpoint-1" in note


@pytest.mark.parametrize("where", ["judge", "evaluation's KL"])
def test_passes_over_answers_that_do_not_fit_are_run_in_halves(tmp_path, monkeypatch, caplog, where):
    judge = save_tiny(tmp_path / "judge", "gpt2", num_labels=1)
    changes = {"rewards": [{"type": "model", "path": str(judge), "batch_size": 4}], "data__eval_fraction": 0.5}
    usual, short = run(tmp_path, "usual", **changes), run(tmp_path, "short", **changes)
    train_policy(usual)
    owner, name = (model, "last_token_scores") if where == "judge" else (evaluate, "response_outputs")
    wrapped, widths = getattr(owner, name), []

    def passed(*args, **kwargs):
        rows = len(args[2]) if where == "judge" else len(args[1].rows)
        widths.append(rows)
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(owner, name, passed)
    train_policy(short)
    assert min(widths) == 1 < max(widths)
    expected, got = reproducible(usual.output_dir), reproducible(short.output_dir)
    assert len(got) == len(expected) == 3, "an update between two evaluations"
    for one, other in zip(expected, got, strict=True):
        assert other == pytest.approx(one, abs=1e-5, rel=1e-5)
    assert any("out of memory in" in record.message for record in caplog.records)


def test_the_kl_of_an_evaluation_has_the_same_shapes_on_both_sides_where_only_the_reference_does_not_fit(
    tmp_path, monkeypatch
):
    generator = FakeGenerator([[10, 11, EOS], [12, EOS]])
    trainer = trainer_of(run(tmp_path, "out"), FakeRewards(lambda *texts: 0.0), generator, stop_ids={EOS})
    answers, policy, reference = trainer.rollout(Metrics()), [], []
    of_policy, of_reference = evaluate.response_outputs, ModelRoles.ref_logprobs

    def noted(model, batch, **kwargs):
        policy.append(tuple(batch.token_ids.shape))
        return of_policy(model, batch, **kwargs)

    def few(self, batch, temperature):
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        reference.append(tuple(batch.token_ids.shape))
        return of_reference(self, batch, temperature)

    monkeypatch.setattr(evaluate, "response_outputs", noted)
    monkeypatch.setattr(ModelRoles, "ref_logprobs", few)
    progress = []
    told = {"phase": lambda *done: progress.append(done), "check": lambda: None}
    assert evaluate.sequence_kl(trainer.parts, answers, trainer.config, **told) == [0.0] * 8
    assert [rows for rows, _ in policy] == [4, 4, 2, 2, 2, 2] and policy[2:] == reference
    assert progress[0] == ("evaluation KL", 4, 16) and progress[-1] == ("evaluation KL", 16, 16)


@pytest.mark.parametrize("sharing", [{"value__kind": "head"}, {"model__lora": {"r": 2}}], ids=["full", "LoRA"])
def test_the_dry_step_has_the_longest_lengths_and_no_effect(tmp_path, monkeypatch, sharing):
    plain, display = run(tmp_path, "plain", **sharing), Heard()
    tried = run(tmp_path, "tried", train__dry_step=True, **sharing)
    train_policy(plain)
    widths = small_machine(monkeypatch, Update, "accumulate", times=0)
    decoded, done = short_decoding(monkeypatch, 8), []
    monkeypatch.setattr(memory, "_side_by_side", lambda *args: done.append((len(decoded), len(widths))) or 8)
    train_policy(tried, display=display)
    assert done[0] == (0, 0) and done[1][0] >= 6, "answers come first, as in an update"
    assert widths[0][0] == 4 and widths[0][1] >= max(width for _, width in widths[1:])
    (told,) = [text for text in display.said if "dry step" in text]
    assert told.startswith(f"dry step: {widths[0][0]} answers of {widths[0][1]} tokens fit into memory")
    assert reproducible(tried.output_dir) == reproducible(plain.output_dir)
    assert_same_weights(weights(tried.output_dir), weights(plain.output_dir))


@pytest.mark.parametrize(("micro", "fits", "count"), [(4, 4, [1]), (2, 4, [2]), (4, 2, [1, 2]), (4, 1, [1, 2, 2])])
def test_the_dry_step_has_room_for_gradients_where_a_mini_batch_has_several_parts(
    tmp_path, monkeypatch, micro, fits, count
):
    """The second part of a mini-batch needs what the first does, and the gradients of the first. Answers are decoded
    once, however often micro-batches are halved."""
    small_machine(monkeypatch, Update, "accumulate", fits=fits)
    wrapped, tried, decoded = Update.add_gradients, [], []
    monkeypatch.setattr(Update, "add_gradients", lambda *args: [tried.append(len(args[2])), wrapped(*args)][1])
    of_decoding = memory._decode_longest
    monkeypatch.setattr(memory, "_decode_longest", lambda *args: [decoded.append(1), of_decoding(*args)][1])
    train_policy(run(tmp_path, "out", train__dry_step=True, train__micro_batch_size=micro, value__kind="head"))
    assert tried[: len(count)] == count and decoded == [1]


def test_the_dry_step_shows_the_longest_demonstration(tmp_path, monkeypatch):
    """Wherever in the data it is: the first mini-batch need not draw it."""
    rows = [{"prompt": "the cat", "completion": "runs"}] * 20
    rows.append({"prompt": "the cat", "completion": " ".join(["it is a good day and the sun is red"] * 4)})
    file = tmp_path / "ptx.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shown = {"ppo__ptx_coef": 0.5, "data__ptx": str(file), "ppo__num_ppo_epochs": 1}
    plain, tried = (run(tmp_path, str(dry), train__dry_step=dry, **shown) for dry in (False, True))
    train_policy(plain)
    widths = small_machine(monkeypatch, Update, "imitate", times=0)
    train_policy(tried)
    longest = load_data(tried).demonstrations[-1].num_tokens
    dry, trained = widths[: tried.mini_batch_size // 4], widths[tried.mini_batch_size // 4 :]
    assert dry and all(width == longest > 40 for _, width in dry)
    assert trained and max(width for _, width in trained) < longest
    assert reproducible(tried.output_dir) == reproducible(plain.output_dir)


def test_a_demonstration_that_does_not_fit_is_found_by_the_dry_step(tmp_path, monkeypatch):
    file = tmp_path / "ptx.jsonl"
    file.write_text(json.dumps({"prompt": "the cat", "completion": "runs and runs"}) + "\n", encoding="utf-8")
    config, display = run(tmp_path, "tried", train__dry_step=True, ppo__ptx_coef=0.5, data__ptx=str(file)), Heard()
    widths = small_machine(monkeypatch, Update, "imitate", fits=2)
    train_policy(config, display=display)
    assert any("micro-batches are halved from now on, to at most 2 answers" in text for text in display.said)
    assert [rows for rows, _ in widths][:2] == [4, 2] and all(rows <= 2 for rows, _ in widths[1:])
