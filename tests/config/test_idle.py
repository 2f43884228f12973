"""Keys that would do nothing are refused by what they lack; their defaults never are."""

from __future__ import annotations

import pytest

from tether.compat.openrlhf import translated as from_openrlhf
from tether.config.idle import NEEDS
from tether.config.load import dump_config, parse_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig, default_of
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError

FILE = """
model: {path: m}
rewards: [{type: http, url: "http://judge"}]
data: {prompts: p.jsonl}
sampling: {num_generations: 2}
train: {max_steps: 1}
output_dir: out
"""
HELD_OUT = ["data.eval_prompts=e.jsonl"]
RLOO, GRPO, REINFORCE = (f"ppo.advantage_estimator={name}" for name in ("rloo", "grpo", "reinforce_pp"))
CASES = [
    (["data.eval_split=test"], HELD_OUT, "set data.eval_prompts"),
    (["data.eval_subset=main"], HELD_OUT, "source of data.prompts again"),
    (["data.eval_revision=v1"], HELD_OUT, "source of data.prompts again"),
    (["data.ptx_revision=v1"], ["data.ptx=d.jsonl", "ppo.ptx_coef=1"], "set data.ptx"),
    (["data.ptx_subset=main"], ["data.ptx=d.jsonl", "ppo.ptx_coef=1"], "set data.ptx"),
    (["data.ptx_columns={completion: answer}"], ["data.ptx=d.jsonl", "ppo.ptx_coef=1"], "set data.ptx"),
    (["data.ptx_split=test"], ["data.ptx=d.jsonl", "ppo.ptx_coef=1"], "set data.ptx"),
    (["data.max_ptx_length=9"], ["data.ptx=d.jsonl", "ppo.ptx_coef=1"], "set data.ptx"),
    (["ppo.kl_in=loss", "ppo.kl_coef=0"], ["ppo.kl_coef=0.1"], "there is no reference with ppo.kl_coef 0"),
    (["ppo.kl_estimator=k3", "ppo.kl_coef=0"], ["ppo.kl_coef=0.1"], "there is no reference with ppo.kl_coef 0"),
    (["ppo.kl_target=6", "ppo.kl_coef=0"], ["ppo.kl_coef=0.1"], "kl_coef is 0, which"),
    (["ppo.kl_horizon=500"], ["ppo.kl_target=6"], "set ppo.kl_target"),
    (["ppo.gamma=0.9", RLOO], [REINFORCE], "rloo uses the undiscounted return"),
    (["ppo.gamma=0.9", GRPO], ["ppo.advantage_estimator=gae"], "grpo uses the undiscounted return"),
    (["ppo.lam=0.9", RLOO], ["ppo.advantage_estimator=gae"], "ppo.advantage_estimator is rloo"),
    (["ppo.lam=0.9", GRPO], ["ppo.advantage_estimator=gae"], "ppo.advantage_estimator is grpo"),
    (["ppo.lam=0.9", REINFORCE], ["ppo.advantage_estimator=gae"], "ppo.advantage_estimator is reinforce_pp"),
    (["ppo.lam=0.9", "ppo.lam_alpha=1", "ppo.value_lam=1"], ["ppo.value_lam=null"], "ppo.lam_alpha 1.0 replaces it"),
    (["ppo.value_lam=0.9", RLOO], ["ppo.advantage_estimator=gae"], "ppo.advantage_estimator is rloo"),
    (["ppo.lam_alpha=0.9", RLOO], ["ppo.advantage_estimator=gae"], "ppo.advantage_estimator is rloo"),
    (["ppo.cliprange_value=0.3", RLOO], ["ppo.advantage_estimator=gae"], "there is no critic with"),
    (["ppo.cliprange_value=null", GRPO], ["ppo.advantage_estimator=gae"], "there is no critic with"),
    (["ppo.importance_sampling_cap=5"], ["sampling.vllm={}"], "set sampling.vllm: {}, or leave"),
    (["ppo.vf_coef=0.5"], ["value.kind=head"], "set value.learning_rate, or value.kind: head"),
    (["ppo.vf_coef=0.5", "value.kind=model"], ["value.kind=head"], "policy and critic have optimizers of their own"),
    (["ppo.vf_coef=0.5", RLOO], ["ppo.advantage_estimator=gae", "value.kind=head"], "there is no critic with"),
    (["ppo.whiten_rewards=true", GRPO], [RLOO], "grpo divides scores by their own spread"),
    (["ppo.score_norm_samples=99"], ["ppo.score_norm=frozen"], "set ppo.score_norm to frozen"),
    (["ppo.score_norm_samples=99", "ppo.score_norm=running"], ["rewards.0.norm=auto"], "set ppo.score_norm to frozen"),
    (["ppo.overlong_penalty=2"], ["ppo.overlong_buffer=9"], "set ppo.overlong_buffer"),
    (["sampling.cache_implementation=static", "sampling.vllm={}"], ["sampling.vllm=null"], "a cache of its own"),
    (["train.greater_is_better=false"], [*HELD_OUT, "train.metric_for_best_model=eval_kl"], "set train.metric"),
    (["train.hub_model_id=me/it"], ["train.push_to_hub=true"], "set train.push_to_hub: true"),
    (["train.hub_private_repo=false"], ["train.push_to_hub=true"], "set train.push_to_hub: true"),
]


def parsed(changes) -> RunConfig:
    return parse_config(FILE, overrides=[f"--{change}" for change in changes])


@pytest.mark.parametrize(("given", "lacking", "told"), CASES, ids=[" ".join(given) for given, *_ in CASES])
def test_a_key_that_would_do_nothing_is_refused_until_it_is_read(given, lacking, told):
    key, _, _ = given[0].partition("=")
    with pytest.raises(ConfigError) as refused:
        parsed(given)
    (line,) = str(refused.value).splitlines()
    assert line.partition(": ")[2].startswith(f"{key} ") or line.startswith(f"{key} ")
    assert told in line
    config = parsed([*given, *lacking])
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("stage", "source"), [(SftStageConfig, "demonstrations"), (RewardStageConfig, "pairs")], ids=["sft", "reward"]
)
@pytest.mark.parametrize(
    "part",
    [{"eval_split": "test"}, {"eval_subset": "main"}, {"eval_revision": "v1"}],
    ids=["split", "subset", "revision"],
)
def test_a_stage_refuses_a_part_of_held_out_data_that_is_not_named(stage, source, part):
    def run(**data):
        return stage.model_validate({"model": {"path": "m"}, "data": {source: "org/it"} | data, "output_dir": "out"})

    ((key, value),) = part.items()
    for share in ({}, {"eval_fraction": 0.2}):
        with pytest.raises(ValueError, match=rf"{key} {value}: eval_{source} is not set.*source of {source} again"):
            run(**part, **share)
    assert getattr(run(**part, **{f"eval_{source}": "org/it"}).data, key) == value
    assert run(eval_split="train", eval_subset=None).data == run().data


def test_every_reason_is_apart_from_its_way_out():
    """A conversion, which leaves such keys out, gives the reason alone."""
    for reason, colon, _ in (need.why.partition(": ") for needs in NEEDS.values() for need in needs):
        assert colon and ";" not in reason


def test_every_need_has_a_case():
    assert {given[0].partition("=")[0] for given, *_ in CASES} == NEEDS.keys()


@pytest.mark.parametrize("estimator", ["gae", "rloo", "grpo", "reinforce_pp"])
@pytest.mark.parametrize("coef", [0, 0.05])
def test_a_written_configuration_names_every_key_and_loads(estimator, coef):
    config = parsed([f"ppo.advantage_estimator={estimator}", f"ppo.kl_coef={coef}"]).resolved(bf16=False)
    text = dump_config(config)
    assert all(f"{key.partition('.')[2]}:" in text for key in NEEDS)
    assert parse_config(text).ppo == config.ppo
    explicit = [f"{key}={'null' if (value := default_of(key)) is None else value}" for key in NEEDS]
    assert "data.ptx_columns={}" in explicit
    assert parsed(explicit) == parsed([])


def test_what_another_systems_file_sets_in_vain_is_left_out_and_said():
    options = {
        "actor.model_name_or_path": "m", "reward.remote_url": "http://judge", "data.prompt_dataset": "p.jsonl",
        "algo.advantage.estimator": "rloo", "algo.advantage.lambd": 0.9, "rollout.n_samples_per_prompt": 2,
    }  # fmt: skip
    translation = from_openrlhf("run.sh", options)
    assert "lam" not in translation.config["ppo"] and "cliprange_value" not in translation.config["ppo"]
    assert [theirs for theirs, _ in translation.ignored] == ["algo.advantage.lambd: 0.9"]
    assert translation.checked(RunConfig).ppo.advantage_estimator == "rloo"
