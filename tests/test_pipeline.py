"""``tether pipeline``: three stages from one file, on tiny models."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny
from tether.cli.main import main
from tether.config.load import dump_config
from tether.config.pipeline import load_pipeline
from tether.errors import ConfigError, DataError, ModelError
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.models.paths import is_adapter, own_weights
from tether.pipeline import _state, run_pipeline
from tether.stages import training
from tether.train.display import NullDisplay
from tether.train.inputs import resolved

PIPELINE = """
model: {{path: {folder}/model, lora: {{r: 2}}}}
output_dir: {folder}/out
seed: 3
sft:
  data: {{demonstrations: {folder}/pairs.jsonl, eval_fraction: 0.2}}
  train: {{max_steps: 3, batch_size: 2, micro_batch_size: 2, learning_rate: 1.0e-2}}
reward:
  data: {{pairs: {folder}/pairs.jsonl, eval_fraction: 0.25}}
  train: {{max_steps: 3, batch_size: 2, micro_batch_size: 2, learning_rate: 1.0e-2}}
ppo:
  data: {{prompts: {folder}/pairs.jsonl, eval_fraction: 0.2}}
  sampling: {{response_length: 5}}
  train: {{max_steps: 3, rollout_batch_size: 4, micro_batch_size: 2, save_steps: 1, learning_rate: 1.0e-3}}
"""
FULL = ["--sft.model.lora=null", "--reward.model.lora=null", "--ppo.model.lora=null"]


def write_pipeline(folder):
    """A pipeline on one file of HH-RLHF transcripts, which serves all three stages."""
    save_tiny(folder / "model")
    words = ("cat", "dog", "sun", "day", "rain", "night")
    rows = [
        {
            "chosen": f"\n\nHuman: the {word}\n\nAssistant: is good",
            "rejected": f"\n\nHuman: the {word}\n\nAssistant: is bad",
        }
        for word in words
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.yaml").write_text(PIPELINE.format(folder=folder))
    return folder / "run.yaml"


@pytest.fixture
def file(tmp_path):
    return write_pipeline(tmp_path)


class Told(NullDisplay):
    """Keeps the messages."""

    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)

    @property
    def roles(self):
        """Source and sharing of each role of PPO, by its name."""
        told = (re.fullmatch(r"  (\S+): (\S+) \((.+)\)", line) for line in self.lines)
        return {line[1]: (line[2], line[3]) for line in told if line is not None}


def run(file, *overrides):
    told = Told()
    return run_pipeline(load_pipeline(file, overrides), display=told), told


def weights(folder):
    return load_file(next(folder.glob("*model.safetensors")))


def test_with_lora_all_stages_share_one_base(file, tmp_path):
    result, told = run(file)
    assert list(result.folders) == ["sft", "reward", "ppo"] and result.interrupted is None
    start = str(tmp_path / "model")
    for folder in result.folders.values():
        assert is_adapter(str(folder)) and own_weights(str(folder))[0] == start
    assert told.roles["policy"][0] == str(tmp_path / "out/sft")
    assert told.roles["reference"][1] == "frozen adapter on the base", "the start of PPO, not the bare base"
    assert all("adapter on the" in sharing for _, sharing in told.roles.values()), told.roles
    assert [row["step"] for row in read_jsonl(tmp_path / "out/sft/metrics.jsonl")] == [1, 2, 3, 3]
    update = next(row for row in read_jsonl(tmp_path / "out/ppo/metrics.jsonl") if row["step"] == 1)
    assert update["objective/kl"] == 0.0
    load_causal_lm(str(result.folders["ppo"]), dtype=torch.float32)


def test_with_all_weights_each_stage_is_a_model_of_its_own(file, tmp_path):
    result, told = run(file, *FULL)
    for folder in result.folders.values():
        assert not is_adapter(str(folder))
    AutoModelForCausalLM.from_pretrained(result.folders["ppo"])
    assert told.roles["policy"][0] == str(tmp_path / "out/sft")
    assert told.roles["value"][0] == str(tmp_path / "out/reward"), "the critic starts from the reward model"
    pipeline = load_pipeline(file, FULL)
    assert [reward.type for reward in pipeline.stages["ppo"].rewards] == ["model"]


@pytest.mark.parametrize(
    ("overrides", "judge"),
    [
        ([], "adapter"),
        (["--sft.model.lora=null"], "adapter"),
        (["--reward.model.lora=null"], "model"),
        (["--ppo.model.lora=null"], "model"),
        (["--reward.model.path=other"], "model"),
    ],
)
def test_the_judge_shares_the_policys_base_where_it_can(file, overrides, judge):
    stages = load_pipeline(file, overrides).stages
    (reward,) = stages["ppo"].rewards
    assert (reward.type, reward.path) == (judge, str(stages["reward"].output_dir))


def test_code_beside_the_judge_runs_where_it_does_beside_the_model(file):
    (judge,) = load_pipeline(file, ["--model.trust_remote_code=true", "--ppo.model.lora=null"]).stages["ppo"].rewards
    assert (judge.type, judge.trust_remote_code) == ("model", True)
    (judge,) = load_pipeline(file, ["--model.trust_remote_code=true"]).stages["ppo"].rewards
    assert judge.type == "adapter", "on the policy's base"
    only = ["--sft.model.trust_remote_code=true", "--ppo.model.lora=null"]
    assert not load_pipeline(file, only).stages["ppo"].rewards[0].trust_remote_code


def test_what_reward_makes_may_be_a_member_of_an_ensemble_and_the_start_of_the_critic(file, tmp_path):
    made = tmp_path / "out/reward"
    members = f"[{{type: model, path: {made}/}}, {{type: length_target, target: 3}}]"
    rewards = f"--ppo.rewards=[{{type: ensemble, members: {members}}}]"
    command = ["--sft=null", "--reward.model.lora=null", "--ppo.model.lora=null", rewards]
    result, told = run(file, *command, f"--ppo.value.init={made}")
    assert list(result.folders) == ["reward", "ppo"] and told.roles["value"][0] == str(made)
    (made / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"out/ppo holds ppo, made from an earlier reward"):
        run(file, *command, f"--ppo.value.init={made}")
    alone = "--ppo.rewards=[{type: length_target, target: 3}]"
    shutil.rmtree(tmp_path / "out/ppo")
    result, _ = run(file, *command[:3], alone, f"--ppo.value.init={made}")
    (made / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"out/ppo holds ppo, made from an earlier reward"):
        run(file, *command[:3], alone, f"--ppo.value.init={made}")


def test_mixed_stages_run(file, tmp_path):
    """An SFT adapter is merged into a reward model of its own, and goes on in PPO."""
    result, told = run(file, "--reward.model.lora=null")
    assert [is_adapter(str(folder)) for folder in result.folders.values()] == [True, False, True]
    assert told.roles["policy"][0] == str(tmp_path / "out/sft")


def test_finished_stages_are_skipped_and_an_unfinished_one_goes_on_bitwise(file, tmp_path, monkeypatch):
    run(file, f"--output_dir={tmp_path / 'straight'}")

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tether.pipeline.train_reward_model", killed)
        run(file)
    before = (tmp_path / "out/sft/adapter_model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tether.train.run.save_final", killed)  # after the last update of PPO
        run(file)
    result, told = run(file)
    assert f"sft: finished in {tmp_path / 'out/sft'}" in told.lines
    assert f"ppo: continues in {tmp_path / 'out/ppo'}" in told.lines
    assert (tmp_path / "out/sft/adapter_model.safetensors").stat().st_mtime_ns == before
    for name, folder in result.folders.items():
        first, second = weights(tmp_path / "straight" / name), weights(folder)
        assert all(torch.equal(first[key], second[key]) for key in first), name
    _, told = run(file)
    assert [line for line in told.lines if ": finished in " in line] == told.lines[:3]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_pipeline_that_moved_goes_on_where_it_is(file, tmp_path, monkeypatch, is_damaged):
    """If it was killed while it wrote a checkpoint, from the one before, which also knows what the run has read."""
    overrides = [*FULL, f"--ppo.model.path={tmp_path}/out/sft"]
    with monkeypatch.context() as patch:
        patch.setattr("tether.train.run.save_final", None)
        with pytest.raises(TypeError):
            run_pipeline(load_pipeline(file, overrides))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("model", "out", "pairs.jsonl"):
        (tmp_path / name).rename(other / name)
    if is_damaged:
        (other / "out/ppo/finished.json").unlink()
        (other / "out/ppo/checkpoint-3/tether_state/state.json").write_text("{")
    moved = other / "run.yaml"
    moved.write_text(PIPELINE.format(folder=other))
    overrides = [*FULL, f"--ppo.model.path={other}/out/sft"]
    told = Told()
    run_pipeline(load_pipeline(moved, overrides), display=told)
    stages = [line for line in told.lines if line.startswith(("sft: ", "reward: ", "ppo: "))]
    assert [line.split(" in ")[0] for line in stages[:3]] == ["sft: finished", "reward: finished", "ppo: continues"]
    (other / "pairs.jsonl").write_text("\n".join((other / "pairs.jsonl").read_text().splitlines()[::-1]))
    (other / "pairs.jsonl").rename(tmp_path / "pairs.jsonl")
    changed = [*overrides, f"--sft.data.demonstrations={tmp_path}/pairs.jsonl"]
    with pytest.raises(ConfigError, match=r"holds this stage with a different data\.demonstrations"):
        run_pipeline(load_pipeline(moved, changed))


def test_what_is_to_run_anew_is_not_finished_where_the_pipeline_stops_before_it(file, tmp_path, monkeypatch):
    """Not by its earlier model either, nor by checkpoints of it."""
    run(file, "--reward.train.save_steps=1")
    for folder in ("reward", "mine"):
        (tmp_path / "out" / folder).mkdir(exist_ok=True)
        (tmp_path / "out" / folder / "own.txt").touch()

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    again = ["--seed=4", "--reward.train.save_steps=1"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tether.pipeline.train_reward_model", killed)
        run(file, *again, "--overwrite_output_dir=true")
    left = {name: {path.name for path in (tmp_path / "out" / name).iterdir()} for name in ("reward", "ppo", "mine")}
    assert left["reward"] == {"config.yaml", "own.txt"} and left["mine"] == {"own.txt"}
    assert not left["ppo"] & {"manifest.json", "adapter_model.safetensors", "metrics.jsonl"}
    assert not any(name.startswith("checkpoint-") for name in left["ppo"])
    result, told = run(file, *again)
    assert [line for line in told.lines if ": finished in " in line] == [f"sft: finished in {tmp_path / 'out/sft'}"]
    assert list(result.folders) == ["sft", "reward", "ppo"]


def test_a_model_that_a_later_stage_would_write_over_is_told_before_it_is_gone(file, tmp_path):
    save_tiny(tmp_path / "out/ppo/model")
    command = [f"--model.path={tmp_path / 'out/ppo/model'}", "--overwrite_output_dir=true"]
    with pytest.raises(ConfigError, match=r"output_dir: ppo would overwrite .*/out/ppo/model, which sft\.model\.path"):
        run(file, *command)
    assert weights(tmp_path / "out/ppo/model")


def test_an_unfinished_ppo_stage_may_change_what_tether_ppo_may(file, tmp_path, monkeypatch):
    """A finished one may not where that would be without effect."""
    command = ["--reward=null", "--ppo.rewards=[{type: length_target, target: 3}]"]

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tether.train.run.save_final", killed)
        run(file, *command)
    with pytest.raises(ConfigError, match=r"ppo holds this stage with a different rewards\.0\.target\. Choose another"):
        run(file, "--reward=null", "--ppo.rewards=[{type: length_target, target: 4}]")
    longer = [*command, "--ppo.train.max_steps=4", "--ppo.train.logging_steps=2", "--ppo.train.max_runtime=3600"]
    _, told = run(file, *longer)
    assert f"ppo: continues in {tmp_path / 'out/ppo'}" in told.lines
    rows = read_jsonl(tmp_path / "out/ppo/metrics.jsonl")
    assert [row["step"] for row in rows if "objective/kl" in row] == [1, 2, 3, 4]
    _, told = run(file, *longer, "--ppo.train.logging_steps=1")
    assert f"ppo: finished in {tmp_path / 'out/ppo'}" in told.lines
    for key, value in (("max_steps", "5"), ("push_to_hub", "true")):
        with pytest.raises(ConfigError, match=rf"out/ppo holds this stage with a different train\.{key}"):
            run(file, *longer, f"--ppo.train.{key}={value}")


@pytest.mark.parametrize("before", ["", "{type: ensemble, members: [{type: length_target, target: 3}, "])
def test_a_reward_service_that_moved_is_asked_where_it_is(file, before):
    def ppo(url):
        rewards = f"[{before}{{type: http, url: '{url}'}}{']}' if before else ''}]"
        return load_pipeline(file, [f"--ppo.rewards={rewards}"]).stages["ppo"]

    config = ppo("http://127.0.0.1:1/score")
    config.output_dir.mkdir(parents=True)
    (config.output_dir / "config.yaml").write_text(dump_config(resolved(config)))
    assert _state(ppo("http://127.0.0.1:2/score")) == "begun"


def test_a_signal_ends_with_130_and_the_same_command_goes_on(file, tmp_path):
    command = [sys.executable, "-m", "tether", "pipeline", str(file), "--sft.train.max_steps=400"]
    process = subprocess.Popen(command, env=os.environ | {"TETHER_DEBUG": "0"}, stdout=subprocess.PIPE)
    log = tmp_path / "out/sft/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert b"stopped by SIGTERM" in output
    pipeline = load_pipeline(file, ["--sft.train.max_steps=400"])
    assert not (tmp_path / "out/reward").exists()
    (checkpoint,) = pipeline.stages["sft"].output_dir.glob("checkpoint-*")
    steps = int(checkpoint.name.partition("-")[2])
    assert 0 < steps < 400 and [row["step"] for row in read_jsonl(log)] == list(range(1, steps + 1))


@pytest.mark.parametrize(("name", "finished"), [("sft", ["sft"]), ("reward", ["sft", "reward"])])
def test_a_signal_after_the_last_step_of_a_stage_ends_the_pipeline_behind_it(file, monkeypatch, name, finished):
    """It comes while the stage evaluates and saves."""
    whole = training.last_loss

    def signalled(config):
        if config.output_dir.name == name:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(config)

    with monkeypatch.context() as patch:
        patch.setattr(training, "last_loss", signalled)
        result, _ = run(file)
    assert (result.interrupted, list(result.folders)) == ("SIGTERM", finished)
    result, told = run(file)
    assert result.interrupted is None and sum(": finished in " in line for line in told.lines) == len(finished)


def test_mistakes_of_the_last_stage_are_told_before_the_first_loads_a_model(file, tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tether.stages.sft.start_model", no_model)
    save_tiny(tmp_path / "judge", num_labels=1)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": 3}')
    (tmp_path / "judge.py").write_text("def judge(prompts, completions): return [nothing]")
    made = f"{{type: adapter, path: {tmp_path}/out/reward}}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for override, error, message in [
        (f"--ppo.data.prompts={tmp_path / 'bad.jsonl'}", DataError, r"data\.prompts: .*row 1 \(line 2\)"),
        ("--reward.data.max_length=2", DataError, r"data\.pairs: no row of .* \(6 rows\) can be used"),
        ("--ppo.sampling.response_length=500", ConfigError, r"sampling\.response_length 500 .* the model has 128"),
        (f"--ppo.model.path={tmp_path / 'judge'}", ModelError, "judge is a sequence classifier; wanted a causal"),
        ("--data.chat_template=chatml", ConfigError, r"data\.chat_template: chatml needs"),
        (
            f"--ppo.rewards=[{{type: function, path: {tmp_path}/judge.py, name: judge}}]",
            ConfigError,
            r"rewards\.0: the function failed to score a test answer: .*NameError",
        ),
        (
            f"--ppo.rewards=[{made}, {{type: http, url: 'http://127.0.0.1:9/', retries: 0}}]",
            ConfigError,
            r"the service failed to score a test answer: .*127\.0\.0\.1:9",
        ),
        ("--ppo.train.push_to_hub=true", ConfigError, r"train\.push_to_hub: HF_HUB_OFFLINE is set"),
    ]:
        with pytest.raises(error, match=message) as told:
            run(file, override)
        assert any("in the section" in note for note in told.value.__notes__)
    assert not (tmp_path / "out/sft").exists()


def test_warnings_of_the_last_stage_are_told_before_the_first_loads_a_model(file, monkeypatch):
    told = Told()

    def first(*args, **kwargs):
        assert told.lines[0] == "warning: in the section ppo: answers may be too long"
        raise StopIteration

    monkeypatch.setattr("tether.pipeline.inputs.check_data", lambda *args, **kwargs: ["answers may be too long"])
    monkeypatch.setattr("tether.stages.sft.start_model", first)
    with pytest.raises(StopIteration):
        run_pipeline(load_pipeline(file, []), display=told)


def test_a_launch_that_does_not_fit_the_last_stage_is_told_before_the_first_loads_a_model(file, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tether.stages.sft.start_model", no_model)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match=r"train\.bf16: got false, but accelerate launch uses") as told:
        run(file, "--ppo.train.bf16=false")
    assert told.value.__notes__ == ["in the section ppo"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--ppo.model.lora.r=4", r"ppo\.model\.lora\.r: 4, but ppo continues the adapter of sft, which has 2"),
        ("--sft.output_dir=x", r"sft\.output_dir: the pipeline's own output_dir applies to every"),
        ("--ppo.train.learning_rat=1", r"section ppo, --ppo\.train\.learning_rat: unknown key; did you mean"),
        ("--sft.train.max_steps=none", r"section sft, --sft\.train\.max_steps: got none, wanted a whole number"),
        ("--resume=true", "--resume: leave it out; a pipeline resumes by itself where it was stopped"),
        ("--seed=x", r"--seed: got x, wanted a whole number"),
    ],
)
def test_wrong_keys_are_told_with_their_section(file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline(file, [override])


def test_a_stage_is_not_skipped_where_what_it_was_made_from_is_gone(file, tmp_path):
    run(file)
    (tmp_path / "out/sft/adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"out/reward holds reward, made from an earlier sft, which is now to"):
        run(file)
    shutil.rmtree(tmp_path / "out/reward")
    with pytest.raises(ConfigError, match=r"out/ppo holds ppo, made from an earlier sft"):
        run(file)


def test_one_stage_is_no_pipeline(tmp_path):
    (tmp_path / "one.yaml").write_text("{model: {path: m}, output_dir: o, ppo: {}}")
    with pytest.raises(ConfigError, match="at least two of the sections sft, reward, ppo, got ppo"):
        load_pipeline(tmp_path / "one.yaml")


@pytest.mark.parametrize("command", ["ppo", "plan", "sft", "reward"])
def test_a_pipeline_is_no_stage(file, capsys, command):
    assert main([command, str(file)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"`tether pipeline {file}` runs it" in told and "unknown key" not in told


def test_a_finished_stage_of_another_configuration_is_not_taken_for_this_one(file, tmp_path, capsys):
    command = ["pipeline", str(file), "--ppo=null"]
    assert main(command) == 0
    assert f"reward: {tmp_path / 'out/reward'}" in capsys.readouterr().out.replace("\n", "")
    assert main([*command, "--sft.train.learning_rate=0.02"]) == 2
    assert "holds this stage with a different train.learning_rate" in capsys.readouterr().err
    assert main([*command, "--sft.train.learning_rate=0.02", "--overwrite"]) == 0
