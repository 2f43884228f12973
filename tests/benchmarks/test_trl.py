"""What TRL is asked to do beside Tether, by a stand-in for its trainer, which newer releases no longer have."""

import importlib
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from benchmarks.peers import job, tether_ppo
from benchmarks.toys.language import toy
from benchmarks.toys.run import HARNESS, toy_config

from benchmarks import optimality
from tests.tiny import save_tiny

SAME = {
    "learning_rate": "train.learning_rate", "kl_coef": "ppo.kl_coef", "lam": "ppo.lam",
    "num_ppo_epochs": "ppo.num_ppo_epochs", "num_mini_batches": "ppo.num_mini_batches",
    "temperature": "sampling.temperature", "response_length": "sampling.response_length", "seed": "train.seed",
}  # fmt: skip
"""Where Tether's configuration has what TRL's has."""


@pytest.fixture
def trl(monkeypatch):
    """Imports a side in which TRL is a stand-in; returns it and the trainers that it makes."""
    made = []

    class Trainer:
        def __init__(self, **given):
            self.__dict__.update(given)
            made.append(self)

        def train(self):
            pass

    def side(name):
        contents = {"PPOConfig": SimpleNamespace, "PPOTrainer": Trainer}
        for module in ("trl", "trl.experimental", "trl.experimental.ppo"):
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules["trl.experimental.ppo"]).update(contents)
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        monkeypatch.delitem(sys.modules, f"benchmarks.peers.{name}", raising=False)
        imported = importlib.import_module(f"benchmarks.peers.{name}")
        monkeypatch.delitem(sys.modules, f"benchmarks.peers.{name}")
        return imported, made

    return side


def read(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def assert_same(args, config, **same):
    for theirs, ours in (SAME | same).items():
        assert getattr(args, theirs) == read(config, ours), theirs
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == config.train.rollout_batch_size
    assert args.total_episodes == config.train.max_steps * config.train.rollout_batch_size
    assert args.missing_eos_penalty is None and not args.bf16 and args.save_strategy == "no"


@pytest.mark.parametrize("changes", [{}, {"bfloat16": True}, {"epochs": 4}, {"ends": True}, {"lora": True}])
def test_a_real_model_is_trained_alike(trl, tmp_path, changes):
    module, made = trl("trl_ppo")
    model, judge = save_tiny(tmp_path / "model"), save_tiny(tmp_path / "judge", num_labels=1, seed=1)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"the {x}"}) + "\n" for x in ("cat", "dog")))
    paths = {"model": model, "judge": judge, "judge_adapter": judge, "prompts": tmp_path / "prompts.jsonl"}
    given = job.Job(**{name: str(path) for name, path in paths.items()}, folder=str(tmp_path), threads=1)
    given, config = replace(given, **changes), tether_ppo.config_of(replace(given, **changes))
    module.train(given)
    [trainer] = made
    assert_same(trainer.args, config, per_device_train_batch_size="train.micro_batch_size")
    assert trainer.args.local_rollout_forward_batch_size == config.sampling.batch_size
    assert trainer.args.stop_token == config.sampling.stop_token == ("eos" if given.ends else None)
    models = [trainer.model, trainer.reward_model, trainer.value_model, trainer.ref_model]
    assert len({id(each) for each in models}) == 4 and (trainer.ref_model is None) == given.lora
    wanted = config.model.dtype
    assert {str(each.dtype) for each in models if each is not None} == {f"torch.{wanted}"}
    lora = trainer.peft_config
    assert (lora is None) == (config.model.lora is None)
    if lora is not None:
        assert (lora.r, lora.lora_alpha) == (config.model.lora.r, config.model.lora.alpha)
    assert [tuple(row["input_ids"]) for row in trainer.train_dataset]


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_toy_is_trained_alike(trl, monkeypatch, tmp_path, name):
    module, made = trl("trl_toys")

    def run(command, **options):
        monkeypatch.setattr(sys, "argv", list(map(str, command[2:])))
        module.main()

    monkeypatch.setattr(optimality.subprocess, "run", run)
    monkeypatch.setattr(optimality, "trl_python", lambda: "python")
    runs = optimality.trl_runs(name, [0, 3], tmp_path)
    assert [each.seed for each in runs] == [trainer.args.seed for trainer in made] == [0, 3]
    for trainer in made:
        config = toy_config(toy(name), tmp_path, HARNESS | {"train.seed": trainer.args.seed})
        assert_same(trainer.args, config, cliprange="ppo.cliprange", adam_epsilon="train.adam_epsilon")
        assert trainer.model is not trainer.ref_model
