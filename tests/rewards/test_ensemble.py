"""Ensembles of reward sources by hand, and their configuration."""

import random

import pytest

from tests.rewards.batches import text_batch
from tests.rewards.encoders import plain_score, save_encoder
from tests.tiny import tiny_tokenizer
from tether.config.load import parse_config
from tether.config.rewards import sources_of
from tether.errors import ConfigError, RewardError
from tether.rewards.build import build_rewards, check_reward_columns
from tether.rewards.combine import Part
from tether.rewards.ensemble import Ensemble, uncertainty_weighted
from tether.rewards.fake import FakeRewards

BASE = "model: {path: m}\ndata: {prompts: p}\ntrain: {max_steps: 1}\noutput_dir: o\nrewards:\n"


def built(text):
    run = parse_config(BASE + text)
    return build_rewards(run.rewards, run.reward_names, roles=None, tokenizer=tiny_tokenizer(), device="cpu")


def function_file(folder):
    file = folder / "judges.py"
    file.write_text(
        "def one(prompts, completions): return [float(c.split()[0]) for c in completions]\n"
        "def two(prompts, completions): return [float(c.split()[1]) for c in completions]\n"
        "def three(prompts, completions): return [float(c.split()[2]) for c in completions]\n"
        "def fails(prompts, completions): raise ValueError('on purpose')\n"
    )
    return file



@pytest.mark.parametrize(
    ("reduce", "wanted"),
    [
        ("mean", [2.0, 1.0]),
        ("min", [1.0, -3.0]),
        # variances of (1, 2, 3) and (-3, 0, 6): 2/3 and 14
        ("uwo, coef: 0.5", [2 - 1 / 3, 1.0 - 7.0]),
        ("uwo, coef: 0", [2.0, 1.0]),
    ],
)
def test_hand_numbers(tmp_path, reduce, wanted):
    file = function_file(tmp_path)
    members = [f"{{type: function, path: {file}, name: {name}}}" for name in ("one", "two", "three")]
    source = built(f"- {{type: ensemble, weight: 2, members: [{', '.join(members)}], reduce: {reduce}}}")
    output = source.score(text_batch("1 2 3", "-3 0 6"))
    assert output.scores == pytest.approx([2 * score for score in wanted])
    assert output.components.pop("ensemble") == pytest.approx(wanted)
    assert output.components == {"ensemble/one": [1, -3], "ensemble/two": [2, 0], "ensemble/three": [3, 6]}


def test_members_are_normalised_clipped_and_weighted_before_they_are_compared_and_logged_as_they_are(tmp_path):
    file = function_file(tmp_path)
    source = built(
        f"- type: ensemble\n  name: jury\n  reduce: min\n  clip: [-1.5, 4]\n  members:\n"
        f"  - {{type: function, path: {file}, name: one, weight: -1}}\n"
        f"  - {{type: function, path: {file}, name: two, clip: 1, weight: 10, norm: [0.5, 2]}}\n"
    )
    output = source.score(text_batch("1 2 3", "-3 0.5 6", "2 -5 1"))
    assert output.components["jury"] == [-1.0, 0.0, -10.0]
    assert output.components["jury/two"] == [2.0, 0.5, -5.0]
    assert output.scores == [-1.0, 0.0, -1.5]


def test_the_worst_case_is_never_above_the_mean_nor_below_a_member():
    draw = random.Random(0)
    for _ in range(200):
        scores = [draw.gauss(0, 3) for _ in range(draw.randint(1, 6))]
        mean = sum(scores) / len(scores)
        assert min(scores) <= mean + 1e-12
        assert uncertainty_weighted(scores, coef=0.3) <= mean + 1e-12
        variance = sum((score - mean) ** 2 for score in scores) / len(scores)
        assert uncertainty_weighted(scores, coef=0.3) == pytest.approx(mean - 0.3 * variance, abs=1e-9)
        assert uncertainty_weighted([score + 5 for score in scores], coef=0.3) == pytest.approx(
            uncertainty_weighted(scores, coef=0.3) + 5
        )


def test_models_as_members(tmp_path):
    paths = [save_encoder(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    members = ", ".join(f"{{type: model, path: {path}, input_format: response}}" for path in paths)
    source = built(f"- {{type: ensemble, members: [{members}], reduce: min}}")
    expected = [[plain_score(path, answer) for answer in ("good", "bad dog")] for path in paths]
    output = source.score(text_batch("good", "bad dog"))
    assert output.components["ensemble/model_0"] == pytest.approx(expected[0], abs=1e-5)
    assert output.components["ensemble/model_1"] == pytest.approx(expected[1], abs=1e-5)
    assert output.scores == pytest.approx([min(pair) for pair in zip(*expected, strict=True)], abs=1e-5)


def test_a_member_that_fails_is_named_with_its_ensemble(tmp_path):
    file = function_file(tmp_path)
    source = built(
        f"- {{type: ensemble, members: [{{type: function, path: {file}, name: one}}, "
        f"{{type: function, path: {file}, name: fails}}]}}"
    )
    with pytest.raises(RewardError, match="reward function ensemble/fails raised ValueError: on purpose"):
        source.score(text_batch("1"))
    beyond_floats = Part("a", 1e308, FakeRewards(lambda query, response: 1e10))
    with pytest.raises(RewardError, match="reward jury returned inf"):
        Ensemble([beyond_floats], min, "jury").score(text_batch("a"))


def test_mistakes_of_members_are_told_by_key(tmp_path):
    file = function_file(tmp_path)
    one, two = (f"{{type: function, path: {file}, name: {name}}}" for name in ("one", "two"))
    for reward, message in {
        f"- {{type: ensemble, members: [{one}]}}": r"rewards\.0\.members: got .*, wanted a list of groups of keys, at",
        f"- {{type: ensemble, members: [{one}, {one}]}}": r"rewards\.0: members: names must be unique, got one, one",
        f"- {{type: ensemble, members: [{one}, {two}], reduce: uwo}}": r"rewards\.0: reduce uwo needs coef",
        f"- {{type: ensemble, members: [{one}, {two}], coef: 1}}": r"rewards\.0: reduce mean takes no coef",
        f"- {{type: ensemble, members: [{one}, {{type: model}}]}}": r"rewards\.0\.members\.1\.path: missing",
        f"- {{type: ensemble, members: [{one}, {{type: modle}}]}}": r"rewards\.0\.members\.1\.type: got modle; wan",
        f"- {{type: ensemble, members: [{one}, {{type: regex, patern: a}}]}}": r"members\.1\.patern: unknown key; did",
        f"- {{type: ensemble, members: [{one}, {{type: ensemble, members: []}}]}}": r"members\.1\.type: got ensemble",
        f"- {{type: ensemble, members: [{one}, {{type: adapter, path: x}}]}}": r"type adapter shares the policy's base",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_config(BASE + reward)
    run = parse_config(f"{BASE}- {{type: ensemble, members: [{one}, {{type: math_match, column: gold}}]}}")
    assert [key for key, _ in sources_of(run.rewards)] == ["rewards.0", "rewards.0.members.0", "rewards.0.members.1"]
    check_reward_columns(run.rewards, ["gold"])
    with pytest.raises(ConfigError, match=r"rewards\.0\.members\.1\.column: the dataset has no column gold"):
        check_reward_columns(run.rewards, ["answer"])
    two_members = f"{BASE}- {{type: ensemble, members: [{one}, {two}]}}"
    changed = parse_config(two_members, overrides=["--rewards.0.members.1.weight=3"])
    assert changed.rewards[0].members[1].weight == 3.0
