"""What other systems call our keys."""

import re

import pytest

from tether.compat import llamafactory_keys, openrlhf, trl_arguments, verl
from tether.config.aliases import ALIASES, alias
from tether.config.keys import describe
from tether.config.load import parse_config
from tether.config.schema import RunConfig
from tether.errors import ConfigError

KEYS = {doc.key for doc in describe(RunConfig)}


def test_every_name_leads_to_a_key_of_ours_or_says_why_not():
    assert {key for found in ALIASES.values() for key in found.keys} <= KEYS
    assert all(found.keys or found.note for found in ALIASES.values())


def test_no_key_of_ours_is_in_the_table():
    assert not KEYS & ALIASES.keys()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model_name_or_path", "model.path"),
        ("reward_model_path", "rewards"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("batch_size", "train.rollout_batch_size"),
        ("init_kl_coef", "ppo.kl_coef"),
        ("ppo_epochs", "ppo.num_ppo_epochs"),
        ("clip_ratio", "ppo.cliprange"),
        ("gae_lambda", "ppo.lam"),
        ("max_new_tokens", "sampling.response_length"),
        ("lora_rank", "model.lora.r"),
        ("ppo_target", "ppo.kl_target"),
        ("critic.adam.lr", "value.learning_rate"),
        ("actor.adam.lr", "train.learning_rate"),
        ("actor_rollout_ref.actor.clip_ratio", "ppo.cliprange"),
        ("train.micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("generation.stop_token_ids", "sampling.stop_token"),
        ("actor_rollout_ref.rollout.stop", "sampling.stop_strings"),
        ("dataset_revision", "data.revision"),
    ],
)
def test_a_known_spelling_leads_to_our_key(theirs, ours):
    assert alias(theirs).keys == (ours,)


TRANSLATED = {
    (theirs, key.ours)
    for key in (
        *openrlhf.KEYS, *openrlhf.LORA, *verl.KEYS, *verl.LORA, *trl_arguments.KEYS,
        *llamafactory_keys.KEYS, *llamafactory_keys.PPO_KEYS,
    )
    for theirs in (key.theirs, key.former)
    if theirs and theirs not in KEYS
}  # fmt: skip
"""Keys of other systems' files that `tether convert` translates one by one, and ours."""


@pytest.mark.parametrize(("theirs", "ours"), sorted(TRANSLATED))
def test_what_is_converted_in_a_file_of_theirs_is_named_in_one_of_ours(theirs, ours):
    *groups, name = theirs.split(".")
    nested = "".join(f"{{{part}: " for part in groups) + f"{{{name}: 1}}" + "}" * len(groups)
    with pytest.raises(ConfigError) as told:
        parse_config(nested, RunConfig)
    line = next(line for line in str(told.value).splitlines() if f"{theirs}: unknown key; " in line)
    named = re.findall(r"\w+(?:\.\w+)+|\w+", line.partition("unknown key; ")[2])
    assert any(word == ours or ("." in word and ours.startswith(f"{word}.")) for word in named), line


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("kl_ctrl.type", "ppo.kl_target: a target makes ppo.kl_coef adaptive"),
        ("log_val_generations", "samples.jsonl has every answer of an evaluation"),
        ("dataset_num_proc", "data is read and tokenized in the process that trains"),
        ("output_min_length", "answers are drawn from the policy's own distribution"),
        ("val_size", "data.eval_fraction"),
        ("data_seed", "train.seed"),
    ],
)
def test_a_known_spelling_says_what_else_is_here(theirs, told):
    group, _, name = theirs.rpartition(".")
    with pytest.raises(ConfigError, match=f"{re.escape(theirs)}: unknown key; .*{re.escape(told)}"):
        parse_config(f"{group}: {{{name}: 1}}" if group else f"{name}: 1", RunConfig)


def test_the_longer_name_wins():
    assert alias("train.batch_size").keys != alias("rollout.batch_size").keys


def test_a_name_that_nobody_uses_is_unknown():
    assert alias("train.no_such_thing") is None


@pytest.mark.parametrize("key", ["deepspeed", "fsdp"])
def test_engines_are_the_launchers(key):
    with pytest.raises(ConfigError, match=rf"{key}.*the launcher sets it: accelerate launch --config_file examples/"):
        parse_config(f"{key}: x.json\n", RunConfig)
