"""The policy's own decoding against ``generate``, the softmax it claims to sample, and plain forwards."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaForCausalLM

from tests.generation.scopes import Scope, answers
from tests.tiny import EOS, KINDS, PAD, VOCAB_SIZE, tiny_causal_lm, tiny_config, tiny_tokenizer
from tether.errors import ConfigError, GenerationError
from tether.generation.batch import drawn_tokens
from tether.generation.hf import HFGenerator
from tether.models.stop_strings import StopStrings
from tether.types import Request, Sampling, noise_key

ALL_STOP = frozenset(range(VOCAB_SIZE))


def queries(n, longest=12, seed=0):
    """Queries of 1 … ``longest`` tokens, words only."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(7, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def requests(n, longest=12, seed=0):
    return [Request(ids, noise_key(seed, "train", i, 0)) for i, ids in enumerate(queries(n, longest, seed))]


def sliding_window_model():
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = tiny_causal_lm("qwen2", **window)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    return model


MODELS = {kind: (lambda kind=kind: tiny_causal_lm(kind, tied=False)) for kind in KINDS}
MODELS["sliding_window"] = sliding_window_model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_generate(name):
    model = MODELS[name]().eval()
    stops = {EOS, 11, 23}
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=sorted(stops), pad_token_id=PAD)
    asked = requests(24)
    got = answers(model, asked, Sampling(20, temperature=0.0, stop_token_ids=frozenset(stops)), batch_size=8)
    for request, completion in zip(asked, got, strict=True):
        wanted = model.generate(torch.tensor([request.token_ids]), generation_config=config)[0]
        assert completion.token_ids == wanted[len(request.token_ids) :].tolist()
        assert completion.finish_reason == ("stop" if wanted[-1].item() in stops else "length")
    assert {completion.finish_reason for completion in got} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_follow_the_softmax_at_the_temperature(temperature):
    model, query, n = tiny_causal_lm("llama").eval(), [8, 20, 13], 4000
    asked = [Request(query, noise_key(3, "train", 0, i)) for i in range(n)]
    drawn = [c.token_ids[0] for c in answers(model, asked, Sampling(1, temperature), batch_size=1000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB_SIZE).double()
    logits = model(torch.tensor([query])).logits[0, -1].detach().double()

    def deviations(temperature):
        """Chi-square of the counts, in standard deviations above its mean; classes too rare for it left out."""
        expected = n * (logits / temperature).softmax(-1)
        common = expected >= 5
        statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
        freedom = common.sum()
        return ((statistic - freedom) / (2 * freedom).sqrt()).item()

    assert deviations(temperature) < 3.5
    assert deviations(temperature * 1.15) > 5, "the test could not tell two temperatures apart"


@pytest.mark.parametrize("kind", KINDS)
def test_text_depends_neither_on_batch_size_nor_on_order(kind):
    model = tiny_causal_lm(kind, tied=False)
    asked, sampling = requests(64), Sampling(48, stop_token_ids=frozenset({EOS}))
    wanted = [c.token_ids for c in answers(model, asked, sampling, batch_size=64)]
    assert len({tuple(ids) for ids in wanted}) > 60
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
    for batch_size in (4, 16, 64):
        shuffled = answers(model, [asked[i] for i in order], sampling, batch_size)
        same = sum(completion.token_ids == wanted[i] for i, completion in zip(order, shuffled, strict=True))
        assert same >= 63


def test_noise_of_a_key_is_its_own():
    model, query = tiny_causal_lm("gpt2"), [8, 20, 13]
    asked = [Request(query, key) for key in (11, 12, 11)]
    first, second, third = (c.token_ids for c in answers(model, asked, Sampling(32)))
    assert first == third != second


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_finished_rows_and_a_cache_of_fixed_size_change_nothing(kind):
    asked = [Request([7 + i, 20, 13][: 1 + i % 3], noise_key(0, "train", i, 0)) for i in range(16)]
    sampling = Sampling(40, stop_token_ids=frozenset({EOS, 9, 30}))
    results, widths = [], []
    for is_static in (False, True):
        scope = Scope(tiny_causal_lm(kind))
        generator = scope.tried(batch_size=16, is_static=is_static)
        results.append(dict(generator.generate(asked, sampling)))
        widths.append({shape[0] for shape in scope.shapes})
    assert len(widths[0]) > 3 and widths[1] == {16}
    for i in range(16):
        cut, kept = results[0][i], results[1][i]
        assert cut.token_ids == kept.token_ids and cut.finish_reason == kept.finish_reason
        torch.testing.assert_close(cut.logprobs, kept.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_static", [False, True])
def test_strings_end_answers_where_whole_answers_contain_them_first(kind, is_static):
    """Whatever is beside an answer: queries of other lengths, rows that are dropped or stay, other batches."""
    tokenizer, model, asked = tiny_tokenizer(), tiny_causal_lm(kind, tied=False), requests(24)
    whole = answers(model, asked, Sampling(30, stop_token_ids=frozenset({EOS})))
    texts = [tokenizer.decode(completion.token_ids) for completion in whole]
    strings = [text[40:47] for text in texts[:6] if len(text) > 60]
    assert len(strings) > 1
    wanted = []
    for completion in whole:
        ids, reason = completion.token_ids, completion.finish_reason
        beginnings = [
            (end, tokenizer.decode(ids[:end], skip_special_tokens=skips))
            for end in range(1, len(ids) + 1)
            for skips in (False, True)
        ]
        ends = [end for end, text in beginnings if any(string in text for string in strings)]
        wanted.append((ids[: ends[0]], "stop") if ends else (ids, reason))
    cut = [len(ids) < len(completion.token_ids) for (ids, _), completion in zip(wanted, whole, strict=True)]
    assert sum(cut) > 3 and {reason for _, reason in wanted} == {"stop", "length"}
    sampling = Sampling(30, stop_token_ids=frozenset({EOS}), text_ends=StopStrings(tokenizer, strings))
    for batch_size in (1, 5, 24):
        generator = HFGenerator(Scope(model), batch_size=batch_size, device="cpu", is_static=is_static)
        got = dict(generator.generate(asked, sampling))
        assert [(got[i].token_ids, got[i].finish_reason) for i in range(24)] == wanted
        for i, completion in enumerate(whole):
            length = len(got[i].token_ids)
            torch.testing.assert_close(got[i].logprobs, completion.logprobs[:length], atol=1e-4, rtol=0)


def test_one_forward_a_token_of_the_longest_answer():
    scope = Scope(tiny_causal_lm("llama"))
    generator = scope.tried(batch_size=4)
    asked = [Request([8, 20, 13], key) for key in range(4)]
    longest = max(len(c.token_ids) for _, c in generator.generate(asked, Sampling(64, 1.0, frozenset(range(2, 20)))))
    assert 1 < longest < 32
    assert len(scope.shapes) == longest
    assert scope.shapes[0] == (1, 3) and all(width == 1 for _, width in scope.shapes[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_an_unpadded_forward(kind, temperature):
    model = tiny_causal_lm(kind).eval()
    asked = [Request([9], 1), Request(list(range(7, 40)), 2), *requests(6)]
    for request, got in zip(asked, answers(model, asked, Sampling(12, temperature), batch_size=8), strict=True):
        ids = torch.tensor([[*request.token_ids, *got.token_ids]])
        logits = model(ids).logits[0, len(request.token_ids) - 1 : -1].detach() / temperature
        wanted = logits.log_softmax(-1)[range(len(got.token_ids)), got.token_ids]
        torch.testing.assert_close(torch.tensor(got.logprobs), wanted, atol=1e-5, rtol=0)


def test_greedy_logprobs_are_at_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, logprobs = drawn_tokens(logits, [torch.Generator()], Sampling(1, temperature=0.0))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(3 - math.log(math.e + math.e**2 + math.e**3), abs=1e-6)


def test_draw_is_in_float32_at_least():
    half, double = (torch.randn(2, 50, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    assert drawn_tokens(half, generators, Sampling(1))[1].dtype == torch.float32
    assert drawn_tokens(double, generators, Sampling(1))[1].dtype == torch.float64


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((64, 30), -torch.inf)
    logits[:, 4] = logits[:, 17] = 0.0
    tokens, logprobs = drawn_tokens(logits, [torch.Generator().manual_seed(i) for i in range(64)], Sampling(1))
    assert set(tokens.tolist()) == {4, 17}
    torch.testing.assert_close(logprobs, torch.full((64,), -math.log(2)))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "kept"),
    [
        (1.0, 1.0, 3, {4, 2, 0}),
        (1.0, 0.5, None, {4, 2}),  # .4 is not enough, .4 + .3 is
        (1.0, 0.7, None, {4, 2}),
        (1.0, 0.71, None, {4, 2, 0}),
        (1.0, 0.01, None, {4}),
        (1.0, 0.5, 2, {4}),  # of the two that top-k keeps, the first has .57
        (1.0, 1.0, 50, {0, 1, 2, 3, 4}),
        (0.5, 0.5, None, {4}),  # .4² of .3 = .53
    ],
)
def test_top_k_and_top_p_draw_from_the_most_likely_and_leave_logprobs_alone(temperature, top_p, top_k, kept):
    probabilities = torch.tensor([0.2, 0.05, 0.3, 0.05, 0.4])
    logits = probabilities.log().expand(400, 5) + 3.0
    sampling = Sampling(1, temperature, top_p=top_p, top_k=top_k)
    tokens, logprobs = drawn_tokens(logits, [torch.Generator().manual_seed(i) for i in range(400)], sampling)
    assert set(tokens.tolist()) == kept
    whole = probabilities ** (1 / temperature) / (probabilities ** (1 / temperature)).sum()
    torch.testing.assert_close(logprobs, whole[tokens].log())
    shares = torch.bincount(tokens, minlength=5) / 400
    wanted = torch.tensor([whole[v] if v in kept else 0.0 for v in range(5)])
    assert (shares - wanted / wanted.sum()).abs().max() < 0.08


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_request(bad, temperature):
    model = tiny_causal_lm("llama", tied=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = bad
    asked = [Request([8, 9], 0), Request([10], 1), Request([8, 33, 9], 2), Request([11], 3)]
    with pytest.raises(GenerationError, match=r"request 2: .*token 0 of the answer"):
        answers(model, asked, Sampling(8, temperature))
    assert len(answers(model, asked[:2], Sampling(1, temperature, ALL_STOP))) == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_lora_policy_decodes_as_its_merged_weights():
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_causal_lm("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    asked, sampling = requests(8), Sampling(16, stop_token_ids=frozenset({EOS}))
    adapted = answers(model, asked, sampling)
    with model.disable_adapter():
        base = answers(model, asked, sampling)
    merged = answers(model.merge_and_unload(), asked, sampling)
    assert [c.token_ids for c in adapted] == [c.token_ids for c in merged] != [c.token_ids for c in base]


class OldNames(LlamaForCausalLM):
    """As models were before ``past_key_values`` was called ``cache``, and as those without position ids are."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        output = super().forward(input_ids, attention_mask, None, past_key_values, use_cache=use_cache)
        return type("Output", (), dict(zip(("logits", "past_key_values"), output.to_tuple(), strict=False)))()


def test_models_with_the_older_cache_argument():
    model, old = tiny_causal_lm("llama"), OldNames(tiny_config("llama"))
    old.load_state_dict(model.state_dict())
    asked, sampling = [Request(ids, i) for i, ids in enumerate(queries(8, longest=1))], Sampling(16)
    got, wanted = answers(old, asked, sampling), answers(model, asked, sampling)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]


def test_the_policy_scope_is_closed_while_the_caller_has_an_answer():
    scope = Scope(tiny_causal_lm("llama").train())
    generator = HFGenerator(scope, batch_size=4, device="cpu")
    sampling = Sampling(24, stop_token_ids=frozenset({EOS, 9, 10, 11, 12}))
    answered = generator.generate(requests(8), sampling)
    for _ in range(5):
        next(answered)
        assert not scope.is_open and scope.model.training and torch.is_grad_enabled()
    answered.close()
    assert not scope.is_open and len(scope.shapes) > 1


class Short(Scope):
    """A policy scope where forwards of more than ``fits`` rows run out of memory, all but the first ``after``."""

    def __init__(self, model, fits, after=0):
        super().__init__(model)
        model.register_forward_hook(self.run_out)
        self.fits, self.after, self.finished = fits, after, 0

    def run_out(self, *args):
        if self.is_open and self.shapes[-1][0] > self.fits:
            self.finished += 1
            if self.finished > self.after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_what_cannot_be_decoded_side_by_side_is_decoded_in_halves_with_the_same_text(kind, after, caplog):
    model, asked = tiny_causal_lm(kind, tied=False).eval(), requests(24)
    sampling = Sampling(16, stop_token_ids=frozenset({EOS, 9, 30, 31}))
    wanted = answers(model, asked, sampling, batch_size=16)
    generator = HFGenerator(Short(model, fits=5, after=after), batch_size=16, device="cpu")
    got = list(generator.generate(asked, sampling))
    assert sorted(position for position, _ in got) == list(range(24)), "each once"
    assert [completion.token_ids for _, completion in sorted(got, key=lambda each: each[0])] == [
        completion.token_ids for completion in wanted
    ]
    assert generator.batch_size == 4
    told = [record.message for record in caplog.records if "out of memory" in record.message]
    assert [text.split("at most ")[1].split()[0] for text in told][-1] == "4"
    caplog.clear()
    assert len(list(generator.generate(asked, sampling))) == 24 and not caplog.records, "it is kept"


def test_batches_that_never_were_full_are_halved_from_their_own_size():
    model = tiny_causal_lm("llama")
    generator = HFGenerator(Short(model, fits=3), batch_size=64, device="cpu")
    assert len(list(generator.generate(requests(6), Sampling(4)))) == 6
    assert generator.batch_size == 3


def test_one_answer_that_cannot_be_decoded_says_what_would_help():
    generator = HFGenerator(Short(tiny_causal_lm("llama"), fits=0, after=1), batch_size=2, device="cpu")
    with pytest.raises(GenerationError, match=r"one answer .*2\.00 GiB.*sampling\.response_length"):
        list(generator.generate(requests(3), Sampling(4)))


def test_random_state_is_left_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    answers(tiny_causal_lm("gpt2"), requests(4), Sampling(8))
    assert torch.equal(before, torch.get_rng_state())


def test_more_positions_than_the_model_has_are_refused():
    model = tiny_causal_lm("gpt2")
    assert len(answers(model, [Request([8] * 120, 0)], Sampling(8))[0].token_ids) == 8
    with pytest.raises(ConfigError, match=r"121 tokens .* 129 positions, but the model has 128: .*max_prompt_length"):
        answers(model, [Request([8], 0), Request([8] * 121, 0)], Sampling(8))
