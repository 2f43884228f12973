"""While it decodes, a float32 policy multiplies by its adapter merged into the base; nothing else notices."""

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear

from tests.generation.scopes import answers
from tests.models.build import checksums, roles_of, run_config, save_adapter, save_model
from tests.operators import operators
from tether.generation.build import build_generator
from tether.models import merging
from tether.types import Request, Sampling

IDS = torch.tensor([[5, 7, 8, 9]])
KINDS = {
    "LoRA": {},
    "scaled by rank": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "beside a head of its own": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "beside embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied head": {"target_modules": ["q_proj", "lm_head"]},
    "with a bias": {"target_modules": ["o_proj"], "lora_bias": True},
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def num_products(model):
    seen = operators(lambda: logits(model))
    return seen["aten::mm"] + seen["aten::addmm"]


def roles_from(folder, kind="llama", reward=False, **settings):
    """Roles of a policy that starts from an adapter far from its own start."""
    tied = "lm_head" in settings.get("target_modules", ()) or kind == "gpt2"
    model = save_model(folder / "model", kind, tied=tied)
    start = save_adapter(folder / "start", model, tokenizer=True, **settings)
    roles = roles_of(run_config(start, lora={}, model={"dtype": "float32"}))
    if reward:
        roles.add_reward_adapter("a", str(save_adapter(folder / "reward", model, reward=True, seed=7)))
    return roles


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")  # PEFT: an adapter on a tied head
@pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape")  # PEFT takes a bias for a part of a shard
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("name", KINDS)
def test_merged_layers_give_the_numbers_of_peft_but_for_rounding(tmp_path, name):
    roles = roles_from(tmp_path, **{"target_modules": "all-linear"} | KINDS[name])
    was, weights = logits(roles.role("policy").model), checksums(roles.policy)
    with roles.ready_to_decode(), roles.decoding() as policy:
        merged = logits(policy)
    torch.testing.assert_close(merged, was, rtol=1e-4, atol=1e-4)
    with roles.policy.disable_adapter():
        assert (logits(roles.role("policy").model) - was).abs().max() > 0.1
    assert all(torch.equal(weight, weights[key]) for key, weight in checksums(roles.policy).items())
    assert torch.equal(logits(roles.role("policy").model), was)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_merged_model_computes_as_many_products_as_its_base(tmp_path, kind, use_dora):
    roles = roles_from(tmp_path, kind, use_dora=use_dora)
    with roles.policy.disable_adapter():
        least = num_products(roles.role("policy").model)
    with roles.decoding() as policy:
        assert num_products(policy) > least
    with roles.ready_to_decode(), roles.decoding() as policy:
        assert num_products(policy) == least


def test_other_roles_compute_in_between_as_ever_and_the_policy_after_it(tmp_path):
    roles = roles_from(tmp_path, reward=True)
    names = ("policy", "reference", "value", "reward/a")

    def all_logits():
        outputs = {}
        for name in names:
            with roles.use(name) as model:
                outputs[name] = logits(model)
        return outputs

    wanted, layers = all_logits(), [m for m in roles.policy.modules() if isinstance(m, LoraLinear)]
    with roles.ready_to_decode():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), roles.decoding():
                assert any(layer.merged for layer in layers)
                raise ZeroDivisionError
            assert not any(layer.merged for layer in layers)
            assert all(torch.equal(output, wanted[name]) for name, output in all_logits().items())
    assert all(torch.equal(output, wanted[name]) for name, output in all_logits().items())


def test_each_phase_merges_the_adapter_as_it_is_then(tmp_path):
    roles = roles_from(tmp_path)
    for _ in range(2):
        with torch.no_grad():
            for parameter in roles.role("policy").trained.values():
                parameter.mul_(-0.5)
        now = logits(roles.role("policy").model)
        with roles.ready_to_decode(), roles.decoding() as policy:
            torch.testing.assert_close(logits(policy), now, rtol=1e-4, atol=1e-4)


def test_merged_weights_take_no_memory_after_the_phase_and_never_more_than_allowed(tmp_path, monkeypatch):
    roles = roles_from(tmp_path)
    layers = [m for m in roles.policy.modules() if isinstance(m, LoraLinear)]
    monkeypatch.setattr(merging, "MOST_BYTES", layers[0].weight.nbytes + layers[1].weight.nbytes)
    was, of_base = logits(roles.role("policy").model), layers[0].weight.data_ptr()
    with roles.ready_to_decode(), roles.decoding() as policy:
        assert [layer.merged for layer in layers] == [True, True] + [False] * (len(layers) - 2)
        torch.testing.assert_close(logits(policy), was, rtol=1e-4, atol=1e-4)
        assert layers[0].weight.data_ptr() != of_base
    with roles.decoding():
        assert not any(layer.merged for layer in layers) and layers[0].weight.data_ptr() == of_base


@pytest.mark.parametrize("rounds", ["weights", "autocast"])
def test_half_precision_is_never_merged(tmp_path, rounds):
    """The policy that answers must be the one that is trained: W + s B A would lose most of a small s B A."""
    start = save_adapter(tmp_path / "start", save_model(tmp_path / "model", tied=False), tokenizer=True)
    dtype = {"weights": "bfloat16", "autocast": "float32"}[rounds]
    autocast = {"weights": None, "autocast": torch.bfloat16}[rounds]
    roles = roles_of(run_config(start, lora={}, model={"dtype": dtype}), autocast_dtype=autocast)
    with roles.use("policy") as policy:
        was = logits(policy)
    with roles.ready_to_decode(), roles.decoding() as policy:
        assert torch.equal(logits(policy), was)


def test_a_run_decodes_with_merged_weights(tmp_path):
    roles = roles_from(tmp_path)
    config = run_config(tmp_path / "start", lora={}, model={"dtype": "float32"})
    asked, sampling, merged = [Request([7 + i, 8], i) for i in range(5)], Sampling(12), []
    layer = next(m for m in roles.policy.modules() if isinstance(m, LoraLinear))
    layer.register_forward_pre_hook(lambda *_: merged.append(layer.merged))
    got = {}
    for i, answer in build_generator(config, roles).generate(asked, sampling):
        assert not layer.merged, "the caller has the base's own weights"
        got[i] = answer.token_ids
    assert merged and all(merged)
    assert got == {i: answer.token_ids for i, answer in enumerate(answers(roles.role("policy").model, asked, sampling))}
