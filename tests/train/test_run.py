"""Whole runs on tiny models: what they train, what they leave behind, and how they go on."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import multiprocessing
import os
import signal
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from tests.tiny import KINDS
from tests.train.runs import PROMPTS, tiny_run
from tests.train.test_whole_step import trainer_for
from tether.errors import CheckpointError, ConfigError, RewardResponseError, TrainingError
from tether.generation.hf import HFGenerator
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.machine.distributed import Dist
from tether.metrics import trackers as module
from tether.metrics.writers import read_jsonl
from tether.models import saving
from tether.models.checkpoints import list_checkpoints
from tether.report.read import read_run
from tether.train import folder, optim, run
from tether.train.display import NullDisplay
from tether.train.interrupt import StopRequest
from tether.train.run import train_policy

TRL_METRICS = {
    "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
    "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg",
    "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode",
}  # fmt: skip
SHARINGS = {
    "full, critic model": {"value__kind": "model"},
    "full, head": {"value__kind": "head"},
    "LoRA, critic adapter": {"model__lora": {"r": 4}, "value__kind": "adapter"},
    "LoRA, critic model": {"model__lora": {"r": 4}, "value__kind": "model"},
    "LoRA, head": {"model__lora": {"r": 4}, "value__kind": "head"},
}
NOT_REPRODUCIBLE = ("time/", "speed/", "memory/", "eps")


def reproducible(folder):
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPRODUCIBLE)} for row in rows]


def weights(folder):
    name = "adapter_model.safetensors" if (folder / "adapter_model.safetensors").exists() else "model.safetensors"
    with safe_open(folder / name, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_and_sharing_trains_and_loads_in_plain_libraries(tmp_path, kind, tied, sharing):
    config = tiny_run(tmp_path, kind=kind, tied=tied, **SHARINGS[sharing])
    result = train_policy(config)
    assert [row["step"] for row in result.updates] == [1, 2]
    for row in result.updates:
        assert row.keys() >= TRL_METRICS
        assert row["val/first_ratio_error"] == 0.0
        assert all(math.isfinite(value) for value in row.values())
    assert result.updates[0]["objective/kl"] == 0.0 != result.updates[1]["objective/kl"]

    start = AutoModelForCausalLM.from_pretrained(config.model.path).eval()
    if config.model.lora:
        trained = AutoPeftModelForCausalLM.from_pretrained(config.output_dir).eval()
        assert all("lora_" in key for key in weights(config.output_dir))
    else:
        trained, info = AutoModelForCausalLM.from_pretrained(config.output_dir, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert weights(config.output_dir).keys() == weights(tmp_path / config.model.path).keys()
        assert trained.config.tie_word_embeddings == tied
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(config.model.path).chat_template
    ids = torch.tensor([tokenizer("the cat sees")["input_ids"]])
    with torch.no_grad():
        moved = (trained.eval()(ids).logits - start(ids).logits).abs().max()
    assert moved > 1e-4
    assert trained.generation_config.eos_token_id == start.generation_config.eos_token_id


def test_output_folder_has_what_was_promised(tmp_path):
    config = tiny_run(tmp_path, data__eval_prompts=str(tmp_path / "prompts.jsonl"), train__save_steps=1)
    result = train_policy(config)
    out = config.output_dir
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "model.safetensors", "config.json",
        "tokenizer.json", "chat_template.jinja", "generation_config.json", "checkpoint-1", "checkpoint-2",
    }  # fmt: skip
    assert not [name for name in names if name.startswith(".") or "tmp" in name]
    assert [row["step"] for row in result.evaluations] == [0, 2]
    assert ended(out) == {"step": 2, "kept_step": 2}
    samples = read_jsonl(out / "samples.jsonl")
    evaluated = [s for s in samples if s["split"] == "eval"]
    assert [s["step"] for s in evaluated] == [0] * len(PROMPTS) + [2] * len(PROMPTS)
    assert all(s["rewards"] == {"letters": pytest.approx(s["score"])} for s in samples)
    assert sorted(s["row"] for s in evaluated if s["step"] == 2) == list(range(len(PROMPTS)))
    AutoModelForCausalLM.from_pretrained(out / "checkpoint-1")
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")


RESUMED = {
    "full, critic model": {"value__kind": "model", "ppo__kl_target": 0.5},
    "full, head, bf16 autocast": {"value__kind": "head", "train__bf16": True},
    "full, critic model, fp16 autocast": {"value__kind": "model", "train__fp16": True},
    "LoRA, critic adapter, mini-batches": {"model__lora": {"r": 4}, "ppo__num_mini_batches": 2},
    "stop strings, no critic": {
        "sampling__stop_token": None, "sampling__stop_strings": ["at", "e r"], "ppo__missing_eos_penalty": 1.0,
        "sampling__num_generations": 2, "ppo__advantage_estimator": "rloo",
    },
}


class CrashAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise OSError("the machine went away")


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_run_is_bitwise_the_run_that_was_not_interrupted(tmp_path, monkeypatch, case):
    monkeypatch.setattr(optim, "STEPS_TO_GROW", 3)  # of the four steps before the checkpoint
    changes = RESUMED[case] | {"train__max_steps": 4, "data__eval_prompts": str(tmp_path / "prompts.jsonl")}
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    train_policy(straight)
    broken = tiny_run(tmp_path, output_dir=str(tmp_path / "broken"), train__save_steps=2, **changes)
    with pytest.raises(OSError, match="went away"):
        train_policy(broken, callbacks=[CrashAfter(3)])
    assert [row["step"] for row in reproducible(broken.output_dir)] == [0, 1, 2, 3]
    resumed = tiny_run(tmp_path, output_dir=str(tmp_path / "broken"), train__save_steps=2, resume=True, **changes)
    assert [row["step"] for row in train_policy(resumed).updates] == [3, 4]
    assert reproducible(resumed.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(resumed.output_dir), weights(straight.output_dir))


def ended(out):
    """finished.json, without what the run read."""
    end = json.loads((out / "finished.json").read_text())
    assert end.pop("data").keys() >= {"model.path", "data.prompts", "the file of rewards.0.path"}
    return end


class Signal(TrainerCallback):
    def __init__(self, number, step):
        self.number, self.step = number, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_run_with_its_state_saved(tmp_path, number, capfd):
    changes = {"train__max_steps": 4}
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    train_policy(straight)
    stopped = tiny_run(tmp_path, output_dir=str(tmp_path / "stopped"), **changes)
    before = signal.getsignal(number)
    result = train_policy(stopped, callbacks=[Signal(number, 2)])
    assert result.interrupted == signal.Signals(number).name
    told = f"\n{result.interrupted}: stopping at the next safe point. Ctrl-C now would end at once"
    assert capfd.readouterr().err.count(told) == 1, "an update may take minutes"
    assert signal.getsignal(number) == before
    assert not (stopped.output_dir / "model.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(stopped.output_dir / "checkpoint-2")
    result = train_policy(tiny_run(tmp_path, output_dir=str(tmp_path / "stopped"), resume=True, **changes))
    assert result.interrupted is None
    assert reproducible(stopped.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(stopped.output_dir), weights(straight.output_dir))


def test_a_checkpoint_past_the_last_update_is_told(tmp_path):
    train_policy(tiny_run(tmp_path, train__max_steps=3, train__save_steps=3))
    said, display = [], NullDisplay()
    display.message = said.append
    assert train_policy(tiny_run(tmp_path, train__max_steps=2, resume=True), display=display).updates == []
    assert "nothing is left to train: the configuration asks for 2 updates" in said


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_terminal_that_goes_away_stops_a_run_but_under_nohup(under_nohup):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            if not under_nohup:
                assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked() == (None if under_nohup else "SIGHUP")
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_somebody_else_waits_for_stays_theirs():
    faulthandler.register(signal.SIGUSR1)  # a handler that Python knows nothing of
    try:
        with StopRequest():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    with StopRequest():
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_process_that_is_forked_meanwhile_ends_when_its_pool_ends_it(is_waiting):
    context = multiprocessing.get_context("fork")
    with StopRequest() as stop, stop.at_once() if is_waiting else nullcontext():
        ours, theirs = context.Pipe()
        child = context.Process(target=lambda: (theirs.send("here"), theirs.recv()), daemon=True)
        child.start()
        assert ours.recv() == "here"
        child.terminate()
        child.join(30)
        code = child.exitcode
        child.kill()
        assert code == -signal.SIGTERM and stop.asked() is None


def test_time_limit_ends_the_run_with_its_state_saved(tmp_path):
    result = train_policy(tiny_run(tmp_path, train__max_runtime=1e-9))
    assert result.interrupted == "max_runtime of 1e-09 h"
    assert (result.output_dir / "checkpoint-0" / "manifest.json").exists()


def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=3, train__save_steps=1)
    train_policy(config)
    expected = reproducible(config.output_dir)
    state = config.output_dir / "checkpoint-3" / "tether_state" / "roles.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    result = train_policy(tiny_run(tmp_path, train__max_steps=3, train__save_steps=1, resume=True))
    assert [row["step"] for row in result.updates] == [3]
    assert reproducible(config.output_dir) == expected


def test_resuming_with_another_configuration_names_the_keys(tmp_path):
    train_policy(tiny_run(tmp_path, train__save_steps=1))
    with pytest.raises(CheckpointError, match=r"ppo\.kl_coef: was 0\.05, now 0\.5"):
        train_policy(tiny_run(tmp_path, train__save_steps=1, resume=True, ppo__kl_coef=0.5))
    more = train_policy(tiny_run(tmp_path, train__save_steps=1, resume=True, train__max_steps=3))
    assert [row["step"] for row in more.updates] == [3]


def test_resuming_nothing_is_a_mistake(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train_policy(tiny_run(tmp_path, resume=True))


def test_earlier_run_is_not_written_over(tmp_path):
    config = tiny_run(tmp_path, train__save_steps=1)
    train_policy(config)
    first = weights(config.output_dir)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train_policy(config)
    assert_same_weights(weights(config.output_dir), first)
    train_policy(tiny_run(tmp_path, train__max_steps=1, train__seed=1, overwrite_output_dir=True))
    assert [row["step"] for row in reproducible(config.output_dir)] == [1]
    assert not (config.output_dir / "checkpoint-2").exists()


def test_save_total_limit_keeps_the_newest_and_the_best(tmp_path):
    config = tiny_run(
        tmp_path, train__max_steps=4, train__save_steps=1, train__save_total_limit=1, train__eval_steps=1,
        train__metric_for_best_model="eval_length", train__greater_is_better=False,
        train__load_best_model_at_end=True, data__eval_prompts=str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip
    result = train_policy(config)
    best = min(result.evaluations, key=lambda row: row["eval_length"])["step"]
    assert ended(config.output_dir) == {"step": 4, "kept_step": best}
    assert {p.name for p in config.output_dir.glob("checkpoint-*")} == {"checkpoint-4", f"checkpoint-{best}"}
    assert_same_weights(weights(config.output_dir), weights(config.output_dir / f"checkpoint-{best}"))


def test_evaluation_leaves_training_as_it_was(tmp_path):
    plain = tiny_run(tmp_path, output_dir=str(tmp_path / "plain"), train__max_steps=3)
    evaluated = tiny_run(
        tmp_path, output_dir=str(tmp_path / "evaluated"), train__max_steps=3, train__eval_steps=1,
        data__eval_prompts=str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip
    first, second = train_policy(plain), train_policy(evaluated)
    assert len(second.evaluations) == 4
    assert [r for r in reproducible(evaluated.output_dir) if "lr" in r] == reproducible(plain.output_dir)
    assert_same_weights(weights(first.output_dir), weights(second.output_dir))


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_micro_batch_size_changes_nothing(tmp_path, micro):
    common = {"train__learning_rate": 1e-3, "ppo__num_ppo_epochs": 1, "train__max_steps": 1}
    one = train_policy(tiny_run(tmp_path, output_dir=str(tmp_path / "4"), train__micro_batch_size=4, **common))
    other = train_policy(tiny_run(tmp_path, output_dir=str(tmp_path / "n"), train__micro_batch_size=micro, **common))
    start = weights(tmp_path / "llama-tied")
    expected, got = weights(one.output_dir), weights(other.output_dir)
    assert max(float((expected[k] - start[k]).abs().max()) for k in start) > 5e-4
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], atol=1e-6, rtol=0)
    for name in ("objective/scores", "objective/kl", "loss/policy_avg", "loss/value_avg", "policy/entropy_avg"):
        assert got is not None and abs(one.updates[0][name] - other.updates[0][name]) < 1e-5, name


def test_every_prompt_is_seen_each_epoch_and_few_prompts_are_cycled(tmp_path):
    said = []

    class Listener:
        def message(self, text):
            said.append(text)

        def phase(self, name, done, total): ...
        def update(self, step, total, metrics): ...
        def samples(self, rows): ...
        def table(self, title, columns, rows): ...
        def close(self): ...

    result = train_policy(tiny_run(tmp_path, train__num_train_epochs=3, train__log_samples=8), display=Listener())
    assert len(result.updates) == math.ceil(3 * len(PROMPTS) / 8)
    rows = [s["row"] for s in read_jsonl(result.output_dir / "samples.jsonl")]
    for epoch in range(3):
        assert sorted(rows[epoch * 5 : epoch * 5 + 5]) == list(range(5))
    assert any("5 prompts, fewer than the 8 of an update" in text for text in said)
    assert any("2 updates of 8 answers = 16 episodes" in text for text in said)


def test_bad_reward_never_reaches_the_optimizer(tmp_path):
    config = tiny_run(tmp_path)
    nan = "def letters(prompts, completions):\n    return [float('nan')] * len(prompts)\n"
    (tmp_path / "rewards.py").write_text(nan, encoding="utf-8")
    with pytest.raises(RewardResponseError, match="letters"):
        train_policy(config)
    assert not (config.output_dir / "model.safetensors").exists()
    assert not (config.output_dir / "metrics.jsonl").exists()


def test_value_that_is_not_finite_stops_the_run_and_is_written_down(tmp_path):
    trainer = trainer_for(tiny_run(tmp_path, value__kind="model", train__max_bad_batches=0), tmp_path)
    with torch.no_grad():
        trainer.roles.role("value").head.weight[0, 3] = float("nan")
    before = {name: p.detach().clone() for name, p in trainer.roles.role("policy").trained.items()}
    with pytest.raises(TrainingError, match=r"values is not finite .* no optimizer step"):
        trainer.step()
    (written,) = read_jsonl(trainer.config.output_dir / "bad_batches.jsonl")
    assert (written["step"], written["what"]) == (1, "values is not finite")
    assert all(rollout["query"] and rollout["response_ids"] for rollout in written["rollouts"])
    for name, p in trainer.roles.role("policy").trained.items():
        assert torch.equal(p, before[name]), name


def test_callbacks_stop_save_and_are_told_everything(tmp_path):
    class Recorder(TrainerCallback):
        def __init__(self):
            self.events = []

        def on_train_begin(self, args, state, control, model, processing_class, **kwargs):
            assert model is not None and processing_class is not None and state.max_steps == 5
            self.events.append("train_begin")

        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 1
            control.should_training_stop = state.global_step == 2
            self.events.append("step_end")
            return control

        def on_log(self, args, state, control, logs, **kwargs):
            self.events.append(("log", sorted(logs.keys() & {"lr", "eval_scores"})))

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.events.append(("evaluate", "eval_scores" in metrics))

        def on_save(self, args, state, control, **kwargs):
            self.events.append("save")

        def on_train_end(self, args, state, control, **kwargs):
            self.events.append("train_end")

    recorder = Recorder()
    config = tiny_run(tmp_path, train__max_steps=5, data__eval_prompts=str(tmp_path / "prompts.jsonl"))
    result = train_policy(config, callbacks=[recorder])
    assert recorder.events == [
        "train_begin", ("log", ["eval_scores"]), ("evaluate", True), "step_end", ("log", ["lr"]), "save", "step_end",
        ("log", ["lr"]), ("log", ["eval_scores"]), ("evaluate", True), "train_end",
    ]  # fmt: skip
    assert len(result.updates) == 2 and result.interrupted is None


def test_the_last_update_is_told_where_trackers_have_it(tmp_path):
    told = []

    class Steps(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            told.append(state.global_step)

    train_policy(tiny_run(tmp_path, train__max_steps=5, train__logging_steps=2), callbacks=[Steps()])
    assert told == [2, 4, 5]


@pytest.mark.parametrize("loads", [True, False])
def test_callbacks_know_the_best_checkpoint(tmp_path, caplog, loads):
    """Also those of a run that goes on; and early stopping warns where it is not loaded in the end, and only there."""

    class Best(TrainerCallback):
        def __init__(self):
            self.begun, self.saved = None, []

        def on_train_begin(self, args, state, control, **kwargs):
            self.begun = state.best_model_checkpoint
            assert args.load_best_model_at_end == loads

        def on_save(self, args, state, control, **kwargs):
            self.saved.append(state.best_model_checkpoint)

    changes = {
        "train__eval_steps": 1, "train__save_steps": 1, "train__learning_rate": 1e-12, "train__load_best_model_at_end":
        loads, "train__metric_for_best_model": "eval_scores", "data__eval_prompts": str(tmp_path / "prompts.jsonl"),
    }  # fmt: skip
    best, stopping = Best(), EarlyStoppingCallback(early_stopping_patience=9)
    with caplog.at_level("WARNING", "transformers"), propagated("transformers"):
        train_policy(tiny_run(tmp_path, **changes), callbacks=[best, stopping])
    assert any("load_best_model_at_end" in record.message for record in caplog.records) == (not loads)
    first = str(tmp_path / "out" / "checkpoint-0")
    assert best.begun is None and best.saved == [first] * 3
    again = Best()
    train_policy(tiny_run(tmp_path, **changes | {"train__max_steps": 3, "resume": True}), callbacks=[again])
    assert again.begun == first


@contextmanager
def propagated(name):
    """Inside, what a logger says reaches those above it."""
    logger = logging.getLogger(name)
    before, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = before


def test_early_stopping_of_transformers_works(tmp_path):
    config = tiny_run(
        tmp_path, train__max_steps=6, train__eval_steps=1, train__save_steps=1, train__learning_rate=1e-12,
        train__metric_for_best_model="eval_scores", train__load_best_model_at_end=True,
        data__eval_prompts=str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip
    result = train_policy(config, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
    assert [row["step"] for row in result.updates] == [1, 2]
    assert ended(config.output_dir) == {"step": 2, "kept_step": 0}
    assert "2 of 6" in result.report.read_text() and "still running" not in result.report.read_text()
    assert "first one, whose policy was kept" in (config.output_dir / "README.md").read_text()


def test_a_run_that_goes_on_has_not_come_to_its_end(tmp_path):
    train_policy(tiny_run(tmp_path, train__save_steps=1))
    assert (read_run(tmp_path / "out").finished_step, read_run(tmp_path / "out").kept_step) == (2, 2)
    with run.open_trainer(tiny_run(tmp_path, train__save_steps=1, train__max_steps=3, resume=True)):
        assert (read_run(tmp_path / "out").finished_step, read_run(tmp_path / "out").kept_step) == (None, None)


def test_missing_eos_rules_are_judged_on_the_answer_alone(tmp_path):
    for rule, expected in ({"missing_eos_penalty": 2.0}, -2.0), ({"missing_eos_score": -7.0}, -7.0):
        changes = {f"ppo__{name}": value for name, value in rule.items()}
        config = tiny_run(
            tmp_path, train__max_steps=1, train__log_samples=8, overwrite_output_dir=True, **changes
        )  # fmt: skip
        result = train_policy(config)
        for s in read_jsonl(result.output_dir / "samples.jsonl"):
            own = s["rewards"]["letters"]
            replaced = expected if "missing_eos_score" in rule else own + expected
            assert s["score"] == pytest.approx(own if s["finish_reason"] == "stop" else replaced)
            assert "<eos>" in s["query"], "the template writes end tokens into the prompt, which do not count"


def test_saved_run_is_evaluated_and_answers(tmp_path):
    for sharing in ("full, critic model", "LoRA, critic adapter"):
        config = tiny_run(
            tmp_path, output_dir=str(tmp_path / sharing.replace(", ", "-")), train__max_steps=3,
            data__eval_prompts=str(tmp_path / "prompts.jsonl"), **SHARINGS[sharing],
        )  # fmt: skip
        last = train_policy(config).evaluations[-1]
        again = evaluate_path(config.output_dir, output=config.output_dir / "again.jsonl")
        assert {k: v for k, v in last.items() if k != "step"} == pytest.approx(again.metrics, abs=1e-5)
        assert read_jsonl(config.output_dir / "again.jsonl") == json.loads(json.dumps(again.samples))
        rows = generate_path(str(config.output_dir), config.data.prompts, temperature=0.0)
        assert [row["prompt"] for row in rows] == list(PROMPTS)
        with pytest.raises(ConfigError, match="exists"):
            evaluate_path(config.output_dir, output=config.output_dir / "again.jsonl")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_answers_that_are_there_are_kept_when_the_rest_fails(tmp_path, monkeypatch, error):
    class Failing(HFGenerator):
        def generate(self, requests, sampling):
            answers = list(super().generate(requests, sampling))
            yield from sorted(answers, key=lambda answer: -answer[0])[:3]
            raise error

    config = tiny_run(tmp_path)
    whole = generate_path(config.model.path, config.data.prompts, response_length=4)
    monkeypatch.setattr("tether.inference.generate.HFGenerator", Failing)
    with pytest.raises(error):
        generate_path(config.model.path, config.data.prompts, response_length=4, output=tmp_path / "some.jsonl")
    assert read_jsonl(tmp_path / "some.jsonl") == whole[-3:]
    monkeypatch.setattr(Failing, "generate", Mock(side_effect=error))
    with pytest.raises(error):
        generate_path(config.model.path, config.data.prompts, response_length=4, output=tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_run_that_trusts_code_is_evaluated_with_it(tmp_path, monkeypatch):
    prompts = str(tmp_path / "prompts.jsonl")
    config = tiny_run(tmp_path, model__trust_remote_code=True, train__max_steps=1, data__eval_prompts=prompts)
    train_policy(config)
    load = Mock(side_effect=saving.load_causal_lm)
    monkeypatch.setattr(saving, "load_causal_lm", load)
    evaluate_path(config.output_dir)
    assert [call.kwargs["trust_remote_code"] for call in load.call_args_list] == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_policy_is_written_takes_nothing_away(tmp_path, monkeypatch, number):
    config, save = tiny_run(tmp_path, train__max_steps=1), folder.save_policy

    def saved(*args, **options):
        os.kill(os.getpid(), number)
        return save(*args, **options)

    monkeypatch.setattr(folder, "save_policy", saved)
    before = signal.getsignal(number)
    result = train_policy(config)
    assert result.interrupted is None and signal.getsignal(number) == before
    AutoModelForCausalLM.from_pretrained(config.output_dir)


def test_a_run_from_a_checkpoint_elsewhere_keeps_nothing_of_the_run_it_replaces(tmp_path):
    first = tiny_run(tmp_path, output_dir=str(tmp_path / "first"), train__save_steps=1)
    train_policy(first)
    there = tiny_run(tmp_path, output_dir=str(tmp_path / "there"), train__save_steps=1, train__seed=5)
    train_policy(there)
    changes = {"output_dir": str(there.output_dir), "overwrite_output_dir": True, "train__save_steps": None}
    result = train_policy(tiny_run(tmp_path, resume=str(first.output_dir / "checkpoint-1"), **changes))
    assert list_checkpoints(there.output_dir) == []
    assert [row["step"] for row in read_jsonl(there.output_dir / "metrics.jsonl") if "objective/scores" in row] == [2]
    assert_same_weights(weights(there.output_dir), weights(first.output_dir))
    assert result.interrupted is None


def test_trackers_are_told_no_keys(tmp_path, monkeypatch):
    trackers = Mock(side_effect=module.Trackers)
    monkeypatch.setattr(module, "Trackers", trackers)
    judge = {"type": "http", "url": "https://host/score?key=SECRET", "protocol": "tether"}
    config = tiny_run(tmp_path, rewards=[judge])
    config.output_dir.mkdir()
    run.open_log(config, NullDisplay(), Dist()).close()
    told = str(trackers.call_args.kwargs["config"])
    assert "host/score" in told and "SECRET" not in told
