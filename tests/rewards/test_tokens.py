"""Scores of tokens and steps: where on an answer each falls, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.rewards.batches import chat_batch, text_batch
from tests.rewards.services import Reply, local_service
from tests.tiny import tiny_bpe_tokenizer, tiny_tokenizer
from tether.config.rewards import HttpReward
from tether.config.source import SourceConfig
from tether.errors import RewardError, RewardResponseError
from tether.inference.judges import load_judges, load_reader
from tether.models.stop_strings import continued
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.ensemble import Ensemble, uncertainty_weighted
from tether.rewards.fake import FakeRewards
from tether.rewards.function import FunctionSource
from tether.rewards.http import http_source
from tether.rewards.server import asked
from tether.rewards.tokens import check_token_scores, judged, steps
from tether.types import RewardOutput

TURNS = [("the cat", "good day nice"), ("it is", "bad"), ("rain", "a red sun")]


def decoded(batch, tokenizer):
    return dataclasses.replace(batch, decode=partial(continued, tokenizer=tokenizer))


@pytest.fixture
def batch():
    """Answers of four, two and four tokens, the end token among them."""
    tokenizer = tiny_tokenizer()
    return decoded(chat_batch(tokenizer, TURNS), tokenizer)


def function(returned, **options):
    return FunctionSource(lambda prompts, completions: returned, "parts", **options)


def test_one_number_a_token(batch):
    output = function([[1, 2.5, 0, -1], [0.5, 0.25], [0, 0, 0, 4]]).score(batch)
    assert output.scores == [2.5, 0.75, 4.0]
    assert output.token_scores == [[1.0, 2.5, 0.0, -1.0], [0.5, 0.25], [0.0, 0.0, 0.0, 4.0]]


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, iter], ids=["numpy", "torch", "tuple", "iterator"])
def test_lists_of_any_library_and_numbers_beside_them(batch, make):
    output = function([make([1.0, 2.0, 0.0, 0.0]), np.float32(0.5), None], missing=-1.0).score(batch)
    assert output.scores == [3.0, 0.5, -1.0]
    assert output.token_scores == [[1.0, 2.0, 0.0, 0.0], [0.0, 0.5], [0.0, 0.0, 0.0, -1.0]]


def test_numbers_alone_are_scores_of_whole_answers(batch):
    assert function([1.0, 2.0, 3.0]).score(batch) == RewardOutput([1.0, 2.0, 3.0])


# "good day nice": good ends at 4, day at 8, nice at 13
@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([[4, 1.0]], [1.0, 0.0, 0.0, 0.0]),
        ([[3, 1.0]], [1.0, 0.0, 0.0, 0.0]),  # within a token: the one that completes it
        ([[5, 1.0]], [0.0, 1.0, 0.0, 0.0]),  # the space before day comes with day
        ([[4, 1.0], [8, -2.0], [12, 0.5]], [1.0, -2.0, 0.5, 0.0]),
        ([(4, 1), (13, 3)], [1.0, 0.0, 0.0, 3.0]),  # the end of the answer: its end token, as for a whole answer
        ([[1, 1.0], [2, 2.0]], [3.0, 0.0, 0.0, 0.0]),  # two steps in one token
        (np.array([[4, 1.0], [8, 2.0]], dtype=object), [1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_a_step_falls_on_the_token_that_completes_it(batch, pairs, wanted):
    output = function([pairs, 1.0, 1.0]).score(batch)
    assert output.token_scores[0] == wanted
    assert output.scores[0] == sum(wanted)


def test_steps_in_bytes_of_letters():
    """Where one letter is several tokens, the last of them completes it."""
    pieces = [b"caf", b"\xc3", b"\xa9", b"!"]
    batch = dataclasses.replace(
        text_batch("café!"),
        response_ids=[[0, 1, 2, 3, 9]],
        decode=lambda ids, before: b"".join(pieces[i] for i in ids if i < 4).decode(errors="replace"),
    )
    assert function([[[3, 1.0], [4, 2.0]]]).score(batch).token_scores == [[1.0, 0.0, 2.0, 0.0, 0.0]]


@pytest.mark.parametrize("text", ["good day nice", "the cat sees a red sun and likes it"])
def test_every_end_finds_its_token_also_in_byte_pairs(text):
    tokenizer = tiny_bpe_tokenizer()
    batch = decoded(chat_batch(tokenizer, [("it is", text)]), tokenizer)
    (ids,), texts = batch.response_ids, [tokenizer.decode([i], skip_special_tokens=True) for i in batch.response_ids[0]]
    assert "".join(texts) == text
    for end in range(1, len(text) + 1):
        (tokens,) = function([[[end, 1.0]]]).score(batch).token_scores
        lengths = [len("".join(texts[: t + 1])) for t in range(len(ids))]
        at = len(ids) - 1 if end == len(text) else next(t for t, length in enumerate(lengths) if length >= end)
        assert tokens.index(1.0) == at


def test_characters_stand_in_for_tokens_where_there_is_no_tokenizer():
    output = function([[[2, 1.0], [5, 2.0]], 0.5]).score(text_batch("abcde", ""))
    assert output.token_scores == [[0.0, 1.0, 0.0, 0.0, 2.0], [0.5]]
    assert steps(output, text_batch("abcde", "")) == [[[2, 1.0], [5, 2.0]], 0.5]
    assert function([[[0, 1.0]]]).score(text_batch("")).scores == [1.0]


MALFORMED = {
    "too few": [1.0, 2.0, 3.0],
    "too many": [1.0] * 5,
    "nested": [[1.0], [2.0], [3.0], [4.0]],
    "nothing": [],
    "a pair and a number": [[4, 1.0], 2.0],
    "triples": [[4, 1.0, 0.0]],
    "an end past the answer": [[14, 1.0]],
    "an end at the start": [[0, 1.0]],
    "ends that fall": [[8, 1.0], [4, 1.0]],
    "one end twice": [[13, 1.0], [13, 1.0]],
    "an end between characters": [[4.5, 1.0]],
    "a truth value as an end": [[True, 1.0]],
    "text as an end": [["good", 1.0]],
}
UNUSABLE = {
    "a token that is NaN": ([1.0, math.nan, 0.0, 0.0], "token 1 of answer 0 of 3"),
    "a token that is text": ([1.0, 0.0, "1", 0.0], "token 2 of answer 0 of 3"),
    "a step that is None": ([[4, 1.0], [8, None]], "step 1 of answer 0 of 3"),
    "a step beyond float32": ([[4, 1e300]], "step 0 of answer 0 of 3"),
}


@pytest.mark.parametrize("part", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_list_is_refused_in_words(batch, part):
    with pytest.raises(RewardResponseError) as caught:
        function([part, 1.0, 1.0]).score(batch)
    told = str(caught.value)
    assert told.startswith("reward function parts returned [") and "for answer 0 of 3 (counted from 0); wanted" in told
    assert told.endswith(
        "wanted one finite number, one for each of its 4 tokens, or [end, score] for each of its steps, the ends "
        "rising to at most 13, the answer's characters"
    )


@pytest.mark.parametrize(("part", "where"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_part_without_a_finite_number_is_named(batch, part, where):
    with pytest.raises(RewardResponseError, match=rf"parts returned .* for {where} \(counted from 0\); wanted"):
        function([part, 1.0, 1.0]).score(batch)


def test_lists_that_add_up_to_no_finite_number_are_refused(batch):
    with pytest.raises(RewardResponseError, match="for answer 0 of 3"):
        function([[9e14, 9e14, 0.0, 0.0], 1.0, 1.0]).score(batch)


def test_a_function_is_given_token_ids_if_it_names_them(batch):
    def tokens(prompts, completions, completion_ids, **columns):
        assert columns == {}
        return [[float(token) for token in ids] for ids in completion_ids]

    assert FunctionSource(tokens, "tokens").score(batch).token_scores == batch.response_ids
    with pytest.raises(RewardError, match=r"reward function tokens asks for completion_ids, .* model\.path"):
        FunctionSource(tokens, "tokens").score(text_batch("a"))


# Sources put together


def part(name, returned, weight=1.0, **options):
    return Part(name, weight, function(returned), **options)


def test_a_sum_adds_scores_token_by_token(batch):
    source = WeightedSum([part("a", [[1, 2, 3, 4], 5, 6], 0.5), part("b", [[[4, 10.0]], 1, 2])])
    output = source.score(batch)
    assert output.scores == [15.0, 3.5, 5.0]
    assert output.token_scores == [[10.5, 1.0, 1.5, 2.0], [0.0, 3.5], [0.0, 0.0, 0.0, 5.0]]
    assert output.components == {"a": [10.0, 5.0, 6.0], "b": [10.0, 1.0, 2.0]}


def test_the_mean_and_the_clip_fall_on_the_last_token(batch):
    normed = part("a", [[1, 2, 3, 4], 5, 6], 2.0, norm=(4.0, 0.5))
    output = WeightedSum([normed]).score(batch)
    assert output.scores == [24.0, 4.0, 8.0]  # 2 · (sum − 4) / .5
    assert output.token_scores == [[4.0, 8.0, 12.0, 0.0], [0.0, 4.0], [0.0, 0.0, 0.0, 8.0]]
    output = WeightedSum([part("a", [[1, 2, 3, 4], 5, 6], 2.0, bounds=(-1.0, 5.5))]).score(batch)
    assert output.scores == [11.0, 10.0, 11.0]
    assert output.token_scores == [[2.0, 4.0, 6.0, -1.0], [0.0, 10.0], [0.0, 0.0, 0.0, 11.0]]


@pytest.mark.parametrize(
    ("reduce", "scores", "first"),
    [
        (min, [6.0, 2.0, 3.0], [0.0, 3.0, 0.0, 3.0]),  # the lower of the two
        (lambda row: sum(row) / len(row), [8.0, 2.5, 4.5], [0.5, 2.5, 1.5, 3.5]),
        (partial(uncertainty_weighted, coef=0.5), [6.0, 2.375, 3.375], [0.5, 2.5, 1.5, 1.5]),  # variances 4, 1/4, 9/4
    ],
    ids=["min", "mean", "uwo"],
)
def test_an_ensemble_reduces_whole_answers_and_shares_their_tokens(batch, reduce, scores, first):
    members = [part("a", [[1, 2, 3, 4], 3, 6]), part("b", [[[8, 3.0], [13, 3.0]], 2, 3])]
    output = Ensemble(members, reduce, "jury").score(batch)
    assert output.scores == scores
    assert output.token_scores[0] == first
    assert all(sum(row) == score for row, score in zip(output.token_scores, scores, strict=True))


def test_sources_without_parts_stay_without(batch):
    source = WeightedSum([Part("a", 2.0, FakeRewards(lambda query, response: float(len(response))))])
    assert source.score(batch).token_scores is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0], [1.0, 1.0]], r"lengths \[1, 2\] \(list\) for answers of \[2, 2\]"),
        ([[1.0, 0.0], [0.0, math.inf]], "token 1 of answer 1 of 2"),
    ],
)
def test_token_scores_of_a_source_of_ones_own_are_checked(rows, message):
    with pytest.raises(RewardResponseError, match=message):
        check_token_scores(RewardOutput([1.0, 2.0], token_scores=rows), [2, 2], "mine")
    check_token_scores(RewardOutput([1.0, 2.0], token_scores=[[0.5, 0.5], [2.0, 0.0]]), [2, 2], "mine")


# Over HTTP


def service(url, **section):
    config = HttpReward.model_validate({"type": "http", "url": url, "retries": 0} | section)
    return http_source(config, "far", "r", tiny_tokenizer())


def test_a_service_scores_steps(batch):
    def by_step(payload):
        answers = {"good day nice": [[4, 1.0], [13, 2.0]], "bad": 0.5, "a red sun": [[1, -1.0]]}
        return Reply({"scores": [answers[text] for text in payload["responses"]]})

    with local_service(by_step) as local:
        for batch_size in (32, 1):
            output = service(local.url, batch_size=batch_size).score(batch)
            assert output.scores == [3.0, 0.5, -1.0]
            assert output.token_scores == [[1.0, 0.0, 0.0, 2.0], [0.0, 0.5], [-1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("part", [[1.0, 2.0, 3.0, 4.0], [0.5], [[4, "1"]], [[14, 1.0]], [], {"4": 1.0}], ids=repr)
def test_a_service_knows_no_tokens_and_a_malformed_list_is_refused(batch, part):
    with (
        local_service(lambda payload: Reply({"scores": [part, 1.0, 1.0]})) as local,
        pytest.raises(RewardResponseError, match=r"answer 0 of 3 \(counted from 0\); wanted") as caught,
    ):
        service(local.url).score(batch)
    assert str(caught.value).startswith(f"reward far: {local.url} (status 200) returned ")
    assert "tokens" not in str(caught.value)


def test_steps_have_no_place_in_llamafactorys_protocol(batch):
    with (
        local_service(lambda payload: Reply({"scores": [[[4, 1.0]], 1.0, 1.0]})) as local,
        pytest.raises(RewardResponseError, match=r"wanted one finite number$"),
    ):
        service(local.url, protocol="llamafactory").score(batch)


def test_served_steps_are_those_in_the_process(tmp_path, batch):
    """But for the last word's token, whose score falls on the end token once it went over the wire."""
    file = tmp_path / "judge.py"
    parts = [[[4, 0.5], [8, 0.25], [13, 1.0]], 0.5, [[1, 2.0]]]
    file.write_text(f"def f(prompts, completions, **columns):\n    return {parts}\n")
    rewards = [{"type": "function", "path": str(file), "name": "f", "weight": 0.5}]
    config = SourceConfig.model_validate({"rewards": rewards})
    judges = load_judges(config, load_reader(config))
    request = asked(b'{"prompts": ["a", "b", "c"], "responses": ["good day nice", "bad", "a red sun"]}')
    told = judges.score(request)
    assert told["scores"] == [[[4, 0.25], [8, 0.125], [13, 0.5]], 0.25, [[1, 1.0]]]
    assert told["components"] == {"f": [1.75, 0.5, 2.0]}
    here = WeightedSum([part("f", parts, 0.5)]).score(batch)
    with local_service(lambda payload: Reply(told)) as local:
        there = service(local.url).score(batch)
    assert (there.scores, there.token_scores) == (here.scores, here.token_scores)
    by_token = judged([[1, 2, 3, 4], 0.5, 0.5], batch, "f", by_token=True)
    assert steps(by_token, batch) == [[[4, 1.0], [8, 2.0], [13, 7.0]], 0.5, 0.5]
