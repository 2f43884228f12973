"""What a checkpoint holds, what becomes of one that is damaged, and what may change before a run goes on."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback

from tests.faults.test_bad_numbers import Heard
from tests.models.build import edit_json, save_adapter, save_model
from tests.train.runs import PROMPTS, tiny_run, write_prompts
from tests.train.test_run import NOT_REPRODUCIBLE, CrashAfter, assert_same_weights, ended, reproducible, weights
from tether.config.schema import TrainConfig
from tether.errors import CheckpointError, ConfigError
from tether.machine.claim import claimed
from tether.models import saving
from tether.models.paths import model_digest
from tether.train.checkpoint import RunState, find_checkpoint
from tether.train.engines.replicated import Alone
from tether.train.random_state import random_states, set_random_states
from tether.train.run import open_trainer, train_policy

SAVED = {"train__max_steps": 4, "train__save_steps": 1}
CHANCE = '''
import numpy, torch

def letters(prompts, completions):
    """A judge that gambles; not with Python's generator, which the type checker of these tests draws from too."""
    return [len(text) + numpy.random.normal() + torch.randn(()).item() for text in completions]
'''


class SignalAfter(TrainerCallback):
    """Ends the run by a signal between two updates."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "breaks", [CrashAfter(3), SignalAfter(3), SignalAfter(2)], ids=["crash", "signal", "signal before an evaluation"]
)
def test_the_generators_that_reward_functions_draw_from_go_on(tmp_path, breaks):
    runs, changes = [], {"train__max_steps": 4, "train__save_steps": 2, "data__eval_fraction": 0.5}
    for name, callbacks in {"straight": [], "broken": [breaks]}.items():
        config = tiny_run(tmp_path, output_dir=str(tmp_path / name), train__eval_steps=2, **changes)
        (tmp_path / "rewards.py").write_text(CHANCE, encoding="utf-8")
        try:
            has_ended = train_policy(config, callbacks=callbacks).interrupted is None
        except OSError:
            has_ended = False
        assert has_ended == (name == "straight")
        if not has_ended:
            train_policy(config.model_copy(update={"resume": True}))
        runs.append(config.output_dir)
    assert reproducible(runs[0]) == reproducible(runs[1])
    assert_same_weights(*map(weights, runs))


def test_every_generator_comes_back():
    def draws():
        return random.gauss(0, 1), random.random(), *numpy.random.normal(size=3), float(torch.randn(()))

    random.gauss(0, 1)  # leaves one of its two numbers behind
    numpy.random.normal()
    buffer = io.BytesIO()
    torch.save(random_states(), buffer)
    first = draws()
    assert draws() != first
    set_random_states(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert draws() == first


class Remembers(TrainerCallback):
    """Keeps the history that it is shown at the end."""

    def on_train_end(self, args, state, control, **kwargs):
        lasting = [name for name in state.log_history[-1] if not name.startswith(NOT_REPRODUCIBLE)]
        self.history = [{name: row.get(name) for name in ("step", *lasting)} for row in state.log_history]
        self.best = state.best_metric, state.best_global_step


def test_callbacks_go_on_with_what_they_remember(tmp_path):
    changes = {
        "train__max_steps": 9, "train__eval_steps": 1, "train__save_steps": 1, "train__learning_rate": 1e-12,
        "train__metric_for_best_model": "eval_scores", "data__eval_prompts": str(tmp_path / "prompts.jsonl"),
    }  # fmt: skip
    steps, seen = [], []
    for name, crash in (("straight", []), ("broken", [CrashAfter(3)])):
        config = tiny_run(tmp_path, output_dir=str(tmp_path / name), **changes)
        stopping, remembers = EarlyStoppingCallback(early_stopping_patience=4), Remembers()
        try:
            train_policy(config, callbacks=[stopping, *crash, remembers])
        except OSError:
            stopping, remembers = EarlyStoppingCallback(early_stopping_patience=4), Remembers()
            train_policy(config.model_copy(update={"resume": True}), callbacks=[stopping, remembers])
        steps.append([row["step"] for row in reproducible(config.output_dir) if "lr" in row])
        seen.append((remembers.history, remembers.best, stopping.early_stopping_patience_counter))
    assert steps[0] == steps[1] == [1, 2, 3, 4]
    assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a checkpoint after each of its updates."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_run(folder, value__kind="model", train__ema_decay=0.9, ppo__kl_target=0.5, **SAVED)
    train_policy(config)
    return folder, config


@pytest.fixture
def again(finished, tmp_path):
    """The finished run in a folder of its own, about to go on."""
    _, config = finished
    shutil.copytree(config.output_dir, tmp_path / "out")
    return config.model_copy(update={"output_dir": tmp_path / "out", "resume": True}), config.output_dir


def flip(file):
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "missing": os.remove,
    "cut short": cut,
    "changed": flip,
    "empty": lambda file: file.write_bytes(b""),
}
PIECES = ("state.json", "roles.safetensors", "optimizers.pt", "average.safetensors", "random.pt")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("piece", [*(f"tether_state/{name}" for name in PIECES), "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(again, piece, damage):
    config, straight = again
    checkpoint = config.output_dir / "checkpoint-4"
    DAMAGES[damage](checkpoint / piece)
    with pytest.raises(CheckpointError, match=piece):
        train_policy(config.model_copy(update={"resume": str(checkpoint)}))
    said = []
    assert find_checkpoint(config, tell=said.append) == config.output_dir / "checkpoint-3"
    (told,) = said
    assert "checkpoint-4" in told and piece in told and "trying the checkpoint before it" in told
    if (piece, damage) == ("tether_state/roles.safetensors", "changed"):  # the others go on in the same way
        assert [row["step"] for row in train_policy(config).updates] == [4]
        assert reproducible(config.output_dir) == reproducible(straight)
        assert_same_weights(weights(config.output_dir), weights(straight))


def rewritten(folder, name, change):
    """Changes a file of a checkpoint and lists it in the manifest as if it had been written so."""
    file, manifest = folder / name, folder / "manifest.json"
    listed = json.loads(manifest.read_text())
    if change is None:
        file.unlink()
        del listed["files"][name]
    else:
        file.write_bytes(change(file.read_bytes()))
        content = file.read_bytes()
        listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(listed))


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_that_was_never_written_is_named(again, piece):
    config, _ = again
    checkpoint = config.output_dir / "checkpoint-4"
    rewritten(checkpoint, f"tether_state/{piece}", None)
    named = r"is not a checkpoint of a run \(no {}" if piece == "state.json" else "has no {}"
    with pytest.raises(CheckpointError, match="checkpoint-4 " + named.format(f"tether_state/{piece}")):
        train_policy(config.model_copy(update={"resume": str(checkpoint)}))
    if piece != "average.safetensors":  # which only a run with an average needs
        said = []
        assert find_checkpoint(config, tell=said.append) == config.output_dir / "checkpoint-3"
        assert f"checkpoint-4 has no tether_state/{piece}" in said[0]


@pytest.mark.parametrize("files", [{}, None, [], {"config.json": {"bytes": "x"}}])
def test_a_manifest_that_vouches_for_nothing_is_no_manifest(again, files):
    config, _ = again
    (config.output_dir / "checkpoint-4" / "manifest.json").write_text(json.dumps({"files": files}))
    said = []
    assert find_checkpoint(config, tell=said.append) == config.output_dir / "checkpoint-3"
    assert "manifest" in said[0]


@pytest.mark.parametrize("piece", ["roles.safetensors", "average.safetensors"])
def test_weights_that_are_none_are_named(again, piece):
    config, _ = again
    rewritten(config.output_dir / "checkpoint-4", f"tether_state/{piece}", lambda content: b"\xff" * 100)
    with pytest.raises(CheckpointError, match=rf"{piece} cannot be read"):
        train_policy(config)


def test_a_checkpoint_that_was_being_replaced_is_put_back(again):
    config, straight = again
    checkpoint = config.output_dir / "checkpoint-4"
    checkpoint.rename(config.output_dir / ".checkpoint-4.replaced")
    with claimed(config.output_dir), pytest.raises(ConfigError, match="another run is writing"):
        find_checkpoint(config, tell=print)
    assert train_policy(config).updates == [] and checkpoint.is_dir()
    assert_same_weights(weights(config.output_dir), weights(straight))


def test_what_is_no_number_is_never_the_best():
    state = RunState(kl_coef=0.1)
    train = TrainConfig(max_steps=1, metric_for_best_model="eval_scores", greater_is_better=True)
    best = []
    for state.step, value in enumerate((math.nan, 1.0, math.nan, 2.0, 0.5)):
        state.note_evaluation({"eval_scores": value}, train)
        best.append((state.best_metric, state.best_step))
    assert best == [(None, None), (1.0, 1), (1.0, 1), (2.0, 3), (2.0, 3)]


class Damage(TrainerCallback):
    """Damages every checkpoint as the last update ends."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            for file in self.folder.glob("checkpoint-*/tether_state/roles.safetensors"):
                flip(file)


def test_where_the_best_checkpoint_is_damaged_at_the_end_the_last_policy_is_kept(tmp_path):
    config = tiny_run(
        tmp_path, data__eval_fraction=0.5, train__metric_for_best_model="eval_length", train__max_steps=3,
        train__eval_steps=1, train__load_best_model_at_end=True, sampling__stop_token=None,
    )  # fmt: skip
    display = Heard()
    result = train_policy(config, callbacks=[Damage(config.output_dir)], display=display)
    assert len(result.updates) == 3 and (config.output_dir / "model.safetensors").is_file()
    (told,) = [text for text in display.said if "instead of the best one" in text]
    assert "roles.safetensors is damaged" in told
    assert ended(config.output_dir) == {"step": 3, "kept_step": 3}


def test_a_state_of_another_version_is_named(again):
    config, _ = again

    def without(content):
        state = json.loads(content)
        del state["kl_coef"]
        return json.dumps(state).encode()

    rewritten(config.output_dir / "checkpoint-4", "tether_state/state.json", without)
    with pytest.raises(CheckpointError, match=r"state\.json: kl_coef is missing; .*another version"):
        train_policy(config)


CHANGED_DATA = {
    "a row more": lambda rows: [*rows, {"prompt": "you run"}],
    "another order": lambda rows: rows[::-1],
    "another text": lambda rows: [{"prompt": "a bird"}, *rows[1:]],
    "another column": lambda rows: [rows[0] | {"answer": 4}, *rows[1:]],
}


@pytest.mark.parametrize("change", CHANGED_DATA)
def test_a_dataset_that_changed_between_runs_is_noticed_before_a_model_loads(tmp_path, monkeypatch, change):
    config = tiny_run(tmp_path, train__save_steps=1)
    train_policy(config)
    rows = CHANGED_DATA[change]([{"prompt": text} for text in PROMPTS])
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("tether.train.build.build_parts", None)  # what would load models
    with pytest.raises(CheckpointError, match=r"resume: data\.prompts changed since .*checkpoint-2 was written"):
        train_policy(config.model_copy(update={"resume": True}))
    assert (config.output_dir / "checkpoint-2").is_dir()
    write_prompts(tmp_path / "prompts.jsonl")


def test_held_out_prompts_that_changed_are_noticed_too(tmp_path):
    config = tiny_run(tmp_path, train__save_steps=1, data__eval_prompts=str(tmp_path / "held.jsonl"))
    write_prompts(tmp_path / "held.jsonl", ["the dog"])
    train_policy(config)
    write_prompts(tmp_path / "held.jsonl", ["the cat"])
    with pytest.raises(CheckpointError, match=r"resume: held-out prompts changed since"):
        train_policy(config.model_copy(update={"resume": True}))


def move_weights(folder):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    model.save_pretrained(folder)


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "LoRA"])
def test_a_model_that_changed_between_runs_is_noticed_before_it_loads(tmp_path, monkeypatch, lora):
    """The reference, and the base of an adapter, are read from it again."""
    config = tiny_run(tmp_path, train__save_steps=1, train__max_steps=1, model__lora=lora)
    train_policy(config)
    move_weights(config.model.path)
    monkeypatch.setattr("tether.train.build.build_parts", None)  # what would load models
    with pytest.raises(CheckpointError, match=r"resume: model\.path changed since .*checkpoint-1 was written: weights"):
        train_policy(config.model_copy(update={"resume": True}))


@pytest.mark.parametrize("of_base", [False, True], ids=["adapter", "its base"])
def test_a_digest_of_a_model_is_of_its_weights_wherever_they_are(tmp_path, of_base):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    before = model_digest(str(adapter))
    (adapter / "README.md").write_text("a card is no weight")
    assert model_digest(str(adapter)) == before
    if of_base:
        move_weights(base)
    else:
        save_adapter(tmp_path / "adapter", base, seed=2)
    assert model_digest(str(adapter)) not in (before, None)
    assert model_digest("org/model") is None


def test_a_digest_of_a_model_does_not_depend_on_where_it_is(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    before = model_digest(str(adapter))
    base.rename(tmp_path / "elsewhere")
    moved = adapter.rename(tmp_path / "moved")
    edit_json(moved / "adapter_config.json", lambda config: config.update(base_model_name_or_path="org/model"))
    on_the_hub = model_digest(str(moved))
    edit_json(moved / "adapter_config.json", lambda config: config.update(base_model_name_or_path="org/other"))
    assert len({before, on_the_hub, model_digest(str(moved))}) == 3
    place = str(tmp_path / "elsewhere")
    edit_json(moved / "adapter_config.json", lambda config: config.update(base_model_name_or_path=place))
    assert model_digest(str(moved)) == before


@pytest.mark.parametrize(
    ("piece", "content"),
    [
        ("state.json", lambda state: {**state, "score_moments": "x"}),
        ("state.json", lambda state: {**state, "source_moments": [1]}),
        ("optimizers.pt", lambda states: {name: {"optimizer": {}} for name in states}),
        ("random.pt", lambda states: [{"python": 3}]),
    ],
    ids=["text for numbers", "a list for names", "another optimizer", "another generator"],
)
def test_a_state_of_another_shape_is_named_by_its_checkpoint(again, piece, content):
    config, _ = again

    def changed(old):
        if piece == "state.json":
            return json.dumps(content(json.loads(old))).encode()
        buffer = io.BytesIO()
        torch.save(content(torch.load(io.BytesIO(old), weights_only=True)), buffer)
        return buffer.getvalue()

    rewritten(config.output_dir / "checkpoint-4", f"tether_state/{piece}", changed)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 does not fit this run: \w+Error"):
        train_policy(config)


def test_it_is_said_what_differs_and_what_may(again):
    config, _ = again
    changed = config.model_copy(update={"ppo": config.ppo.model_copy(update={"lam": 0.5})})
    with pytest.raises(CheckpointError, match=r"ppo\.lam: was 0\.95, now 0\.5\n.*What may change: .*train\.max_steps"):
        train_policy(changed)
    more = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 5})})
    display = Heard()
    assert [row["step"] for row in train_policy(more, display=display).updates] == [5]
    assert "resuming with a change, train.max_steps: was 4, now 5" in display.said


def test_nothing_goes_before_what_stays_was_read_back(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, train__save_total_limit=1, **SAVED)
    write, written = saving._write_manifest, []

    def damaging(folder):
        write(folder)
        written.append(folder.name)
        if folder.name == ".checkpoint-2.partial":
            flip(folder / "tether_state" / "roles.safetensors")

    monkeypatch.setattr(saving, "_write_manifest", damaging)
    with pytest.raises(CheckpointError, match=r"roles\.safetensors is damaged"):
        train_policy(config)
    assert written == [".save-trial.tmp.partial", ".checkpoint-1.partial", ".checkpoint-2.partial"]
    monkeypatch.undo()
    result = train_policy(config.model_copy(update={"resume": True}))
    assert [row["step"] for row in result.updates] == [2, 3, 4]
    assert [path.name for path in config.output_dir.glob("checkpoint-*")] == ["checkpoint-4"]


def test_moments_are_mapped_while_they_are_taken_over_and_not_kept_so(again, monkeypatch):
    """Processes that keep a share of them do not each hold the whole. A file that stays mapped stays on the disk."""
    config, _ = again
    maps, seen = Path("/proc/self/maps"), []
    load = Alone.load_optimizer_state

    def loading(self, optimizer, state):
        seen.append("optimizers.pt" in maps.read_text())
        load(self, optimizer, state)

    monkeypatch.setattr(Alone, "load_optimizer_state", loading)
    before = (config.output_dir / "checkpoint-4" / "tether_state" / "optimizers.pt").read_bytes()
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 5})})
    with open_trainer(longer) as trainer:
        assert seen and all(seen) and "optimizers.pt" not in maps.read_text()
        trainer.fit()
    assert (config.output_dir / "checkpoint-4" / "tether_state" / "optimizers.pt").read_bytes() == before
