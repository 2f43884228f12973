"""Tables behind the interface of a model output the table's rows, and answers are drawn from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.toys.language import END, random_language
from benchmarks.toys.models import TablePolicy
from benchmarks.toys.run import judged, toy_prompts, toy_tokenizer
from benchmarks.toys.tables import TableCritic, TableGenerator, gumbel_noise, table_roles

from tether.data.collate import collate
from tether.models.forward import head_matches
from tether.types import Generator, Request, Sampling, noise_key

LANGUAGE = random_language(3, 3, 3, seed=4, end_bias=0.0)
ANSWERS = [[1, 2, END], [END], [2, 2, 1], [1, END], [2, 1, END], [1, 1, 1]]


def moved_policy():
    """A policy that is not the reference."""
    noise = torch.randn(LANGUAGE.ref_logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TablePolicy(replace(LANGUAGE, ref_logprobs=LANGUAGE.ref_logprobs + noise))


def test_the_trainers_forward_reads_the_table():
    """Log-probabilities and values of each response token, for queries of unequal length and answers of all lengths."""
    roles = table_roles(LANGUAGE, toy_tokenizer(LANGUAGE), with_reference=True, with_critic=True)
    policy, critic = roles.role("policy").model, roles.role("value").head
    assert head_matches(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.rows.weight.normal_(generator=generator)
        critic.weight.normal_(generator=generator)
    prompts = [i % LANGUAGE.num_prompts for i in range(len(ANSWERS))]
    batch = collate([LANGUAGE.query(x) for x in prompts], ANSWERS)
    out, ref = roles.score_pass(batch, 0.7), roles.ref_logprobs(batch, 1.0)
    for i, (x, answer) in enumerate(zip(prompts, ANSWERS, strict=True)):
        for t, token in enumerate(answer):
            state = LANGUAGE.number(answer[:t])
            row = policy.rows.weight[x, state] / 0.7
            assert out.logprobs[i, t].item() == pytest.approx((row[token] - row.logsumexp(0)).item(), abs=1e-6)
            assert ref[i, t].item() == pytest.approx(LANGUAGE.ref_logprobs[x, state, token].item(), abs=1e-6)
            assert out.values[i, t].item() == critic.weight[0, x * LANGUAGE.num_prefixes + state].item()


def test_a_critic_has_a_value_for_every_state_and_starts_at_0():
    critic = TableCritic(LANGUAGE)
    assert critic.weight.numel() == 3 * 7
    assert not critic.weight.any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_are_drawn_from_the_table(temperature):
    """Every answer occurs in proportion to its probability, within five standard errors."""
    policy, each = moved_policy(), 4000
    generator = TableGenerator(policy)
    assert isinstance(generator, Generator)
    logprobs = (policy.rows.weight.detach().double() / temperature).log_softmax(-1)
    requests = [
        Request(LANGUAGE.query(x), noise_key(0, "train", x, sample)) for x in range(3) for sample in range(each)
    ]
    sampling = Sampling(LANGUAGE.max_length, temperature, frozenset({END}))
    counts: dict[tuple[int, ...], int] = {}
    for position, completion in generator.generate(requests, sampling):
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == END)
        key = (position // each, *completion.token_ids)
        counts[key] = counts.get(key, 0) + 1
    assert sum(counts.values()) == len(requests)
    mass = 0.0
    for (x, *tokens), count in counts.items():
        p = math.exp(sum(logprobs[x, LANGUAGE.number(tokens[:t]), token].item() for t, token in enumerate(tokens)))
        assert count / each == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / each))
        mass += p
    assert mass == pytest.approx(3.0, abs=0.01), "answers that never came"


def test_an_answer_depends_on_its_request_alone():
    generator, sampling = TableGenerator(moved_policy()), Sampling(LANGUAGE.max_length, 1.0, frozenset({END}))
    requests = [Request(LANGUAGE.query(i % 3), noise_key(7, "train", i % 3, i)) for i in range(50)]
    together = dict(generator.generate(requests, sampling))
    backwards = dict(generator.generate(requests[::-1], sampling))
    assert [backwards[49 - i] for i in range(50)] == [together[i] for i in range(50)]
    assert dict(generator.generate(requests[7:8], sampling))[0] == together[7]
    assert len({tuple(completion.token_ids) for completion in together.values()}) > 5


def test_noise_is_gumbel_noise():
    """Its mean is Euler's constant and its variance π²/6, and positions do not share noise."""
    keys = torch.arange(50_000).numpy().astype("uint64")
    first, second = gumbel_noise(keys, 0, 2), gumbel_noise(keys, 1, 2)
    assert first.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert first.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    for other in (second[:, 0], second[:, 1], first[:, 1]):
        assert abs(torch.corrcoef(torch.stack([first[:, 0], other]))[0, 1].item()) < 0.02


def test_the_judge_scores_letters():
    texts = [prompt.text for prompt in toy_prompts(LANGUAGE)]
    assert texts == ["1 0 1", "2 0 1", "1 1 0 1"]
    scores = judged(LANGUAGE, [texts[2], texts[0], texts[1]], ["", "1 2", "2 2 1"])
    assert scores == [LANGUAGE.scores[2, 0], LANGUAGE.scores[0, 4], LANGUAGE.scores[1, 13]]
