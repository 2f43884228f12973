"""Arguments that a script changes after it made TRL's trainer: which a run follows, and which it says it does not."""

import shutil

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.compat.trl_runs import arguments, classifier, policy, trainer
from tether.compat.trl.following import FOLLOWED
from tether.config.load import load_config
from tether.errors import ConfigError

CHANGED = {
    "kl_coef": 0.7, "kl_estimator": "k3", "whiten_rewards": True, "gamma": 0.5, "lam": 0.1, "cliprange": 1e-4,
    "cliprange_value": 1e-4, "vf_coef": 0.9, "missing_eos_penalty": 2.0,
}  # fmt: skip
TIMES = ("time/", "speed/", "memory/", "eps", "epoch")


class Changing(TrainerCallback):
    """Changes arguments at an event of one step."""

    def __init__(self, event, step, **values):
        self.step, self.values = step, values
        setattr(self, event, self.change)

    def change(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            vars(args).update(self.values)


def run(folder, callbacks=(), *, own_optimizer=False, resume=None, **changes):
    """A run of a reference that is not the policy, so that every setting counts; the trainer afterwards."""
    model, value = policy(folder), classifier(folder)
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.1) if own_optimizer else None
    reference = policy(folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    made = trainer(
        folder, args=arguments(folder, **changes), model=model, value_model=value, ref_model=reference,
        callbacks=list(callbacks), optimizers=(optimizer, None),
    )  # fmt: skip
    made.train(resume_from_checkpoint=resume)
    return made


def outcome(made):
    """Everything that a run computed."""
    history = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in made.state.log_history]
    return history, {name: x.tolist() for name, x in made.model.state_dict().items()}


@pytest.mark.parametrize(("name", "stop_token"), [*((name, "eos") for name in FOLLOWED), ("missing_eos_penalty", None)])
def test_a_changed_argument_counts_as_if_it_had_been_given(tmp_path, name, stop_token):
    given = {"stop_token": stop_token, "own_optimizer": name == "vf_coef", "total_episodes": 8}
    before = outcome(run(tmp_path, **given))
    later = outcome(run(tmp_path, [Changing("on_step_begin", 0, **{name: CHANGED[name]})], **given))
    at_once = outcome(run(tmp_path, **given | {name: CHANGED[name]}))
    assert later == at_once != before


def test_changed_arguments_count_from_the_next_update_on(tmp_path):
    made = run(tmp_path, [Changing("on_step_end", 1, kl_coef=np.float32(0.5), gamma=0.5)])
    assert [row["objective/kl_coef"] for row in made.state.log_history] == [0.05, 0.5]
    assert load_config(tmp_path / "out" / "config.yaml").ppo.kl_coef == 0.05


def test_an_argument_changed_before_the_run_begins_is_the_runs(tmp_path):
    made = trainer(tmp_path)
    made.args.cliprange, made.args.save_strategy = 0.1, "steps"
    made.train()
    assert load_config(tmp_path / "out" / "config.yaml").ppo.cliprange == 0.1


def test_a_resumed_run_has_the_arguments_as_they_were_changed(tmp_path):
    """The callback does not change them again: the change happened before the checkpoint."""
    change = {"kl_coef": 0.5, "missing_eos_penalty": 2.0}
    given = {"total_episodes": 24, "save_steps": 2}
    whole = outcome(run(tmp_path, [Changing("on_step_end", 1, **change)], **given))
    shutil.rmtree(tmp_path / "out" / "checkpoint-3", ignore_errors=True)
    resumed = outcome(run(tmp_path, [Changing("on_step_end", 1, **change)], resume=True, **given))
    assert resumed == whole


@pytest.mark.parametrize(("name", "value"), [("response_length", 9), ("temperature", 0.5), ("num_ppo_epochs", 1)])
def test_an_argument_that_is_not_followed_is_an_error_before_the_run_and_a_warning_in_it(
    tmp_path, caplog, name, value
):
    made = trainer(tmp_path)
    setattr(made.args, name, value)
    with pytest.raises(ConfigError, match=rf"^PPOConfig\.{name}: changed from .* to {value} after PPOTrainer was made"):
        made.train()
    assert not (tmp_path / "out").exists()
    before = outcome(run(tmp_path))
    caplog.clear()
    assert outcome(run(tmp_path, [Changing("on_step_end", 1, **{name: value, "run_name": "other"})])) == before
    told = [record.message for record in caplog.records if "after PPOTrainer was made" in record.message]
    assert [line.split(":")[0] for line in told] == [f"PPOConfig.{name}"]


@pytest.mark.parametrize(
    ("value", "message"), [({"kl_coef": -1}, "kl_coef"), ({"lam": "high"}, "lam"), ({"kl_estimator": "k2"}, "k1 or k3")]
)
def test_an_invalid_change_ends_the_run(tmp_path, value, message):
    with pytest.raises(ConfigError, match=f"^PPOConfig.*{message}"):
        run(tmp_path, [Changing("on_step_end", 1, **value)])


def test_a_run_made_without_a_reference_gets_none_later(tmp_path):
    made = trainer(tmp_path, args=arguments(tmp_path, kl_coef=0.0))
    made.args.kl_coef = 0.1
    with pytest.raises(ConfigError, match=r"^PPOConfig\.kl_coef: changed from 0 to 0\.1 .* with a kl_coef above 0"):
        made.train()


def test_names_of_choices_may_be_set_after_the_arguments_were_made(tmp_path):
    args = arguments(tmp_path)
    args.save_strategy, args.lr_scheduler_type = "no", "constant"
    trainer(tmp_path, args=args).train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    args.lr_scheduler_type = "steep"
    with pytest.raises(ConfigError, match=r"^PPOConfig\.lr_scheduler_type: got 'steep', wanted one of linear"):
        trainer(tmp_path, args=args)
