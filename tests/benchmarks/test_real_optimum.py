"""The benchmark on a real model: its formulas by plain sums and known policies, its measurements on a tiny model."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from benchmarks.real_optimum import (
    LEAST,
    MOST,
    OptimumMeter,
    begins_well,
    drawn_words,
    is_wanted,
    least_kl,
    measured,
    next_logprobs,
    one_token,
    optimum,
    recipe,
    sixteen_tokens,
    standard_errors,
    standing,
    success_and_kl,
)

from tests.tiny import save_tiny, tiny_causal_lm
from tether.train.display import NullDisplay

BETA = 0.1


def languages(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of a policy and a reference over nine tokens after three prompts, and what is rewarded."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64).log_softmax(dim=-1)
    rewarded = torch.rand(3, 9, generator=generator) < 0.4
    rewarded[:, 0], rewarded[:, 1] = True, False  # something is, and something is not
    return policy, reference, rewarded


def tilted(reference: torch.Tensor, rewarded: torch.Tensor, beta: float) -> torch.Tensor:
    """The best policy, π_ref · e^{r/β} / Z, by the definition."""
    return (reference + rewarded.double() / beta).log_softmax(dim=-1)


def test_rates_and_kl_are_the_sums_over_the_vocabulary():
    policy, reference, rewarded = languages()
    s, kl = success_and_kl(policy, reference, rewarded)
    for x in range(3):
        pi, ref = [math.exp(v) for v in policy[x].tolist()], [math.exp(v) for v in reference[x].tolist()]
        assert s[x].item() == pytest.approx(sum(p for p, r in zip(pi, rewarded[x].tolist(), strict=True) if r))
        assert kl[x].item() == pytest.approx(sum(p * math.log(p / q) for p, q in zip(pi, ref, strict=True)))


@pytest.mark.parametrize("beta", [0.1, 0.2, 3.0])
def test_the_optimum_is_what_the_tilted_reference_earns(beta):
    _, reference, rewarded = languages()
    s, kl = success_and_kl(tilted(reference, rewarded, beta), reference, rewarded)
    p, _ = success_and_kl(reference, reference, rewarded)
    torch.testing.assert_close(s - beta * kl, optimum(p, beta), rtol=1e-12, atol=0)


def test_what_a_policy_misses_of_the_optimum_is_beta_times_its_kl_to_the_best_one():
    policy, reference, rewarded = languages()
    best = tilted(reference, rewarded, BETA)
    s, kl = success_and_kl(policy, reference, rewarded)
    p, _ = success_and_kl(reference, reference, rewarded)
    _, distance = success_and_kl(policy, best, rewarded)
    torch.testing.assert_close(optimum(p, BETA) - (s - BETA * kl), BETA * distance, rtol=1e-10, atol=0)


def test_the_reference_stands_at_0_and_the_best_policy_at_1():
    _, reference, rewarded = languages()
    p, nothing = success_and_kl(reference, reference, rewarded)
    at_start = standing(p, nothing, p, beta=BETA)
    assert (at_start.kl, at_start.fraction) == (0.0, 0.0)
    assert math.isnan(at_start.kl_efficiency)
    s, kl = success_and_kl(tilted(reference, rewarded, BETA), reference, rewarded)
    at_best = standing(s, kl, p, beta=BETA)
    assert at_best.fraction == pytest.approx(1.0, abs=1e-12)
    assert at_best.kl_efficiency == pytest.approx(1.0, abs=1e-12)  # a tilt by the reward alone wastes no KL


def test_means_over_prompts_by_hand():
    s, kl, p = (torch.tensor(values, dtype=torch.float64) for values in ([0.5, 1.0], [0.4, 2.0], [0.25, 0.5]))
    now = standing(s, kl, p, beta=1.0)
    best = (math.log(0.75 + 0.25 * math.e) + math.log(0.5 + 0.5 * math.e)) / 2
    least = (0.5 * math.log(2.0) + 0.5 * math.log(0.5 / 0.75) + math.log(2.0)) / 2
    assert now.success == pytest.approx(0.75)
    assert now.kl == pytest.approx(1.2)
    assert now.objective == pytest.approx(0.75 - 1.2)
    assert now.fraction == pytest.approx((0.75 - 1.2 - 0.375) / (best - 0.375))
    assert now.kl_efficiency == pytest.approx(least / 1.2)


def test_no_policy_spends_less_than_the_least_kl():
    for seed in range(50):
        policy, reference, rewarded = languages(seed)
        s, kl = success_and_kl(policy, reference, rewarded)
        p, _ = success_and_kl(reference, reference, rewarded)
        assert (least_kl(s, p) <= kl + 1e-12).all()


def test_least_kl_of_sure_success_is_minus_log_p():
    sure, p = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.2, 0.2], dtype=torch.float64)
    torch.testing.assert_close(least_kl(sure, p), torch.tensor([-math.log(0.2), -math.log(0.8)], dtype=torch.float64))


def test_next_logprobs_of_a_query_are_those_of_the_model_alone_with_it():
    model = tiny_causal_lm().eval()
    queries = [[7, 8, 9, 10], [20, 21], [30]]
    together = next_logprobs(model, queries, bf16=False)
    for row, query in zip(together, queries, strict=True):
        alone = model(input_ids=torch.tensor([query])).logits[0, -1].double().log_softmax(dim=-1)
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together.exp().sum(dim=1), torch.ones(3, dtype=torch.float64))


def test_rewards_read_the_text_and_the_column():
    texts = [" big", "small", "bigger", "", " Big "]
    assert is_wanted(texts, texts, [["a", "big"], ["big"], ["big"], ["big"], ["Big"]]) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_first_word_is_judged_once_the_character_after_it_is_written():
    texts = [" you, of me", "often", "\n", ", and", "of. The", "", "..."]
    words = [["you"], ["of"], [""], [",", "x"], ["of"], ["a"], ["."]]
    ends, scores = [5, 5, 1, 2, 3, 0, 3], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert begins_well(texts, texts, words) == [[[end, score]] for end, score in zip(ends, scores, strict=True)]


def test_drawn_words_are_between_a_tenth_and_three_tenths_of_the_answers():
    texts = [" a", "a", " b", "c", "d", " e", "f", "g", "h", "", " "]
    probabilities = [0.2, 0.15, 0.25, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.09, 0.1]
    seen = set()
    for seed in range(40):
        words = drawn_words(probabilities, texts, random.Random(seed))
        assert words == drawn_words(probabilities, texts, random.Random(seed))
        assert "" not in words
        assert "a" not in words  # .35 with and without a space before it
        share = sum(p for p, text in zip(probabilities, texts, strict=True) if text.strip() in words)
        assert LEAST - 1e-12 <= share <= MOST + 1e-12
        seen.add(tuple(sorted(words)))
    assert len(seen) > 5
    assert ("b",) in seen


def test_no_words_fit_a_reference_that_is_sure():
    with pytest.raises(ValueError, match="no words"):
        drawn_words([0.99, 0.01], [" a", " b"], random.Random(0))


def test_measured_by_hand():
    before = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    after = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    kl = torch.tensor([[0.8, 0.8, 0.1, -0.1], [2.0, 2.0, 1.0, 3.0]], dtype=torch.float64)
    s, spent, p = (torch.tensor(values, dtype=torch.float64) for values in ([0.5, 1.0], [0.4, 2.0], [0.25, 0.5]))
    assert measured(before, after, kl, beta=1.0) == standing(s, spent, p, beta=1.0)


def test_standard_errors_of_means_are_those_of_the_textbook():
    generator = torch.Generator().manual_seed(0)
    before = (torch.rand(4, 400, generator=generator) < 0.2).double()
    after = (torch.rand(4, 400, generator=generator) < 0.7).double()
    kl = torch.rand(4, 400, generator=generator, dtype=torch.float64)
    errors = standard_errors(before, after, kl, beta=BETA, seed=1)
    for error, numbers in ((errors.success, after), (errors.kl, kl)):
        expected = math.sqrt(float((numbers.var(dim=1) / 400).sum())) / 4
        assert error == pytest.approx(expected, rel=0.12)
    again = standard_errors(before, after, kl, beta=BETA, seed=1)
    assert errors == again


def test_standard_errors_see_that_answers_share_their_noise():
    """The objective of a policy that is the reference, over what the reference earned in the same answers, is sure."""
    before = (torch.rand(4, 400, generator=torch.Generator().manual_seed(0)) < 0.2).double()
    errors = standard_errors(before, before, torch.zeros(4, 400, dtype=torch.float64), beta=BETA, seed=1)
    assert errors.success > 0.005
    assert errors.fraction == 0.0


def test_the_meter_tells_the_start_and_every_few_updates():
    model = tiny_causal_lm().eval()
    queries = [[7, 8], [9, 10]]
    rewarded = torch.zeros(2, 40, dtype=torch.bool)
    rewarded[:, 7:20] = True
    meter = OptimumMeter(queries, rewarded, beta=BETA, every=2, bf16=False)

    class State:
        global_step, max_steps = 0, 5

    meter.on_train_begin(None, State, None, model=model)
    before = next_logprobs(model, queries, bf16=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    after = next_logprobs(model, queries, bf16=False)
    for State.global_step in range(1, 6):
        meter.on_step_end(None, State, None, model=model)
    assert [updates for updates, _, _ in meter.course] == [0, 2, 4, 5]
    assert meter.course[0][2].fraction == 0.0
    s, kl = success_and_kl(after, before, rewarded)
    p, _ = success_and_kl(before, before, rewarded)
    assert kl.min() > 0.01
    assert all(now == standing(s, kl, p, beta=BETA) for _, _, now in meter.course[1:])


TINY = ["--train.bf16=false", "--train.rollout_batch_size=32", "--train.micro_batch_size=8"]
TINY_PROMPTS = ("the cat", "a dog", "you", "we see", "it is", "i", "the rain was", "one day")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny model in a folder; the benchmark's prompts are of its words."""
    monkeypatch.setattr("benchmarks.real_optimum.PROMPTS", TINY_PROMPTS)
    return save_tiny(tmp_path / "tiny")


def test_one_token_on_a_tiny_model_goes_most_of_the_way(tiny, tmp_path):
    config = recipe(1, tiny, tmp_path / "out", [*TINY, "--train.max_steps=20", "--train.learning_rate=0.01"])
    trial = one_token(config, NullDisplay())
    assert all(LEAST <= rate <= MOST for rate in trial.start_rates)
    assert trial.course[0].fraction == 0.0
    assert trial.course[-1].episodes == 20 * 32
    assert trial.course[-1].fraction == trial.end.fraction > 0.5


def test_sixteen_tokens_on_a_tiny_model_are_measured_on_the_runs_own_answers(tiny, tmp_path):
    own = ["--train.max_steps=2", "--sampling.response_length=6", "--model.lora.target_modules=all-linear"]
    config = recipe(16, tiny, tmp_path / "out", [*TINY, *own])
    trial = sixteen_tokens(config, NullDisplay(), samples=12)
    assert len(trial.start_rates) == len(TINY_PROMPTS)
    assert [point.episodes for point in trial.course] == [0, 32, 64]
    assert trial.course[0].kl == 0.0 != trial.course[1].kl  # the first rollout is the start policy's
    answers = [json.loads(line) for line in (tmp_path / "out/run/samples.jsonl").read_text().splitlines()]
    ends = [row for row in answers if row["step"] == 2]
    assert len(ends) == 12 * len(TINY_PROMPTS)
    assert trial.end.success == pytest.approx(sum(row["score"] for row in ends) / len(ends))
    assert trial.end.kl == pytest.approx(sum(row["kl"] for row in ends) / len(ends))
    starts = [row for row in answers if row["step"] == 0 and row["prompt"] == TINY_PROMPTS[2]]
    assert trial.start_rates[2] == pytest.approx(sum(row["score"] for row in starts) / 12)
    assert 0 < trial.errors.success < 0.1
