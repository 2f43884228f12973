"""Ready-made reward functions by hand."""

import threading

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.rewards.batches import text_batch
from tether.config.load import parse_config
from tether.config.rewards import ReadyReward, RewardConfig
from tether.errors import ConfigError, RewardError
from tether.rewards import math_verify
from tether.rewards.build import check_reward_columns, check_rewards
from tether.rewards.ready import length_score, ready_source, repeated_share


def section(kind, **keys) -> ReadyReward:
    return TypeAdapter(RewardConfig).validate_python({"type": kind, **keys})


def scores(kind, *answers, columns=None, **keys):
    return ready_source(section(kind, **keys), "rule").score(text_batch(*answers, **(columns or {}))).scores


def test_length_target():
    assert scores("length_target", "one two three four", " two\n words ", "", target=2) == [-1.0, 0.0, -1.0]
    assert scores("length_target", "four", "fives", "", target=4, unit="characters") == [0.0, -0.25, -1.0]
    assert [length_score(length, 4) for length in (0, 2, 4, 6, 16)] == [-1.0, -0.5, 0.0, -0.5, -3.0]


def test_regex():
    answers = ["the answer is 42.", "42", "forty-two", "a\n42"]
    assert scores("regex", *answers, pattern=r"\d+") == [1.0, 1.0, 0.0, 1.0]
    assert scores("regex", *answers, pattern=r"\A\d+\Z") == [0.0, 1.0, 0.0, 0.0]
    assert scores("regex", *answers, pattern="(?i)THE.*") == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValidationError, match=r"'\(' is not a regular expression"):
        section("regex", pattern="(")


def test_exact_match():
    columns = {"answer": ["yes", " no\n", 42, "a  b"], "gold": ["1"] * 4}
    assert scores("exact_match", " yes ", "No", "42", "a  b", columns=columns) == [1.0, 0.0, 1.0, 1.0]
    assert scores("exact_match", "yes", "1", "1 ", "", columns=columns, column="gold") == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("wanted", [None, 4.0, True, ["4"]])
def test_a_column_that_holds_nothing_to_compare_with_is_named_with_its_row(wanted):
    with pytest.raises(RewardError, match=r"reward rule: answer 1 of 2 \(counted from 0\): column answer holds .*w"):
        scores("exact_match", "4", "4", columns={"answer": ["4", wanted]})


@pytest.mark.parametrize(
    ("wanted", "answer", "score"),
    [
        ("1/2", "so it is 0.5", 1.0),
        (r"\frac{1}{2}", r"thus $\boxed{\frac{2}{4}}$.", 1.0),
        (r"$\frac12$", "0.51", 0.0),
        (0.5, "1/2", 1.0),
        (1000, "1,000", 1.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("x^2+1", "$x^2-1$", 0.0),
        ("{1,2}", r"$\{2, 1\}$", 1.0),
        (r"\$12", r"\boxed{\$12}", 1.0),
        (r"\$32,\!348", "32348", 1.0),
        (r"\$18.90", "18.9", 1.0),
        (r"\$18.90", "18.91", 0.0),
        (r"it is $\$5$", "5", 1.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
        ("42", "first 41, then 42", 1.0),
        ("42", r"\boxed{41}, not 42", 0.0),
    ],
)
def test_math_match(wanted, answer, score):
    assert scores("math_match", answer, columns={"answer": [wanted]}) == [score]


def test_a_column_that_is_no_mathematics_is_named_with_its_row():
    with pytest.raises(RewardError, match=r"answer 1 of 2 .* column answer holds '', wanted a mathematical expression"):
        scores("math_match", "1", "1", columns={"answer": ["1", ""]})


def test_mathematics_in_a_thread_of_a_service():
    got = []
    columns = {"answer": ["1/2", "1/2"]}
    thread = threading.Thread(target=lambda: got.extend(scores("math_match", "0.5", "2", columns=columns)))
    thread.start()
    thread.join()
    assert got == [1.0, 0.0]


def test_an_answer_that_takes_for_ever_does_not_match(monkeypatch):
    monkeypatch.setattr(math_verify, "_SECONDS", 1)
    assert scores("math_match", r"$\boxed{((9^{9^9})^{9^9})!}$", columns={"answer": ["3"]}) == [0.0]


def test_repetition():
    """Of "a b a b a" the pairs are ab ba ab ba: two of four stood there before."""
    assert scores("repetition", "a b a b a", "a b c d", "a a a", "a", "", n=2) == [-0.5, 0.0, -0.5, 0.0, 0.0]
    assert repeated_share(["a", "b", "c", "a", "b", "c"], 3) == 0.25
    assert scores("repetition", "a a a a") == [-0.5]


def test_json_valid():
    valid = ['{"a": [1, null]}', ' "text"\n', "3", "[]", "1" * 5000]
    invalid = ["{'a': 1}", '```json\n{}\n```', "", "NaN", "[1,]", '{"a": 1} {}', "[" * 100_000]
    assert scores("json_valid", *valid, *invalid) == [1.0] * len(valid) + [0.0] * len(invalid)


def test_columns_are_checked_once_they_are_known():
    for kind in ("exact_match", "math_match"):
        sources = [section("json_valid"), section(kind, column="gold")]
        check_rewards(sources)
        check_reward_columns(sources, ["gold"])
        with pytest.raises(ConfigError, match=r"rewards\.1\.column: the dataset has no column gold; .* are a, b"):
            check_reward_columns(sources, ["a", "b"])
        with pytest.raises(RewardError, match="reward rule: the dataset has no column gold; its columns are answer"):
            scores(kind, "1", columns={"answer": ["1"]}, column="gold")


def test_mathematics_needs_its_package(monkeypatch):
    monkeypatch.setattr(math_verify, "find_spec", lambda name: None)
    told = r"rewards\.0: type math_match needs math-verify.*pip install 'tether\[math\]'"
    with pytest.raises(ConfigError, match=told):
        check_rewards([section("math_match")])


def test_mistakes_in_a_file_are_told_by_key():
    base = "model: {path: m}\ndata: {prompts: p}\ntrain: {max_steps: 1}\noutput_dir: o\nrewards:\n"
    for reward, message in {
        "- {type: length_target}": r"line 6: rewards\.0\.target: missing; wanted a whole number above 0",
        "- {type: length_target, target: 3, unit: tokens}": r"rewards\.0\.unit: got tokens, wanted one of words, char",
        "- {type: json_valid, clip: [1, 0]}": r"rewards\.0\.clip: got 1 to 0, wanted the lower number first",
        "- {type: json_valid, norm: [1, 0]}": r"rewards\.0\.norm: got a standard deviation of 0, wanted \[mean, std\]",
        "- {type: json_valid, norm: 1}": r"rewards\.0\.norm: got 1, wanted auto or a list of numbers, exactly 2",
        "- {type: json_valid, clip: 0}": r"rewards\.0\.clip: got 0, wanted a number above 0 or a list of numbers, exac",
        "- {type: json_valid, clip: [1]}": r"rewards\.0\.clip: got \[1\], wanted",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_config(base + reward)
    assert [r.bounds for r in parse_config(base + "- {type: json_valid, clip: 2}").rewards] == [(-2.0, 2.0)]
    assert parse_config(base + "- {type: json_valid, clip: [0, 2]}").rewards[0].bounds == (0.0, 2.0)
    assert parse_config(base + "- {type: json_valid}").rewards[0].bounds is None
