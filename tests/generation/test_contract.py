"""What every generator does, the fake one included."""

import pytest

from tests.generation import stand_in_vllm
from tests.generation.scopes import Scope
from tests.tiny import EOS, tiny_causal_lm, tiny_tokenizer
from tests.train.runs import tiny_run
from tether.errors import GenerationError
from tether.generation.build import build_generator
from tether.generation.fake import FakeGenerator
from tether.generation.hf import HFGenerator
from tether.models.build import build_roles
from tether.models.stop_strings import StopStrings
from tether.models.tokenizer import load_tokenizer
from tether.types import Generator, Request, Sampling

REQUESTS = [Request([7 + i] * (1 + 5 * (i % 3)), key=100 + i) for i in range(10)]
STOPS = frozenset({EOS, 9, 15, 21, 30})


def hf_generator():
    return HFGenerator(Scope(tiny_causal_lm("llama")), batch_size=4, device="cpu")


def fake_generator():
    """Answers of 1, 2, 3, … tokens, then a stop token and words that no engine would still write."""
    return FakeGenerator(lambda request: [8] * (request.key % 7) + [21, 8, 8, 8, 8, 8, 8])


def vllm_generator(folder, monkeypatch):
    stand_in_vllm.install(monkeypatch)
    config = tiny_run(folder, sampling__vllm={})
    roles = build_roles(config, load_tokenizer(config.model.path), device="cpu", autocast_dtype=None)
    return build_generator(config, roles)


@pytest.fixture(params=[hf_generator, fake_generator, vllm_generator])
def generator(request, tmp_path, monkeypatch):
    made = request.param(tmp_path, monkeypatch) if request.param is vllm_generator else request.param()
    yield made
    made.close()


def test_is_a_generator(generator):
    assert isinstance(generator, Generator)
    generator.sync_weights(tiny_causal_lm("llama"))


def test_answers_every_request_once(generator):
    positions = [i for i, _ in generator.generate(REQUESTS, Sampling(6, 1.0, STOPS))]
    assert sorted(positions) == list(range(10))


def test_nothing_to_answer(generator):
    assert list(generator.generate([], Sampling(6, 1.0, STOPS))) == []


@pytest.mark.parametrize("max_new_tokens", [1, 2, 6])
def test_answers_end_at_the_first_stop_token_or_at_the_limit(generator, max_new_tokens):
    reasons = set()
    for _, completion in generator.generate(REQUESTS, Sampling(max_new_tokens, 1.0, STOPS)):
        *body, last = completion.token_ids
        assert not STOPS.intersection(body)
        assert completion.finish_reason == ("stop" if last in STOPS else "length")
        assert len(completion.token_ids) == max_new_tokens or last in STOPS
        assert len(completion.token_ids) <= max_new_tokens
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("stops", [frozenset(), frozenset({EOS, 9})])
@pytest.mark.parametrize("max_new_tokens", [2, 6])
def test_answers_end_at_the_first_string_in_their_text_as_at_a_stop_token(generator, max_new_tokens, stops):
    tokenizer, strings, reasons = tiny_tokenizer(), ["dog", "not", "ru", "e s", "i"], set()
    sampling = Sampling(max_new_tokens, 1.0, stops, text_ends=StopStrings(tokenizer, strings))
    for _, completion in generator.generate(REQUESTS, sampling):
        ids = completion.token_ids
        prefixes = [ids[:end] for end in range(1, len(ids) + 1)]
        texts = [[tokenizer.decode(each, skip_special_tokens=skips) for skips in (False, True)] for each in prefixes]
        holds = [any(string in text for string in strings for text in both) for both in texts]
        ends = [end or token in stops for end, token in zip(holds, ids, strict=True)]
        assert not any(ends[:-1])
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(ids) == max_new_tokens
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_without_stop_tokens_only_the_limit_ends_an_answer(generator):
    for _, completion in generator.generate(REQUESTS, Sampling(3)):
        assert len(completion.token_ids) == 3 and completion.finish_reason == "length"


def test_the_same_keys_give_the_same_answers(generator):
    sampling = Sampling(6, 1.0, STOPS)
    first, second = (dict(generator.generate(REQUESTS, sampling)) for _ in range(2))
    assert first == second


def test_logprobs_are_none_or_one_a_token(generator):
    for _, completion in generator.generate(REQUESTS, Sampling(6, 1.0, STOPS)):
        assert completion.logprobs is None or (
            len(completion.logprobs) == len(completion.token_ids) and max(completion.logprobs) <= 0
        )


def test_the_fake_repeats_its_answers_and_yields_the_shortest_first():
    fake = FakeGenerator([[8, 8, 8, EOS], [8, EOS]])
    got = list(fake.generate(REQUESTS[:3], Sampling(5, 1.0, STOPS)))
    assert [(i, c.token_ids) for i, c in got] == [(1, [8, EOS]), (0, [8, 8, 8, EOS]), (2, [8, 8, 8, EOS])]


def test_the_fake_refuses_an_answer_that_no_engine_would_end():
    with pytest.raises(GenerationError, match=r"request 1: .*no stop token, no stop string and fewer than 5"):
        list(FakeGenerator([[EOS], [8, 8]]).generate(REQUESTS[:2], Sampling(5, 1.0, STOPS)))


def test_the_fake_counts_weight_syncs():
    fake = FakeGenerator([[EOS]])
    fake.sync_weights(tiny_causal_lm("llama"))
    assert fake.num_syncs == 1
