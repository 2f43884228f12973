"""Log-probabilities, values and scores against one unpadded row at a time through the model's own forward."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    CohereConfig,
    ElectraConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RemBertConfig,
    RobertaConfig,
    RwkvConfig,
    xLSTMConfig,
)

from tests.models.build import QUERIES, RESPONSES, micro_batch
from tests.operators import operators
from tests.tiny import KINDS, VOCAB_SIZE, tiny_causal_lm
from tether.algo import linear_logprobs, logprobs_from_logits
from tether.data.collate import collate, pad_left, pad_right
from tether.errors import ModelError
from tether.generation.batch import Decoding
from tether.generation.decoding import decoding
from tether.models import forward, products
from tether.models.forward import (
    check_causal,
    head_matches,
    is_causal,
    last_token_scores,
    response_outputs,
    response_values,
    state_size,
)
from tether.models.heads import ScalarHead

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
ROTARY = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1}
STATE = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
CHANGED_LOGITS = {
    "cohere": CohereConfig(**ROTARY, logit_scale=0.25),
    "granite": GraniteConfig(**ROTARY, logits_scaling=3.0),
    "gemma2": Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager"),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config).eval()


def seeded_head(hidden: int = 16, *, seed: int = 5) -> ScalarHead:
    head = ScalarHead(hidden)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(seed))
    return head


@torch.no_grad()
def naive(model: PreTrainedModel, query: list[int], response: list[int], temperature: float, head: ScalarHead):
    """One row, no padding, all logits, plain Python indices."""
    ids = query + response
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    logprobs, entropies, values = [], [], []
    for position in range(len(query), len(ids)):
        p = torch.log_softmax(out.logits[0, position - 1].double() / temperature, dim=-1)
        logprobs.append(p[ids[position]].item())
        entropies.append(-(p.exp() * p).sum().item())
        values.append(float(out.hidden_states[-1][0, position - 1] @ head.weight[0]))
    return logprobs, entropies, values


def assert_is_naive(
    model: PreTrainedModel, temperature: float = 0.7, before: tuple[int, ...] = (), hidden: int | None = None
) -> None:
    """Args: before: what the queries have before those of the other tests; hidden: the width of the states."""
    queries = [[*before, *query] for query in QUERIES]
    head, batch = seeded_head(hidden or model.config.hidden_size), collate(queries, RESPONSES)
    out = response_outputs(model, batch, temperature=temperature, head=head, with_entropy=True)
    for row, (query, response) in enumerate(zip(queries, RESPONSES, strict=True)):
        for got, wanted in zip(out, naive(model, query, response, temperature, head), strict=True):
            assert got[row, : len(response)].tolist() == pytest.approx(wanted, abs=1e-5)
            assert torch.equal(got[row, len(response) :], torch.zeros(got.shape[1] - len(response)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_unpadded_row_at_a_time(kind, tied):
    model = tiny_causal_lm(kind, tied=tied).eval()
    assert head_matches(model)
    assert_is_naive(model)


def test_equals_it_for_positions_with_an_offset():
    assert_is_naive(model_of(OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0)))


@pytest.mark.parametrize("kind", [BloomConfig, MptConfig])
def test_equals_it_for_models_that_count_positions_by_the_mask(kind):
    """Their forwards take no position ids."""
    assert_is_naive(model_of(kind(**SMALL)))


@pytest.mark.parametrize(
    "config",
    [
        RwkvConfig(**STATE, attention_hidden_size=32),
        RecurrentGemmaConfig(
            **STATE | {"num_hidden_layers": 3},
            num_attention_heads=4,
            num_key_value_heads=1,
            intermediate_size=64,
            head_dim=8,
            lru_width=32,
            w_init_variance_scale=0.01,
        ),
        MambaConfig(**STATE, state_size=4),
        Mamba2Config(**STATE, state_size=4, num_heads=4, head_dim=16, n_groups=1),
    ],
    ids=lambda config: config.model_type,
)
def test_equals_it_for_models_that_keep_a_state(config):
    """Some of them heed no mask: padding must not come before what counts."""
    assert_is_naive(model_of(config))


@pytest.mark.parametrize("name", CHANGED_LOGITS)
def test_models_that_change_their_logits_take_their_own_forward(name):
    model = model_of(CHANGED_LOGITS[name])
    assert not head_matches(model)
    assert_is_naive(model)


def test_a_cap_far_above_the_logits_is_still_seen():
    config = Gemma2Config(**ROTARY | {"initializer_range": 0.002}, head_dim=8, attn_implementation="eager")
    assert config.final_logit_softcapping == 30
    model = model_of(config)
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None], use_cache=False).logits.abs().max() < 0.05
    assert not head_matches(model)


def test_logits_of_models_that_make_all_whichever_are_to_be_kept():
    assert_is_naive(model_of(xLSTMConfig(**STATE, num_blocks=2, num_heads=4)), before=(6, 9))


def test_positions_that_do_not_begin_at_0_are_left_to_the_model():
    assert_is_naive(model_of(RobertaConfig(**SMALL | {"pad_token_id": 1}, intermediate_size=32, is_decoder=True)))


def test_a_head_with_a_layer_before_it_is_the_models_own():
    widths = {"intermediate_size": 32, "input_embedding_size": 8, "output_embedding_size": 24}
    model = model_of(RemBertConfig(**SMALL, **widths, is_decoder=True))
    assert not head_matches(model)
    assert_is_naive(model)


PROJECTED = {
    "language model": RemBertConfig(**SMALL, intermediate_size=32, output_embedding_size=24, is_decoder=True),
    "language model, tied": ElectraConfig(**SMALL, intermediate_size=32, embedding_size=8, is_decoder=True),
    "trunk": OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=8, do_layer_norm_before=False),
    "nothing": LlamaConfig(**ROTARY),
}
"""Models by what changes the width of their states before the output embedding reads them."""


@pytest.mark.parametrize("by", PROJECTED)
def test_heads_read_the_states_of_the_trunk_whatever_the_output_embedding_reads(by):
    model = model_of(PROJECTED[by])
    wanted = 8 if by == "trunk" else 16
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(PROJECTED[by])
    assert state_size(empty) == wanted == state_size(model)
    assert_is_naive(model, hidden=wanted)


def test_a_model_without_a_trunk_is_refused():
    class Trunkless(LlamaForCausalLM):
        base_model_prefix = "trunk"

    with pytest.raises(ModelError, match=r"Trunkless does not declare by base_model_prefix"):
        head_matches(Trunkless(LlamaConfig(**ROTARY)))


def test_a_logit_scale_of_one_changes_nothing():
    assert head_matches(model_of(CohereConfig(**ROTARY, logit_scale=1.0)))


def test_head_is_tried_without_leaving_casts_that_have_no_gradient():
    model = tiny_causal_lm("llama", tied=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        response_outputs(model, micro_batch(), temperature=1.0).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "norm" not in n)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    model, head = tiny_causal_lm(kind).eval(), seeded_head()
    batch = micro_batch()
    poisoned = batch.token_ids.where(batch.attention_mask, 17)
    assert not torch.equal(poisoned, batch.token_ids)
    other = type(batch)(batch.rows, poisoned, batch.attention_mask, batch.position_ids, batch.response_mask)
    for got, wanted in zip(
        response_outputs(model, other, temperature=1.0, head=head, with_entropy=True),
        response_outputs(model, batch, temperature=1.0, head=head, with_entropy=True),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_split_into_micro_batches(kind):
    model, head = tiny_causal_lm(kind).eval(), seeded_head()
    parameters = [*model.parameters(), *head.parameters()]

    def gradients(groups):
        for p in parameters:
            p.grad = None
        for rows in groups:
            batch = collate([QUERIES[i] for i in rows], [RESPONSES[i] for i in rows])
            out = response_outputs(model, batch, temperature=1.0, head=head, with_entropy=True)
            (out.logprobs.sum() + 0.3 * out.entropy.sum() + 0.1 * out.values.square().sum()).backward()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    together, apart = gradients([(0, 1, 2)]), gradients([(2,), (0, 1)])
    assert torch.isfinite(together).all()
    assert (together - apart).norm() <= 2e-6 * together.norm()


def test_a_detached_head_keeps_the_value_gradient_out_of_the_trunk():
    model, head = tiny_causal_lm("llama").eval(), seeded_head()
    for detach, trunk_learns in ((True, False), (False, True)):
        model.zero_grad(), head.zero_grad()
        out = response_outputs(model, micro_batch(), temperature=1.0, head=head, detach_head=detach)
        out.values.sum().backward()
        assert head.weight.grad.abs().sum() > 0
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()) == trunk_learns


def test_values_alone_are_those_beside_the_logprobs():
    model, head = tiny_causal_lm("qwen2").eval(), seeded_head()
    out = response_outputs(model, micro_batch(), temperature=1.0, head=head)
    assert torch.equal(response_values(model.base_model, head, micro_batch()), out.values)


def test_logits_are_made_for_response_tokens_only_and_never_kept(monkeypatch):
    """Vocabulary 5000, 350 response tokens, 90 prompt tokens: chunks of at most 128 tokens, nothing [N, V] is kept."""
    monkeypatch.setattr(forward, "logits_at_once", lambda device: 128 * 5000 + 4999)
    config = LlamaConfig(**ROTARY | {"vocab_size": 5000, "max_position_embeddings": 256}, tie_word_embeddings=True)
    model = model_of(config)
    batch = collate([list(range(4, 34))] * 3, [list(range(40, 190)), list(range(40, 140)), list(range(40, 140))])
    response_outputs(model, batch, temperature=1.0)  # the first call tries the head
    rows, kept = [], []
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: rows.append(logits.shape[:-1].numel()))

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = response_outputs(model, batch, temperature=1.0, with_entropy=True)
    assert rows == [116, 117, 117]
    assert max(kept) <= 3 * 180**2  # the attention mask; the logits of 350 tokens would be 18 times that
    out.logprobs.sum().backward()
    assert sum(rows) == 2 * 350  # made again for the backward pass


def with_adapter(model):
    lora = LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    return get_peft_model(model, lora).base_model.model


def with_hook(model):
    model.get_output_embeddings().register_forward_hook(lambda module, args, logits: 2 * logits)
    return model


def with_hook_before(model):
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def with_hook_behind(model):
    model.get_output_embeddings().register_full_backward_hook(lambda module, before, behind: None)
    return model


def with_forward_of_its_own(model):
    head = model.get_output_embeddings()
    head.forward = lambda states: 2 * type(head).forward(head, states)
    return model


@pytest.mark.parametrize(
    "change", [None, with_adapter, with_hook, with_hook_before, with_hook_behind, with_forward_of_its_own]
)
def test_a_head_that_is_more_than_a_product_is_called(change, monkeypatch):
    as_product = Mock(side_effect=linear_logprobs)
    monkeypatch.setattr(forward, "linear_logprobs", as_product)
    model, batch = tiny_causal_lm("qwen2", tied=False).eval(), micro_batch()
    model = change(model) if change else model
    with torch.no_grad():
        out = response_outputs(model, batch, temperature=0.7, with_entropy=True)
        logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    logits = logits[batch.response_columns[:, 1:]]
    wanted, _ = logprobs_from_logits(logits, batch.token_ids[batch.response_columns], temperature=0.7)
    assert torch.allclose(out.logprobs[batch.response_mask], wanted, atol=1e-5)
    assert as_product.called == (change is None)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_head_is_multiplied_in_the_fastest_way_for_the_type_of_its_product(monkeypatch, autocast):
    seen, real = [], products.product
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(products, "half_is_slow", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(products, "product", lambda *args: (seen.append(args[1].shape), real(*args))[1])
    model, batch = products.with_quick_products(tiny_causal_lm("llama", tied=False)), micro_batch()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        response_outputs(model, batch, temperature=1.0)
    assert (model.get_output_embeddings().weight.shape in seen) == autocast


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_are_those_of_the_last_real_token_on_any_padding_side(kind, causal):
    model, head = tiny_causal_lm(kind).eval(), seeded_head()
    rows = [[5, 0, 8, 9, 2], [0, 2], [5, 11, 12, 0, 14, 6, 3]]  # 0 is a token as well
    wanted = [
        float(model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1] @ head.weight[0])
        for ids in rows
    ]
    ids, mask, positions = pad_left(rows)
    left = last_token_scores(model.base_model, head, ids, mask, positions, causal=True)
    lengths = mask.sum(dim=1, keepdim=True)
    right_mask = torch.arange(ids.shape[1]) < lengths
    right_ids = torch.zeros_like(ids).masked_scatter(right_mask, ids[mask])
    right_positions = torch.arange(ids.shape[1]).where(right_mask, 0)
    right = last_token_scores(model.base_model, head, right_ids, right_mask, right_positions, causal=causal)
    assert left.tolist() == pytest.approx(wanted, abs=1e-5)
    assert right.tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", [BloomConfig, MptConfig])
@torch.no_grad()
def test_padding_before_a_row_is_masked_for_models_that_take_no_position_ids(kind):
    model, head, rows = model_of(kind(**SMALL)), seeded_head(), [[5, 0, 8, 9, 2], [8, 2]]
    score = partial(last_token_scores, model.base_model, head, causal=True)
    alone = [score(*pad_left([row])).item() for row in rows]
    assert score(*pad_left(rows)).tolist() == pytest.approx(alone, abs=1e-5)


def test_padding_behind_a_row_takes_no_mask():
    model, given = tiny_causal_lm("llama").eval(), []
    model.base_model.register_forward_pre_hook(lambda *call: given.append(call[-1]), with_kwargs=True)
    assert not micro_batch().attention_mask.all()
    response_outputs(model, micro_batch(), temperature=1.0)
    assert [call.get("attention_mask") for call in given] == [None] * len(given) != []


WAITS = {"aten::nonzero", "aten::masked_select", "aten::masked_scatter", "aten::_local_scalar_dense"}
"""Operators for which an accelerator is waited for: their results' sizes depend on values, or are values. The first one
turns a mask into an index, also in ``x[mask]``."""


def test_what_an_accelerator_is_waited_for_is_seen():
    x, mask = torch.arange(6.0).view(2, 3), torch.tensor([[True, False, True], [False, True, True]])
    waits = (
        lambda: x[mask],
        lambda: x.index_put((mask,), x[0, :1].expand(4)),
        lambda: x.masked_select(mask),
        lambda: x.masked_scatter(mask, x),
        lambda: bool(mask.any()),
        mask.nonzero,
        x.sum().item,
    )
    does_not = (lambda: torch.where(mask, x, 0.0), lambda: x.masked_fill(mask, 0.0), lambda: x[torch.tensor([1])])
    for calls, is_seen in ((waits, True), (does_not, False)):
        for call in calls:
            assert bool(WAITS & operators(call).keys()) == is_seen


@pytest.mark.parametrize("name", ["plain", *CHANGED_LOGITS])
def test_a_pass_waits_for_no_number_from_the_device(name, monkeypatch):
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda ids: None)  # its own look
    model = tiny_causal_lm("llama").eval() if name == "plain" else model_of(CHANGED_LOGITS[name])
    batch, head = micro_batch().to("cpu"), seeded_head()
    response_outputs(model, batch, temperature=1.0)  # the first call tries the head

    def run():
        out = response_outputs(model, batch, temperature=0.7, head=head, with_entropy=True)
        (out.logprobs + out.entropy + out.values).sum().backward()

    assert not WAITS & operators(run).keys()


def test_states_and_their_gradients_are_bitwise_those_that_masks_select(monkeypatch):
    model, batch = tiny_causal_lm("llama").eval(), micro_batch()
    hidden = model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state.detach()
    weight = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0))
    by_mask, by_index = (hidden.clone().requires_grad_() for _ in range(2))
    flat = by_mask[:, :-1][batch.response_columns[:, 1:]] @ weight
    wanted = flat.new_zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, flat)
    monkeypatch.setattr(forward, "_hidden_states", lambda *args, **kwargs: by_index)
    head = seeded_head()
    head.weight.data = weight[None]
    got = response_values(model.base_model, head, batch)
    assert torch.equal(got, wanted)
    got.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.equal(by_index.grad, by_mask.grad) and by_mask.grad.any()


@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_model_that_reads_what_follows_is_refused(is_decoder):
    model = model_of(BertConfig(**SMALL, intermediate_size=32, is_decoder=is_decoder))
    with nullcontext() if is_decoder else pytest.raises(ModelError, match=r"BertLMHeadModel .* is_decoder: true"):
        check_causal(model)


@pytest.mark.parametrize("shared", [0.0, 1e5])
def test_a_model_that_hardly_reads_what_follows_is_refused(shared):
    """As it is before training, and where one number is large in all states."""
    config = BertConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = model_of(config)
    model.base_model.encoder.layer[-1].output.LayerNorm.bias.data[3] = shared
    assert not is_causal(model.base_model)


@pytest.mark.parametrize("size", [9, 10])
def test_models_of_few_positions_are_tried_with_as_many_tokens(size):
    model = model_of(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=size))
    assert head_matches(model) and is_causal(model.base_model) and decoding(model, model.device) is Decoding.CUT


@torch.no_grad()
def test_a_judge_that_heeds_no_mask_scores_texts_padded_behind():
    model = model_of(RwkvConfig(**STATE, attention_hidden_size=32))
    score = partial(last_token_scores, model.base_model, seeded_head(32), causal=is_causal(model.base_model))
    rows = [[5, 7, 8, 9, 2], [8, 2], [6]]
    alone = [score(*pad_right([row])).item() for row in rows]
    assert score(*pad_right(rows)).tolist() == pytest.approx(alone, abs=1e-5)


@torch.no_grad()
def test_a_judge_that_reads_what_follows_has_its_padding_masked():
    config = Gemma3TextConfig(**ROTARY, head_dim=8, use_bidirectional_attention=True, attn_implementation="eager")
    model, head, rows = model_of(config), seeded_head(), [[5, 7, 8, 9, 2], [8, 2], [6]]
    assert not is_causal(model.base_model)
    score = partial(last_token_scores, model.base_model, head, causal=False)
    alone = [score(*pad_right([row])).item() for row in rows]
    assert score(*pad_right(rows)).tolist() == pytest.approx(alone, abs=1e-5)


def test_weights_that_are_no_numbers_do_not_read_what_follows():
    model = tiny_causal_lm("llama")
    model.base_model.layers[0].mlp.up_proj.weight.data.fill_(torch.nan)
    assert is_causal(model.base_model)


@pytest.mark.parametrize("kind", [*KINDS, "mixtral", "gemma2"])
def test_causal_models_are_not(kind):
    mixtral = MixtralConfig(**ROTARY, num_local_experts=4)
    model = tiny_causal_lm(kind).eval() if kind in KINDS else model_of(CHANGED_LOGITS.get(kind, mixtral))
    assert is_causal(model.base_model)
