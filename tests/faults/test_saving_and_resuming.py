"""Class E of the fault list: saving, loading, going on.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

from tests.train.runs import tiny_run
from tests.train.test_run import CrashAfter, assert_same_weights, reproducible, weights
from tether.config.load import dump_config
from tether.errors import CheckpointError
from tether.metrics.writers import read_jsonl
from tether.train.display import NullDisplay
from tether.train.run import train_policy


def run(folder, name="out", **changes):
    return tiny_run(folder, output_dir=str(folder / name), **changes)


def evaluated(folder, **changes):
    return {"data__eval_prompts": str(folder / "prompts.jsonl"), **changes}


def checkpoints(out):
    return sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))


class StopIn(NullDisplay):
    """Sends SIGTERM in the middle of the ``nth`` time that a phase runs."""

    def __init__(self, phase, nth):
        self.wanted, self.left = phase, nth

    def phase(self, name, done, total):
        if name == self.wanted and done == 1:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("nth", [1, 2, 3], ids=["first evaluation", "middle", "last evaluation"])
def test_58_evaluation_that_was_interrupted_is_made_after_all(tmp_path, nth):
    changes = evaluated(tmp_path, train__max_steps=4, train__eval_steps=2)
    straight, stopped = run(tmp_path, "straight", **changes), run(tmp_path, "stopped", **changes)
    train_policy(straight)
    assert train_policy(stopped, display=StopIn("evaluation", nth)).interrupted == "SIGTERM"
    train_policy(run(tmp_path, "stopped", resume=True, **changes))
    assert reproducible(stopped.output_dir) == reproducible(straight.output_dir)
    samples = [read_jsonl(config.output_dir / "samples.jsonl") for config in (straight, stopped)]
    assert samples[0] == samples[1]


class Impatient(TrainerCallback):
    """Sends SIGTERM after the first update, and again while the state is saved."""

    def on_step_end(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


def test_58_a_second_sigterm_does_not_take_the_state_away(tmp_path):
    straight, stopped = (run(tmp_path, name, train__max_steps=2) for name in ("straight", "stopped"))
    train_policy(straight)
    assert train_policy(stopped, callbacks=[Impatient()]).interrupted == "SIGTERM"
    assert checkpoints(stopped.output_dir) == [1]
    train_policy(run(tmp_path, "stopped", resume=True, train__max_steps=2))
    assert reproducible(stopped.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(stopped.output_dir), weights(straight.output_dir))


@pytest.mark.parametrize("step", [0, 4], ids=["best at the start", "finished"])
def test_58_nothing_is_evaluated_twice(tmp_path, step):
    changes = evaluated(tmp_path, train__max_steps=4, train__save_steps=4)
    if step == 0:  # no later evaluation is better: checkpoint-0 is the best one
        changes |= {"train__metric_for_best_model": "eval_kl", "train__save_steps": None}
    config = run(tmp_path, **changes)
    callbacks = [CrashAfter(1)] if step == 0 else []
    try:
        train_policy(config, callbacks=callbacks)
    except OSError:
        assert checkpoints(config.output_dir) == [0]
    train_policy(run(tmp_path, resume=True, **changes))
    evaluations = [row["step"] for row in reproducible(config.output_dir) if "eval_scores" in row]
    assert evaluations == [0, 4]


def test_59_going_on_from_an_earlier_checkpoint_replaces_the_later_ones(tmp_path):
    changes = {"train__max_steps": 6, "train__save_steps": 2}
    config = run(tmp_path, **changes)
    train_policy(config)
    expected, trained = reproducible(config.output_dir), weights(config.output_dir)
    with pytest.raises(OSError, match="went away"):
        train_policy(
            run(tmp_path, resume=str(config.output_dir / "checkpoint-2"), **changes), callbacks=[CrashAfter(3)]
        )
    assert checkpoints(config.output_dir) == [2]
    again = train_policy(run(tmp_path, resume=True, train__save_total_limit=1, **changes))
    assert [row["step"] for row in again.updates] == [3, 4, 5, 6]
    assert reproducible(config.output_dir) == expected
    assert_same_weights(weights(config.output_dir), trained)
    assert checkpoints(config.output_dir) == [6]


def test_59_best_checkpoint_that_is_not_there_is_forgotten(tmp_path):
    changes = evaluated(
        tmp_path, train__max_steps=4, train__eval_steps=1, train__save_steps=1, sampling__stop_token=None,
        train__metric_for_best_model="eval_length", train__load_best_model_at_end=True,
    )  # fmt: skip
    first = run(tmp_path, "first", **changes)
    train_policy(first)  # all answers have one length: the first evaluation is the best
    moved = run(tmp_path, "moved", resume=str(first.output_dir / "checkpoint-2"), **changes)
    train_policy(moved)
    assert_same_weights(weights(moved.output_dir), weights(moved.output_dir / "checkpoint-3"))


def test_59_best_of_another_metric_is_forgotten(tmp_path):
    changes = evaluated(tmp_path, train__eval_steps=1, train__save_steps=1)
    config = run(tmp_path, train__metric_for_best_model="eval_length", **changes)
    train_policy(config)
    changes |= {"train__max_steps": 4, "train__metric_for_best_model": "eval_rewards/letters"}
    result = train_policy(run(tmp_path, resume=True, **changes))
    best = max(result.evaluations, key=lambda row: row["eval_rewards/letters"])
    state = json.loads((config.output_dir / "checkpoint-4" / "tether_state" / "state.json").read_text())
    assert (state["best_metric"], state["best_step"]) == (best["eval_rewards/letters"], best["step"])


@pytest.mark.parametrize("order", [({"r": 2}, None), (None, {"r": 2})], ids=["LoRA, then full", "full, then LoRA"])
def test_54_run_that_replaces_another_leaves_nothing_of_its_policy(tmp_path, order):
    for lora in order:
        config = run(tmp_path, model__lora=lora, overwrite_output_dir=True)
        train_policy(config)
    names = {path.name for path in config.output_dir.iterdir()}
    assert ("adapter_config.json" in names, "model.safetensors" in names) == ((True, False) if lora else (False, True))


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "LoRA"])
@pytest.mark.parametrize("value", ["head", "model"])
def test_54_56_every_saved_folder_is_the_policy_alone(tmp_path, lora, value):
    config = run(tmp_path, model__lora=lora, value__kind=value, train__save_steps=1)
    train_policy(config)
    start = weights(tmp_path / "llama-tied")
    for folder in (config.output_dir, *config.output_dir.glob("checkpoint-*")):
        keys = weights(folder).keys()
        assert not [key for key in keys if any(word in key for word in ("value", "v_head", "score", "pretrained"))]
        assert keys == start.keys() if lora is None else all("lora_" in key for key in keys)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # row 55
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "cat"}], tokenize=False)
        assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


KILLED = """
import os, signal, sys
import torch
from tether.config.load import load_config
from tether.models import saving
from tether.train import optim, run

torch.set_num_threads(1)
owner, name = {"update": (optim.PassOptimizer, "step"), "save": (saving, "_write_manifest")}[sys.argv[2]]
left, wrapped = int(sys.argv[3]), getattr(owner, name)

def killing(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped(*args)

setattr(owner, name, killing)
run.train_policy(load_config(sys.argv[1], sys.argv[4:]))
"""


def test_58_killed_in_an_update_and_in_a_save_it_goes_on_bitwise(tmp_path):
    changes = evaluated(tmp_path, train__max_steps=4, train__save_steps=2, train__eval_steps=1)
    straight, killed = run(tmp_path, "straight", **changes), run(tmp_path, "killed", **changes)
    train_policy(straight)
    (tmp_path / "killed.yaml").write_text(dump_config(killed), encoding="utf-8")
    # 2 epochs and 2 optimizers make 4 optimizer steps an update: the 11th is in the middle of the third
    for moment, nth, overrides in (("update", 11, []), ("save", 1, ["--resume=true"])):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed.yaml"), moment, str(nth), *overrides]
        assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
        assert checkpoints(killed.output_dir) == [2]
    train_policy(run(tmp_path, "killed", resume=True, **changes))
    assert reproducible(killed.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(killed.output_dir), weights(straight.output_dir))
    assert not [path for path in killed.output_dir.iterdir() if path.name.startswith(".")]


def test_58_checkpoint_without_its_critic_is_refused_by_name(tmp_path):
    train_policy(run(tmp_path, value__kind="model", train__save_steps=2))
    with pytest.raises(CheckpointError, match=r"value\.kind: was 'model', now 'head'"):
        train_policy(run(tmp_path, value__kind="head", train__save_steps=2, resume=True))
    (tmp_path / "out" / "checkpoint-2" / "tether_state" / "roles.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
        train_policy(run(tmp_path, value__kind="model", train__save_steps=2, resume=True))
