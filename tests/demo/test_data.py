"""What the demo ships: prompts, pairs and recipes."""

import json
from collections import Counter

import pytest

from tether.demo.make_pairs import COLD, NUM_HELD_OUT, NUM_PAIRS, NUM_PROMPTS, WARM
from tether.demo.prompts import everyday_prompts
from tether.demo.run import DATA, recipe


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_shipped_prompts_are_those_of_the_script():
    train, held_out = everyday_prompts(NUM_PROMPTS, NUM_HELD_OUT, seed=1)
    assert [row["prompt"] for row in rows("prompts.jsonl")] == train
    assert [row["prompt"] for row in rows("held_out.jsonl")] == held_out


def test_enough_held_out_prompts_none_of_them_trained_on():
    held_out = {row["prompt"] for row in rows("held_out.jsonl")}
    trained = {row["prompt"] for name in ("prompts.jsonl", "pairs.jsonl") for row in rows(name)}
    assert len(held_out) == NUM_HELD_OUT >= 128
    assert not held_out & trained


@pytest.mark.parametrize("seed", [1, 2])
def test_held_out_prompts_share_no_subject_with_the_others(seed):
    train, held_out = everyday_prompts(900, 450, seed=seed)
    assert len(set(train)) == 900 and len(set(held_out)) == 450
    frame = "What do you think of "  # with every prompt drawn, each subject of its family is behind it once
    subjects = [{prompt[len(frame) :] for prompt in side if prompt.startswith(frame)} for side in (train, held_out)]
    assert [len(side) for side in subjects] == [36, 18]
    assert not subjects[0] & subjects[1]


def test_other_seed_other_prompts():
    assert everyday_prompts(50, 20, seed=1) == everyday_prompts(50, 20, seed=1)
    assert everyday_prompts(50, 20, seed=1) != everyday_prompts(50, 20, seed=2)


def test_pairs_hold_two_answers_and_nothing_of_a_judge():
    pairs = rows("pairs.jsonl")
    prompts = {row["prompt"] for row in rows("prompts.jsonl")}
    assert len(pairs) >= 250
    for pair in pairs:
        assert pair.keys() == {"prompt", "chosen", "rejected"}
        assert pair["prompt"] in prompts
        assert pair["chosen"].strip() and pair["rejected"].strip() and pair["chosen"] != pair["rejected"]
        assert not any(text in pair[side] for text in (WARM, COLD, "<|im_") for side in pair)
    assert max(Counter(pair["prompt"] for pair in pairs).values()) == NUM_PAIRS


def test_recipes_load_and_agree(tmp_path):
    reward, ppo = recipe(tmp_path, model=tmp_path / "base", seed=7)
    assert reward.train.seed == ppo.train.seed == 7
    assert reward.model.path == ppo.model.path == str(tmp_path / "base")
    assert ppo.rewards[0].type == "adapter" and ppo.rewards[0].path == str(reward.output_dir)
    assert reward.data.system_prompt == ppo.data.system_prompt
    assert ppo.value_kind == "adapter"
