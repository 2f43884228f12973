"""Models that keep more than keys and values of what they read, and queries that several answers begin with."""

import logging
import weakref

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import flash_attention_mask

from tests.generation.scopes import Scope, answers
from tests.tiny import BOS, EOS, PAD, VOCAB_SIZE, tiny_causal_lm
from tether.generation import caches, decoding
from tether.generation.batch import Decoding
from tether.generation.caches import ROOM, RoomyLayer, cuttable
from tether.generation.hf import HFGenerator, batches
from tether.types import Request, Sampling, noise_key

ATTENTION = {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = ATTENTION | {"head_dim": 4, "sliding_window": 4}
CONFIGS = {
    "gemma2": WINDOW,
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "mamba": {"state_size": 4},
    "jamba": ATTENTION
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
    | {"mamba_d_state": 4, "mamba_dt_rank": 4},
    "lfm2": ATTENTION | {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": ATTENTION | {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4, "head_dim": 4},
    "bart": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "init_std": 0.3},
    "roberta": {"num_attention_heads": 4, "intermediate_size": 32, "is_decoder": True}
    | {"pad_token_id": EOS},  # within a text a pad would count no position
    "minimax": ATTENTION | {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
    "xlstm": {"num_blocks": 2, "num_heads": 4},
}
RECURRENT = ("mamba", "jamba", "lfm2")
ALIKE, ANEW = (*RECURRENT, "bart", "roberta"), ("recurrent_gemma", "minimax", "xlstm")
OTHERWISE = ("bart", "roberta", "minimax")
"""Their caches look as if they could be cut, or copied, and what they read from it shows that they cannot."""
SAMPLING = Sampling(10, stop_token_ids=frozenset({EOS, 9, 30}))


def model_of(kind):
    """Two or three layers of an architecture that tests/tiny.py does not know, float32."""
    shared = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **shared | ends | CONFIGS[kind])
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def requests(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(7, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [Request(query, noise_key(seed, "train", i, 0)) for i, query in enumerate(ids)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probabilities_are_those_of_an_unpadded_forward(kind):
    model, asked = model_of(kind), requests([1, 3, 7, 12, 12, 5, 3, 12])
    got = answers(model, asked, SAMPLING, batch_size=8)
    assert {completion.finish_reason for completion in got} == {"stop", "length"}
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1].detach()
        wanted = logits.log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", RECURRENT)
def test_greedy_answers_are_those_of_generate(kind):
    model, asked = model_of(kind), requests([4, 9, 9, 1])
    config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=[EOS, 9], pad_token_id=PAD)
    got = answers(model, asked, Sampling(10, temperature=0.0, stop_token_ids=frozenset({EOS, 9})))
    for request, completion in zip(asked, got, strict=True):
        wanted = model.generate(torch.tensor([request.token_ids]), generation_config=config)[0]
        assert completion.token_ids == wanted[len(request.token_ids) :].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_the_cache_allows_is_told_and_kept_to(kind, caplog):
    caplog.set_level(logging.WARNING, logger="tether.generation.decoding")
    scope = Scope(model_of(kind))
    generator = scope.tried(batch_size=3)
    asked = requests([5, 2, 5, 5, 5, 2])
    for _ in range(2):
        assert len(list(generator.generate(asked, SAMPLING))) == 6
    told = [record.getMessage() for record in caplog.records]
    if kind in ALIKE + ANEW:
        assert len(told) == 1 and "only prompts of equal length are answered side by side" in told[0]
        assert ("reread for every token" in told[0]) == (kind in ANEW)
        assert ("gives other results for padded or cached text" in told[0]) == (kind in OTHERWISE)
    else:
        assert told == []
    firsts = [width for _, width in scope.shapes if width > 1]
    if kind in ALIKE:
        assert firsts == [5, 5, 2] * 2
    elif kind in ANEW:
        assert max(firsts) == 5 + SAMPLING.max_new_tokens - 1
    else:
        assert firsts == [5, 5] * 2


def test_queries_of_one_length_alone_share_a_batch_without_padding():
    queries = [[8] * 2, [8] * 5, [9] * 2, [9] * 5, [7] * 5]
    assert list(batches(queries, 2, Decoding.ALIKE)) == [[1, 3], [4], [0, 2]]
    assert list(batches(queries, 2, Decoding.CUT)) == [[1, 3], [4, 0], [2]]


def test_equal_queries_are_neighbours():
    queries = [[8] * 3, [9] * 3, [8] * 3, [9, 8, 8, 8], [9] * 3]
    assert list(batches(queries, 9, Decoding.CUT)) == [[3, 0, 2, 1, 4]]


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_cache_of_another_library_is_neither_copied_nor_cut(kind, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="tether.generation.decoding")
    asked = requests([5] * 8)
    wanted = answers(model_of(kind), asked, SAMPLING)
    monkeypatch.setattr(decoding, "Cache", type("OtherCache", (), {}))
    scope = Scope(model_of(kind))
    got = dict(scope.tried(batch_size=8).generate(asked, SAMPLING))
    assert "decoded until the last one ends" in caplog.messages[-1]
    assert {rows for rows, _ in scope.shapes} == {8}
    assert [got[i].token_ids for i in range(8)] == [completion.token_ids for completion in wanted]
    assert len({len(completion.token_ids) for completion in wanted}) > 1


@pytest.mark.parametrize("cannot", ["copy", "drop"])
def test_a_cache_that_cannot_copy_or_drop_rows_is_seen_before_the_first_answer(monkeypatch, caplog, cannot):
    asked = requests([5] * 4 + [3])
    wanted = answers(tiny_causal_lm("llama"), asked, SAMPLING)
    for layers in (DynamicLayer, RoomyLayer):

        def reorder(layer, rows, usual=layers.reorder_cache):
            assert (len(rows) > len(layer.keys)) != (cannot == "copy"), "this test's cache"
            usual(layer, rows)

        monkeypatch.setattr(layers, "reorder_cache", reorder)
    monkeypatch.setattr(decoding, "FAULTS", (AssertionError,))
    got = answers(tiny_causal_lm("llama"), asked, SAMPLING)
    assert "decoded until the last one ends" in caplog.text
    assert [completion.token_ids for completion in got] == [completion.token_ids for completion in wanted]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_sliding_windows_in_a_cache_of_fixed_size(kind):
    model, asked = model_of(kind), requests([1, 3, 7, 12, 12, 5])
    wanted = answers(model, asked, SAMPLING, batch_size=3)
    generator = HFGenerator(Scope(model), batch_size=3, device="cpu", is_static=True)
    for _ in range(2):  # the second batch in the cache of the first
        got = dict(generator.generate(asked, SAMPLING))
        for i, completion in enumerate(wanted):
            assert got[i].token_ids == completion.token_ids
            torch.testing.assert_close(got[i].logprobs, completion.logprobs, atol=1e-5, rtol=0)


def test_batches_of_equally_many_rows_share_a_cache_of_fixed_size_until_the_last_answer(monkeypatch):
    living, made = weakref.WeakSet(), []

    class Noted(StaticCache):
        def __init__(self, *, max_cache_len, **options):
            super().__init__(max_cache_len=max_cache_len, **options)
            made.append((max_cache_len, len(living)))
            living.add(self)

    monkeypatch.setattr(caches, "StaticCache", Noted)
    monkeypatch.setattr(caches, "WIDTHS", 4)
    model, asked = tiny_causal_lm("llama"), requests([12, 1, 9, 8, 12, 5, 5, 3])
    wanted = answers(model, asked, SAMPLING)
    scope = Scope(model)
    generator, got = scope.tried(batch_size=3, is_static=True), {}
    made.clear()
    for position, completion in generator.generate(asked, SAMPLING):
        assert len(living) == 1
        got[position] = completion
    assert [shape for shape in scope.shapes if shape[1] > 1] == [(3, 12), (3, 8), (2, 3)]
    assert made == [(24, 0), (16, 0)], "none beside another, the second for fewer rows"
    assert len(living) == 0, "the update has its memory"
    for i, completion in enumerate(wanted):
        assert got[i].token_ids == completion.token_ids
        torch.testing.assert_close(got[i].logprobs, completion.logprobs, atol=1e-5, rtol=0)


def test_a_wider_text_than_the_cache_of_fixed_size_has_room_for_gets_another_one():
    static, model = caches.StaticCaches(compiles=False), tiny_causal_lm("llama")
    widths = [static.width(rows, longest) for rows, longest in [(2, 70), (2, 128)]]
    first = static.empty(model, 2, widths[0])
    widths += [static.width(rows, longest) for rows, longest in [(2, 128), (2, 1), (2, 129), (1, 1), (3, 1)]]
    assert widths == [128, 128, 128, 128, 192, 64, 64]
    assert static.empty(model, 2, 128) is first and static.empty(model, 2, 192) is not first


def test_what_cannot_be_held_in_a_cache_of_fixed_size_is_told(caplog):
    caplog.set_level(logging.WARNING, logger="tether.generation.decoding")
    asked = requests([5, 2, 5])
    wanted = answers(model_of("jamba"), asked, SAMPLING)
    generator = HFGenerator(Scope(model_of("jamba")), batch_size=3, device="cpu", is_static=True)
    got = dict(generator.generate(asked, SAMPLING))
    assert "its cache is not one of fixed size" in caplog.text
    assert [got[i] for i in range(3)] == wanted


def unpadded_attention(module, query, key, value, attention_mask, scaling, **_):
    """Attention that leaves padding out, as flash attention does: a mask tells which columns hold a token, and the
    queries are the last of these."""
    rows, heads, width, _ = query.shape
    held = key.new_ones(rows, key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask
    key, value = (x[:, :, : held.shape[1]].repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    output = torch.zeros_like(query)
    for row in range(rows):
        asks = held[row, -width:]
        q, k, v = query[row][:, asks], key[row][:, held[row]], value[row][:, held[row]]
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~sees, -torch.inf)
        output[row][:, asks] = scores.softmax(-1) @ v
    return output.transpose(1, 2), None


def test_attention_that_reads_a_whole_cache_of_fixed_size_gets_another_one(caplog):
    caplog.set_level(logging.WARNING, logger="tether.generation.decoding")
    AttentionInterface.register("unpadded", unpadded_attention)
    AttentionMaskInterface.register("unpadded", flash_attention_mask)
    model, asked = tiny_causal_lm("llama"), requests([1, 3, 7, 12, 12, 5])
    wanted = answers(model, asked, SAMPLING)
    model.set_attn_implementation("unpadded")
    for is_static in (False, True):
        assert caplog.messages == [], "this test's attention"
        generator = HFGenerator(Scope(model), batch_size=6, device="cpu", is_static=is_static)
        got = dict(generator.generate(asked, SAMPLING))
        for i, completion in enumerate(wanted):
            assert got[i].token_ids == completion.token_ids
            torch.testing.assert_close(got[i].logprobs, completion.logprobs, atol=1e-5, rtol=0)
    (told,) = caplog.messages
    assert "gives other results in a cache of fixed size" in told and "model.attn_implementation" in told


def filled_layer(rows=3, length=5):
    """A layer of a cache that holds random keys and values, and the same with room."""
    generator = torch.Generator().manual_seed(0)
    layer = DynamicLayer()
    layer.update(*(torch.randn(rows, 2, length, width, generator=generator) for width in (4, 6)))
    return layer, RoomyLayer(layer), generator


def test_keys_and_values_with_room_are_those_without():
    plain, roomy, generator = filled_layer()
    places = set()
    for step in range(2 * ROOM):
        if step == ROOM // 2:
            chosen = torch.tensor([2, 0])
            plain.batch_select_indices(chosen)
            roomy.reorder_cache(chosen)
        new = [torch.randn(len(plain.keys), 2, 1, width, generator=generator) for width in (4, 6)]
        for ours, theirs in zip(roomy.update(*new), plain.update(*new), strict=True):
            assert torch.equal(ours, theirs)
        assert roomy.get_seq_length() == plain.get_seq_length() and roomy.get_mask_sizes(1) == plain.get_mask_sizes(1)
        places.add(roomy.keys.data_ptr())
    assert len(places) <= 4, "all were copied for every token"


def test_recurrent_caches_are_not_cut():
    class Recurrent(DynamicLayer):
        pass

    assert cuttable(Cache(layers=[DynamicLayer()]))
    assert not cuttable(Cache(layers=[DynamicLayer(), Recurrent()]))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3_text", "jamba", "mamba", "lfm2", "recurrent_gemma"])
def test_a_query_of_several_answers_is_read_once(kind):
    model = model_of(kind) if kind in CONFIGS else tiny_causal_lm(kind, tied=False)
    queries = [request.token_ids for request in requests([6, 3, 4, 6])]
    asked = [Request(query, noise_key(0, "train", i, sample)) for sample in range(4) for i, query in enumerate(queries)]
    alone = answers(model, asked, SAMPLING, batch_size=1)
    scope = Scope(model)
    got = dict(scope.tried(batch_size=16).generate(asked, SAMPLING))
    assert [got[i].token_ids for i in range(16)] == [completion.token_ids for completion in alone]
    assert len({tuple(completion.token_ids) for completion in alone}) > 12
    for i, completion in enumerate(alone):
        torch.testing.assert_close(got[i].logprobs, completion.logprobs, atol=1e-4, rtol=0)
    if kind in ALIKE + ANEW:
        assert scope.shapes[0] == (2, 6) and (8, 6) not in scope.shapes
        return
    assert scope.shapes[0] == (4, 6)
    read = sum(rows * width for rows, width in scope.shapes[1:])
    assert read == sum(len(completion.token_ids) - 1 for completion in alone), "ended rows are dropped"


