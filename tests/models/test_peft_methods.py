"""Policies that start from an adapter of another method than LoRA, or one that reaches unusual places."""

import warnings

import peft
import pytest
import torch
from benchmarks.architectures import small_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from tests.models.build import (
    checksums,
    micro_batch,
    plain_adapted,
    roles_of,
    run_config,
    save_adapter,
    save_model,
    wrapped,
)
from tests.operators import operators
from tether.config.model import LoraConfig
from tether.errors import ConfigError, ModelError
from tether.models.adapters import BYPASSED, check_targets, linear_names, peft_lora_config, with_adapter
from tether.models.forward import few_tokens
from tether.models.loading import load_causal_lm
from tether.models.saving import save_critic, save_policy
from tether.models.tokenizer import load_tokenizer

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
METHODS = {
    "IA3": peft.IA3Config(**LAYERS, feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(**LAYERS, r=4),
    "LoKr": peft.LoKrConfig(**LAYERS, r=4),
    "OFT": peft.OFTConfig(**LAYERS, r=0, oft_block_size=4),
    "VeRA": peft.VeraConfig(**LAYERS, r=4),
    "HRA": peft.HRAConfig(**LAYERS, r=4),
    **({"GLoRA": peft.GloraConfig(**LAYERS)} if hasattr(peft, "GloraConfig") else {}),  # takes torch's own layers alone
}
IDS = torch.tensor([[5, 7, 8, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base"), tied=False)


def saved(folder, base, settings):
    """An adapter far from its start, with a tokenizer."""
    settings.task_type = "CAUSAL_LM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = wrapped(AutoModelForCausalLM.from_pretrained(base), settings)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder, save_embedding_layers=False)
    load_tokenizer(str(base)).save_pretrained(folder)
    return folder


def trained(roles):
    """One step of every pass."""
    for pass_ in roles.passes:
        with pass_(micro_batch(), temperature=1.0) as out:
            sum(x.add(-1).square().sum() for x in (out.logprobs, out.values) if x is not None).backward()
        optimizer = torch.optim.SGD(pass_.parameters(), lr=0.01)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", ["adapter", "head", "model"])
def test_an_adapter_of_any_method_in_the_layers_goes_on_from_its_start(tmp_path, base, method, value):
    start = saved(tmp_path / "start", base, METHODS[method])
    plain = plain_adapted(AutoModelForCausalLM, base, start)
    roles = roles_of(run_config(start, lora={}, value={"kind": value}))
    batch = micro_batch()
    with roles.use("policy") as policy, torch.no_grad():
        assert torch.equal(policy(IDS, use_cache=False).logits, plain(input_ids=IDS, use_cache=False).logits)
    old, reference = roles.score_pass(batch, 1.0), roles.ref_logprobs(batch, 1.0)
    assert torch.equal(old.logprobs, reference)  # the reference is the start
    before = checksums(roles.policy)
    for _ in range(3):  # a head, then factors of an adapter that begin at 0 keep the gradient of the rest at 0
        trained(roles)
    changed = {name for name, tensor in checksums(roles.policy).items() if not torch.equal(tensor, before[name])}
    wanted = {id(p) for pass_ in roles.passes for p in pass_.parameters()}
    assert changed == {n for n, p in roles.policy.named_parameters(remove_duplicate=False) if id(p) in wanted}
    assert torch.equal(roles.ref_logprobs(batch, 1.0), reference)
    assert not torch.equal(roles.score_pass(batch, 1.0).logprobs, old.logprobs)
    save_policy(roles, roles.tokenizer, tmp_path / "saved")
    again = plain_adapted(AutoModelForCausalLM, base, tmp_path / "saved")
    with roles.use("policy") as policy, torch.no_grad():
        assert torch.equal(policy(IDS, use_cache=False).logits, again(input_ids=IDS, use_cache=False).logits)
    if value != "head":
        save_critic(roles, tmp_path / "critic")
        critic = roles_of(run_config(start, lora={}, value={"kind": value, "init": str(tmp_path / "critic")}))
        assert torch.equal(critic.score_pass(batch, 1.0).values, roles.score_pass(batch, 1.0).values)


@pytest.mark.parametrize("method", ["IA3", "LoHa", "OFT"])
def test_full_fine_tuning_starts_from_what_the_adapter_makes_of_its_base(tmp_path, base, method):
    start = saved(tmp_path, base, METHODS[method])
    plain = plain_adapted(AutoModelForCausalLM, base, start)
    with torch.no_grad():
        got, wanted = (
            each(input_ids=IDS).logits for each in (load_causal_lm(str(start), dtype=torch.float32), plain)
        )
    assert (got - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=2), "a PROMPT_TUNING adapter puts virtual tokens before"),
        (peft.PrefixTuningConfig(num_virtual_tokens=2), "a PREFIX_TUNING adapter puts virtual tokens"),
        (peft.AdaLoraConfig(**LAYERS, total_step=10), "a ADALORA adapter changes its ranks on its own schedule"),
        (peft.LoraConfig(**LAYERS, bias="all"), "an adapter with bias=all changes the weights of its base"),
        (peft.OFTConfig(**LAYERS, r=0, oft_block_size=4, bias="oft_only"), "an adapter with bias=oft_only changes"),
    ],
)
def test_what_cannot_be_switched_off_is_refused_by_name_before_the_base_is_loaded(
    tmp_path, base, monkeypatch, settings, message
):
    start = saved(tmp_path, base, settings)
    monkeypatch.setattr("tether.models.build.load_causal_lm", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ModelError, match=message):
        roles_of(run_config(start, lora={}))


def test_settings_of_lora_and_adapters_of_lora_do_not_go_with_another_method(tmp_path, base):
    start = saved(tmp_path / "start", base, METHODS["IA3"])
    with pytest.raises(ConfigError, match=r"model.lora.r: the adapter in .* is a IA3 adapter, .*; write `lora: {}`"):
        roles_of(run_config(start, lora={"r": 4}))
    judge = save_adapter(tmp_path / "judge", base, reward=True)
    roles = roles_of(run_config(start, lora={}, value={"kind": "head"}))
    with pytest.raises(ModelError, match="got a LORA adapter; wanted a IA3 adapter, as the policy's is"):
        roles.add_reward_adapter("judge", str(judge))


@pytest.mark.parametrize("tied", [True, False])
def test_a_lora_adapter_may_sit_on_the_output_embedding(tmp_path, tied):
    base = save_model(tmp_path / "base", tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of adapters on tied weights
        roles = roles_of(run_config(base, lora={"r": 4, "target_modules": ["q_proj", "lm_head"]}))
    batch = micro_batch()
    reference = roles.ref_logprobs(batch, 1.0)
    for _ in range(2):
        trained(roles)
    assert torch.equal(roles.ref_logprobs(batch, 1.0), reference)
    touched = {n for n, p in roles.role("policy").trained.items() if "lm_head" in n and "lora_B" in n and p.any()}
    assert len(touched) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_policy(roles, roles.tokenizer, tmp_path / "saved")
    plain = plain_adapted(AutoModelForCausalLM, base, tmp_path / "saved")
    with roles.use("policy") as policy, torch.no_grad():
        assert torch.equal(policy(IDS, use_cache=False).logits, plain(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize("rows", [41, 64])
def test_a_vocabulary_may_have_more_rows_than_the_tokenizer(tmp_path, base, rows):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(tmp_path)
    load_tokenizer(str(base)).save_pretrained(tmp_path)
    for lora in (None, {}):
        roles = roles_of(run_config(tmp_path, lora=lora))
        old = roles.score_pass(micro_batch(), 1.0).logprobs
        assert torch.equal(old, roles.ref_logprobs(micro_batch(), 1.0))
        trained(roles)
        assert not torch.equal(roles.score_pass(micro_batch(), 1.0).logprobs, old)


@pytest.mark.parametrize("use_dora", [False, True])
def test_under_autocast_inputs_are_not_converted_to_float32_and_back(tmp_path, base, use_dora):
    """Neither those of the policy's adapter, nor those of layers that a reward adapter alone has."""
    start = save_adapter(tmp_path / "start", base, tokenizer=True, target_modules=["q_proj"], use_dora=use_dora)
    reward = save_adapter(tmp_path / "reward", base, reward=True, target_modules=["o_proj"])
    config = run_config(start, lora={}, model={"dtype": "bfloat16"})
    roles = roles_of(config, autocast_dtype=torch.bfloat16)
    roles.add_reward_adapter("a", str(reward))
    layers = [layer for layer in roles.policy.modules() if isinstance(layer, LoraLinear)]
    for role in ("policy", "reward/a"):
        outputs, counts = [], []
        for converts in (False, True):
            for layer in layers:
                layer.cast_input_dtype_enabled |= converts
            with roles.use(role) as model, torch.no_grad():
                seen = operators(lambda m=model, found=outputs: found.append(m(input_ids=IDS, use_cache=False).logits))
            counts.append(seen["aten::_to_copy"])
        assert torch.equal(*outputs)
        assert counts[1] - counts[0] == (0 if use_dora and role == "policy" else 4)  # twice in each of two layers
        for layer in layers:
            layer.cast_input_dtype_enabled = bool(layer.lora_variant)


@pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape")  # PEFT takes a bias for a part of a shard
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_an_adapter_that_peft_cannot_merge_is_named(tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base, lora_bias=True)
    with pytest.raises(ModelError, match=r"adapter: Impossible to merge LoRA .* the base layer has no bias"):
        load_causal_lm(str(adapter), dtype=torch.float32)


@pytest.mark.parametrize("kind", BYPASSED)
def test_all_linear_adapts_what_a_model_calls_and_leaves_out_what_it_also_reads_by_itself(kind):
    """PEFT refuses an adapter on ``out_proj``, which only fused kernels on a GPU read."""
    with torch.no_grad():
        model = small_model(kind)
    linear, called = linear_names(model), set()
    for name in linear:
        model.get_submodule(name).register_forward_hook(lambda *call, name=name: called.add(name))
    with torch.no_grad():
        model(input_ids=few_tokens(model), use_cache=False)
    check_targets(LoraConfig(), model.config, trust_remote_code=False)
    adapted = with_adapter(model, peft_lora_config(LoraConfig(), model)).get_base_model()
    targets = {name for name in linear if isinstance(adapted.get_submodule(name), BaseTunerLayer)}
    assert targets and targets <= called
    assert {name.rpartition(".")[2] for name in linear - targets} == set(BYPASSED[kind])
    for name in linear - targets:
        assert name not in called or name.endswith(".out_proj"), "an adapter could be there"
        with pytest.raises(ConfigError, match=rf"includes {name}, whose weight .* also reads without calling"):
            check_targets(LoraConfig(target_modules=[name]), model.config, trust_remote_code=False)
