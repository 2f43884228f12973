"""The sides that are measured beside each other: what each of them is asked to do, and that no one ends the others."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from benchmarks.gpu import speed
from benchmarks.peers import environment, job, tether_ppo

import tether
from benchmarks import memory
from tests.tiny import save_tiny
from tether.generation import decoding, hf
from tether.generation.batch import Decoding
from tether.models.roles import ModelRoles

peers = speed.peers_script()
DETAILS = {"speed/rollout": 100.0, "flops/update": 3.0, "time/update_s": 1.5, "speed/mfu": 0.25}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A job on a tiny model, without files of its own."""
    folder = tmp_path_factory.mktemp("peers")
    model = save_tiny(folder / "model", "llama")
    judge = save_tiny(folder / "judge", "llama", num_labels=1, seed=1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the cat {word}"}) + "\n" for word in ("is", "was", "sees")))
    paths = {"model": model, "judge": judge, "judge_adapter": judge, "prompts": prompts, "folder": folder}
    sizes = {"episodes": 4, "micro": 2, "decoded": 4, "tokens": 5, "updates": 3, "threads": 1}
    return job.Job(**{name: str(path) for name, path in paths.items()}, **sizes)


def test_an_outcome_has_what_is_printed_and_every_answer_is_of_full_length(tiny, tmp_path):
    outcome = tether_ppo.train(replace(tiny, folder=str(tmp_path)))
    assert len(outcome.seconds) == len(outcome.scores) == len(outcome.lengths) == tiny.updates
    assert set(outcome.lengths) == {float(tiny.tokens)} and DETAILS.keys() <= outcome.details.keys()
    assert outcome.episodes_per_second(tiny) == pytest.approx(2 * 4 / sum(outcome.seconds[1:]))


def test_the_cache_is_of_fixed_size_where_it_is_said_to_be(tiny, tmp_path):
    scores = {}
    for cache, way in (("dynamic", Decoding.CUT), ("static", Decoding.FIXED)):
        with mock.patch.object(hf, "Batch", side_effect=hf.Batch) as batch:
            outcome = tether_ppo.train(replace(tiny, folder=str(tmp_path / cache), cache=cache, updates=1))
        assert batch.call_args_list and {call.args[3] for call in batch.call_args_list} == {way}
        scores[cache] = outcome.scores
    assert scores["static"] == scores["dynamic"]


def test_a_head_on_the_policy_takes_a_pass_less_than_a_critic(tiny):
    configs = [tether_ppo.config_of(replace(tiny, critic=critic)).model_dump() for critic in ("reward", "head")]
    assert {key for key in configs[0] if configs[0][key] != configs[1][key]} == {"value"}
    assert configs[0]["value"]["init"] == "reward" and configs[1]["value"]["kind"] == "head"


def test_both_sides_get_the_same_job(monkeypatch, tmp_path, tiny):
    given = {}

    def run(command, *, cwd, timeout, env, stdout, stderr):
        task, result = command[3:]
        given[command[2]] = (command[0], json.loads(task.read_text()), env)
        result.write_text(json.dumps({"seconds": [1.0]}))
        return mock.Mock(returncode=0)

    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setattr(peers, "trl_python", lambda: "its python")
    for side in peers.SIDES:
        assert peers.outcome(side, tiny, tmp_path / side).seconds == [1.0]
    (python, ours, env), (other, theirs, theirs_env) = given.values()
    assert list(given) == ["benchmarks.peers.tether_ppo", "benchmarks.peers.trl_ppo"]
    assert (python, other) == (sys.executable, "its python") and env == theirs_env and env["HF_HUB_OFFLINE"] == "1"
    assert ours | {"folder": ""} == theirs | {"folder": ""} and ours["folder"] != theirs["folder"]


def test_a_side_that_fails_or_takes_too_long_says_so(monkeypatch, tmp_path, tiny):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "no module named $2"; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(job.SideFailed, match=r"tether failed; .*log\.txt ends with:\nno module named benchmarks"):
        peers.outcome("tether", tiny, tmp_path / "broken")
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(job.SideFailed, match=r"tether took over 0 s; its log is .*log\.txt"):
        peers.outcome("tether", tiny, tmp_path / "slow", limit=0.01)


@pytest.mark.parametrize("has_version", [True, False])
def test_trl_runs_in_this_python_if_that_has_the_version(monkeypatch, tmp_path, has_version):
    monkeypatch.setattr(environment, "version", lambda name: environment.TRL_VERSION if has_version else "1.16.0")
    monkeypatch.setattr(environment, "find_spec", lambda name: object())
    monkeypatch.setattr(environment, "TRL_ENVIRONMENT", tmp_path)
    (tmp_path / "complete").touch()
    assert environment.trl_python() == (Path(sys.executable) if has_version else tmp_path / "bin" / "python")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Runs the script with sides that take no time; returns its exit code and what each side was asked to do."""

    def run(outcomes, *arguments):
        asked = []

        def outcome(system, of_side, folder, *, limit):
            folder.mkdir(parents=True, exist_ok=True)
            side = folder.name
            asked.append((side, system, of_side.lora, of_side.cache, of_side.bfloat16))
            (folder / "log.txt").write_text(outcomes.get(("log", side, of_side.lora), ""))
            saved = tmp_path / "speed.json"
            done = json.loads(saved.read_text()) if saved.exists() else {}
            assert sum(map(len, done.values())) == len([a for a in asked[:-1] if (a[0], a[2]) not in outcomes])
            if (error := outcomes.get((side, of_side.lora))) is not None:
                raise error
            return job.Outcome([9.0, 2.0, 2.0], [0.0] * 3, [512.0] * 3, 2.0 if system == "trl" else 1.0, DETAILS)

        monkeypatch.setattr(peers, "outcome", outcome)
        monkeypatch.setattr(peers, "material", lambda model, folder: dict.fromkeys(PATHS, "") | {"folder": str(folder)})
        monkeypatch.setattr(speed, "peers_script", lambda: peers)
        monkeypatch.setattr(sys, "argv", ["speed", "--tiny", "-o", str(tmp_path), *arguments])
        return speed.main(), asked

    return run


PATHS = ("model", "judge", "judge_adapter", "prompts")
ALL = [
    ("tether", "tether", False, "dynamic", True), ("tether", "tether", True, "dynamic", True),
    ("trl", "trl", False, "dynamic", True), ("trl", "trl", True, "dynamic", True),
    ("static", "tether", False, "static", True), ("static", "tether", True, "static", True),
]  # fmt: skip


def test_what_takes_longest_comes_last_and_each_side_is_told_when_it_is_done(gpu, capsys, tmp_path):
    assert gpu({}) == (0, ALL)
    told = capsys.readouterr().out
    assert told.count("2.000 episodes/s, 1.00 GiB at most") == 4
    assert told.count("decode in a cache that grows: 100 tokens/s") == told.count("in one of fixed size, compiled") == 2
    assert told.count("update: 2.00 · 10¹² operations/s, 25.0% of the matrix rate") == 2
    assert told.count("Tether over TRL: 1.00 times the episodes/s, 0.50 of the memory") == 2
    saved = json.loads((tmp_path / "speed.json").read_text())
    assert [list(sides) for sides in saved.values()] == [list(speed.SIDES)] * 2


def test_a_side_that_fails_leaves_the_others_their_turn(gpu, capsys):
    failing = {("tether", False): job.SideFailed("no module"), ("trl", True): OSError("no network")}
    assert gpu(failing) == (1, ALL)
    told = capsys.readouterr().out
    assert "failed: no module" in told and "failed: no network" in told and "Tether over TRL" not in told
    assert told.count("episodes/s, ") == 4


def test_no_side_starts_when_the_time_is_over(gpu, capsys):
    assert gpu({}, "--minutes", "0") == (1, [])
    assert capsys.readouterr().out.count("not started: the time is over") == 6


def test_a_cache_that_grew_after_all_is_no_cache_of_fixed_size(gpu, capsys, caplog, monkeypatch, tiny):
    monkeypatch.setattr(decoding, "_is_faithful", lambda model, device, way: way is Decoding.CUT)
    decoding.decoding(speed.AutoModelForCausalLM.from_pretrained(tiny.model), torch.device("cpu"), is_static=True)
    assert speed.GROWS in caplog.text
    assert gpu({("log", "static", True): caplog.text, ("static", True): None}, "--sides", "static") == (1, ALL[4:])
    assert "failed: its cache grew after all" in capsys.readouterr().out


def test_four_models_and_one_base_do_the_same_otherwise(monkeypatch, tmp_path):
    model, runs, held = save_tiny(tmp_path / "model", "llama"), [], []
    train, take_over = tether.train_policy, ModelRoles._take_over

    def judge_written(command, check):
        monkeypatch.setattr(sys, "argv", command[2:])
        exec(memory.JUDGE, {})

    def noted(roles, idle):
        held.append([role.model for role in roles.all])
        take_over(roles, idle)

    monkeypatch.setattr(memory.subprocess, "run", judge_written)
    monkeypatch.setattr(ModelRoles, "_take_over", noted)
    monkeypatch.setattr(tether, "train_policy", lambda config: runs.append(config.model_dump()) or train(config))
    for kind in memory.KINDS:
        assert memory.measured(kind, str(model), 1) > 0
    many, one = runs
    assert [len(set(models)) for models in held] == [3, 1]  # the fourth model scores
    assert {key for key in many if many[key] != one[key]} - {"data", "output_dir"} == {"model", "value", "rewards"}
    assert many["model"]["lora"] is None and one["model"] | {"lora": None} == many["model"]
    assert [run["rewards"][0]["type"] for run in runs] == ["model", "adapter"]
