"""The folder of a run: what of an earlier one stays there until a new one trains, and what a start may go on from."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from tests.models.build import save_adapter
from tests.models.test_peft_methods import METHODS
from tests.models.test_peft_methods import saved as save_other_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.config.chat import with_now
from tether.config.load import load_config, parse_config
from tether.config.model import LoraConfig
from tether.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tether.inference.evaluate import evaluate_path
from tether.metrics.writers import read_jsonl
from tether.models import saving
from tether.models.checkpoints import list_checkpoints
from tether.models.saving import files_written, verify_manifest
from tether.report.html import REPORT
from tether.train import build
from tether.train.display import NullDisplay
from tether.train.folder import CONFIG, REPLACED
from tether.train.hub import model_files
from tether.train.inputs import resolved
from tether.train.plan import plan
from tether.train.run import train_policy
from tether.train.trainer import PPOTrainer


def no_model(*args, **kwargs):
    raise ModelError("model.path: cannot be loaded")


def steps(config):
    return [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")]


def test_an_earlier_run_stays_until_the_models_of_the_next_are_there(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, train__save_steps=1, value__save=True)
    train_policy(config)
    before = (config.output_dir / "config.yaml").read_bytes()
    monkeypatch.setattr(build, "build_roles", no_model)
    next_one = tiny_run(tmp_path, train__max_steps=1, train__seed=1, overwrite_output_dir=True)
    with pytest.raises(ModelError):
        train_policy(next_one)
    for folder in (config.output_dir, config.output_dir / "critic", *list_checkpoints(config.output_dir)):
        verify_manifest(folder)
    assert len(list_checkpoints(config.output_dir)) == 2 and steps(config) == [1, 2]
    assert (config.output_dir / "config.yaml").read_bytes() == before
    monkeypatch.undo()
    train_policy(next_one)
    assert list_checkpoints(config.output_dir) == [] and steps(config) == [1]
    assert not (config.output_dir / "critic").exists()


def test_a_start_that_was_killed_before_its_first_record_is_made_again(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=1)
    config.output_dir.mkdir()
    (config.output_dir / "metrics.jsonl").touch()
    train_policy(config)
    assert steps(config) == [1]


@pytest.mark.parametrize("place", ["build_roles", "answer"])
def test_a_start_that_failed_is_made_again_by_the_same_command(tmp_path, monkeypatch, place):
    """Before any model is there, and in the first update, whose answers are written down before it ends."""
    config = tiny_run(tmp_path)
    if place == "build_roles":
        monkeypatch.setattr(build, place, no_model)
    else:
        monkeypatch.setattr("tether.train.trainer.PPOTrainer.learn", no_model)
    with pytest.raises(ModelError):
        train_policy(config)
    assert (config.output_dir / "samples.jsonl").exists() == (place == "answer")
    monkeypatch.undo()
    train_policy(config)
    assert steps(config) == [1, 2]
    assert {row["step"] for row in read_jsonl(config.output_dir / "samples.jsonl")} == {1, 2}
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train_policy(config)


def test_the_saved_configuration_of_a_run_may_begin_another(tmp_path):
    """Neither resumed, like the run that wrote it, nor in place of an earlier one without being asked."""
    train_policy(tiny_run(tmp_path, train__max_steps=1, train__save_steps=1))
    saved = tmp_path / "out" / "config.yaml"
    for asked in ({"resume": True}, {"overwrite_output_dir": True}):
        train_policy(tiny_run(tmp_path, train__max_steps=2, train__save_steps=1, **asked))
        again = load_config(saved)
        assert (again.resume, again.overwrite_output_dir) == (False, False)
        with pytest.raises(ConfigError, match="--resume"):
            train_policy(again)
        anew = again.model_copy(update={"output_dir": tmp_path / f"after-{next(iter(asked))}"})
        assert len(train_policy(anew).updates) == 2


@pytest.mark.parametrize("method", ["LoRA", "IA3"])
def test_the_saved_configuration_of_a_run_that_continued_an_adapter_leaves_its_settings_to_it(tmp_path, method):
    base = save_tiny(tmp_path / "llama-tied")
    if method == "LoRA":
        start = save_adapter(tmp_path / "start", base, tokenizer=True, r=2)
    else:
        start = save_other_adapter(tmp_path / "start", base, METHODS[method])
    config = tiny_run(tmp_path, model__path=str(start), model__lora={}, train__max_steps=1)
    train_policy(config)
    again = load_config(config.output_dir / "config.yaml")
    assert again == resolved(with_now(config, again.data.chat_template_now))
    assert evaluate_path(config.output_dir, config.data.prompts).metrics["eval_length"] > 0
    assert parse_config(plan(again.model_copy(update={"overwrite_output_dir": True})).config).model.lora == LoraConfig()
    assert len(train_policy(again.model_copy(update={"output_dir": tmp_path / "next"})).updates) == 1


def test_resume_auto_goes_on_or_starts(tmp_path, monkeypatch):
    held_out = {"data__eval_prompts": str(tmp_path / "prompts.jsonl")}
    config = tiny_run(tmp_path, resume="auto", train__save_steps=1, **held_out)
    with monkeypatch.context() as patch:  # after the evaluation that comes before the first update
        patch.setattr("tether.train.trainer.PPOTrainer.rollout", no_model)
        with pytest.raises(ModelError):
            train_policy(config)
    assert steps(config) == [0]
    assert [row["step"] for row in train_policy(config).updates] == [1, 2]
    assert steps(config) == [0, 1, 2, 2]
    longer = tiny_run(tmp_path, resume="auto", train__save_steps=1, train__max_steps=3, **held_out)
    assert [row["step"] for row in train_policy(longer).updates] == [3]


def test_resume_auto_does_not_replace_updates(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.train.run.save_final", no_model)  # it ends before its end
    with pytest.raises(ModelError):
        train_policy(tiny_run(tmp_path))
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .* with --overwrite to replace"):
        train_policy(tiny_run(tmp_path, resume="auto"))
    assert steps(tiny_run(tmp_path)) == [1, 2]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Told(NullDisplay):
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def finished_run(folder, **changes):
    length = {} if {"train__total_episodes", "train__num_train_epochs"} & changes.keys() else {"train__max_steps": 3}
    return tiny_run(folder, resume="auto", **{"train__save_steps": 2, "value__save": True} | length | changes)


def test_resume_auto_leaves_a_finished_run_as_it_is(tmp_path, monkeypatch):
    """Also one that is told its length in another way, or saves elsewhere how often, as long as it ends the same."""
    config = finished_run(tmp_path)
    train_policy(config)
    assert "finished.json" in files_written(config.output_dir)
    assert "finished.json" not in model_files(config.output_dir)  # what is pushed
    before = files(config.output_dir)
    monkeypatch.setattr(PPOTrainer, "rollout", no_model)
    monkeypatch.setattr(build, "build_roles", no_model)
    by_prompts = {"train__num_train_epochs": 4.4}  # 22 answers to five prompts, in three batches of 8
    for same in (by_prompts, {}, {"train__total_episodes": 24}, {"train__save_steps": 1}, {"value__save": False}):
        if same is not by_prompts:
            monkeypatch.setattr("tether.train.folder.load_data", no_model)
        told = Told()
        assert train_policy(finished_run(tmp_path, **same), display=told).updates == []
        assert told.lines == [f"finished: {config.output_dir} holds the policy after the run's last update"]
        assert files(config.output_dir) == before


@pytest.mark.parametrize(
    "changes",
    [{"train__max_steps": 4}, {"train__metric_for_best_model": "eval_scores", "train__eval_steps": 3}],
    ids=["longer", "another choice of the best"],
)
def test_resume_auto_trains_on_what_is_to_end_otherwise(tmp_path, changes):
    held_out = {"data__eval_prompts": str(tmp_path / "prompts.jsonl")}
    train_policy(finished_run(tmp_path, **held_out))
    first = 3  # checkpoint-2 is the newest
    updates = train_policy(finished_run(tmp_path, **held_out, **changes)).updates
    assert [row["step"] for row in updates] == list(range(first, changes.get("train__max_steps", 3) + 1))


@pytest.mark.parametrize("damaged", ["model.safetensors", "critic/manifest.json", "finished.json"])
def test_resume_auto_trains_on_where_the_end_is_not_whole(tmp_path, damaged):
    config = finished_run(tmp_path)
    train_policy(config)
    before = files(config.output_dir)
    (config.output_dir / damaged).unlink()
    assert [row["step"] for row in train_policy(config).updates] == [3]
    path = config.output_dir / damaged
    assert path.read_bytes() == before[path]


def test_a_longer_run_whose_policy_was_not_written_is_not_finished(tmp_path, monkeypatch):
    """The folder holds the end of the shorter one, whole."""
    train_policy(finished_run(tmp_path))
    longer = finished_run(tmp_path, train__max_steps=4)
    with monkeypatch.context() as patch:
        patch.setattr("tether.train.run.save_final", no_model)
        with pytest.raises(ModelError):
            train_policy(longer)
    shorter = load_file(longer.output_dir / "model.safetensors")
    train_policy(longer)
    now = load_file(longer.output_dir / "model.safetensors")
    assert any(not torch.equal(now[name], shorter[name]) for name in shorter)


LEFT = (
    ".checkpoint-9.partial", ".checkpoint-1.replaced", ".save-trial.tmp.partial", ".final.tmp.partial",
    ".critic.partial", "save-trial.tmp", "final.tmp",
)  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite_output_dir": True}], ids=["new", "resume", "anew"])
def test_what_killed_processes_left_unfinished_is_removed(tmp_path, how):
    config = tiny_run(tmp_path, train__save_steps=1, **how)
    if how:
        train_policy(tiny_run(tmp_path, train__save_steps=1, train__max_steps=1))
    outside = tmp_path / "outside"
    for folder in (outside, *(config.output_dir / name for name in (*LEFT, ".mine.partial"))):
        folder.mkdir(parents=True)
        (folder / "half").write_text("x")
    (config.output_dir / ".checkpoint-8.partial").symlink_to(outside)
    train_policy(config)
    there = {path.name for path in config.output_dir.iterdir()}
    assert not there & {*LEFT, ".checkpoint-8.partial"}
    assert ".mine.partial" in there and (outside / "half").exists()


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite_output_dir": True}], ids=["new", "resume", "anew"])
def test_files_that_killed_processes_were_replacing_are_removed(tmp_path, how):
    config, out = tiny_run(tmp_path, train__save_steps=1, **how), tmp_path / "out"
    if how:
        train_policy(tiny_run(tmp_path, train__save_steps=1, train__max_steps=1))
    out.mkdir(exist_ok=True)
    left = {f".{name}.tmp" for name in (*REPLACED, CONFIG)} | {f".{REPORT}.a1b2c3"}
    for name in (*left, ".mine.json.tmp"):
        (out / name).write_text("half")
    train_policy(config)
    assert {path.name for path in out.glob(".*")} == {".mine.json.tmp"}
    assert ".mine.json.tmp" not in model_files(out) and steps(config) == [1, 2]


@pytest.mark.parametrize("name", ["logs", "critic", "base"])
def test_a_file_in_place_of_a_runs_own_folder_is_told(tmp_path, name):
    config = tiny_run(tmp_path)
    config.output_dir.mkdir()
    (config.output_dir / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"^output_dir: .*/{name} is a file, but a run writes a folder of this name"):
        train_policy(config)
    assert (config.output_dir / name).read_text() == "mine"


def test_a_checkpoint_that_was_being_replaced_is_no_litter(tmp_path):
    """The run is named by its checkpoint, so that nothing looked for the newest one before."""
    config = tiny_run(tmp_path, train__save_steps=1)
    train_policy(config)
    out = config.output_dir
    os.rename(out / "checkpoint-1", out / ".checkpoint-1.replaced")
    (out / ".checkpoint-1.partial").mkdir()
    longer = tiny_run(tmp_path, train__save_steps=1, train__max_steps=3, resume=str(out / "checkpoint-2"))
    train_policy(longer)
    assert [path.name for path in list_checkpoints(out)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_message_of_a_run_that_ends_does_not_wait_for_hashes(tmp_path, monkeypatch):
    """Launchers kill soon, and a large checkpoint takes minutes to read; a file that was cut shows without."""
    learn = PPOTrainer.learn

    def failing(self, answers, judged, metrics):
        if self.state.step < 2:
            return learn(self, answers, judged, metrics)
        monkeypatch.setattr(saving, "_sha256", lambda path: pytest.fail("a whole file was read"))
        cut = self.config.output_dir / "checkpoint-2" / "tether_state" / "optimizers.pt"
        cut.write_bytes(cut.read_bytes()[:100])
        raise TrainingError("too much was not finite")

    monkeypatch.setattr(PPOTrainer, "learn", failing)
    with pytest.raises(TrainingError) as caught:
        train_policy(tiny_run(tmp_path, train__save_steps=1, train__max_steps=3))
    assert "the last good checkpoint is" in caught.value.__notes__[0] and "checkpoint-1;" in caught.value.__notes__[0]
