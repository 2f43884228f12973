"""Weights in 4 and 8 bits: what transformers is asked for, what is refused, and that training on them is right."""

import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from tests.models.build import checksums, edit_json, micro_batch, roles_of, run_config, save_adapter, save_model
from tests.rewards.encoders import save_encoder
from tether.config.reward_stage import RewardModelConfig
from tether.config.rewards import ModelReward, ValueHeadReward
from tether.errors import ConfigError, ModelError
from tether.models import bitsandbytes as few
from tether.models.bitsandbytes import FewBits, check_bitsandbytes, keep_differentiable
from tether.models.build import build_roles
from tether.models.classifiers import load_reward_model
from tether.models.loading import load_causal_lm
from tether.models.saving import merge_adapter
from tether.models.tokenizer import load_tokenizer
from tether.rewards.build import _model_and_head
from tether.stages.reward import adapted, start_model

installed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
CPU = torch.device("cpu")
BITS = ("4bit", "8bit")


# Without bitsandbytes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_transformers_is_asked_for_nf4_or_int8_on_the_run_s_device(tmp_path, monkeypatch, bits, precision):
    monkeypatch.setattr(few, "BitsAndBytesConfig", lambda **settings: SimpleNamespace(**settings))
    asked = {}

    def from_pretrained(path, **options):
        asked.update(options)
        del options["quantization_config"], options["device_map"]
        return whole(path, **options)

    whole = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    roles_of(run_config(save_model(tmp_path), lora={}, model={"quantization": bits}), autocast_dtype=precision)
    wanted = {"llm_int8_skip_modules": None}
    if bits == "4bit":
        wanted |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": precision or torch.float32,
        }
    else:
        wanted["load_in_8bit"] = True
    assert vars(asked["quantization_config"]) == wanted
    assert asked["device_map"] == {"": CPU} and asked["dtype"] == torch.float32


def test_what_cannot_be_is_refused_before_a_model_is_loaded(monkeypatch):
    with pytest.raises(ValidationError, match="quantization 4bit: quantized weights cannot be trained themselves"):
        run_config("model", model={"quantization": "4bit"})
    monkeypatch.setattr(few, "version", lambda name: "1")
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(supported_torch_devices={"cuda"}))
    check_bitsandbytes("4bit", "model.quantization", "cuda")
    with pytest.raises(ConfigError, match=r"model.quantization 4bit: bitsandbytes works on cuda, .* computes on mps"):
        check_bitsandbytes("4bit", "model.quantization", "mps")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_the_package_the_message_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"rewards.0.quantization 8bit needs .* pip install 'tether\[quant\]'"):
        check_bitsandbytes("8bit", "rewards.0.quantization", "cuda")


def test_an_adapter_is_not_merged_into_weights_in_few_bits(tmp_path):
    adapter = save_adapter(tmp_path / "adapter", save_model(tmp_path / "base"))
    for load in (load_causal_lm, load_reward_model):
        with pytest.raises(ModelError, match=r"cannot be merged into a base in 4bit: .*`tether merge .*adapter -o"):
            load(str(adapter), dtype=None, few_bits=FewBits("4bit", CPU, torch.float32))


def test_weights_are_never_packed_out_of_the_gradient_s_way():
    layer = torch.nn.Linear(2, 2)
    layer.support_avx512bf16_for_cpu = True
    keep_differentiable(torch.nn.Sequential(layer))
    assert layer.support_avx512bf16_for_cpu is False


# Checkpoints that are saved in few bits


def saved_in_few_bits(monkeypatch, base, *, method="bitsandbytes", has_way_back=True):
    """Stands in for transformers on a checkpoint whose first down projection is packed into bytes; what it was asked.

    De-quantized, the weights are those that ``base`` held.
    """
    plain, asked = shutil.copytree(base, base.with_name("plain")), []
    edit_json(base / "config.json", lambda config: config.update(quantization_config={"quant_method": method}))
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path, **options):
        if path != str(base):
            return load(path, **options)
        asked.append(dict(options))
        options.pop("device_map", None)
        model, info = load(plain, **options)
        layer = model.model.layers[0].mlp.down_proj
        held = layer.weight
        layer.weight = torch.nn.Parameter(torch.zeros(held.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        layer.forward = lambda x: torch.nn.functional.linear(x, held)
        model.is_quantized, model.config.quantization_config = True, QuantizationConfigMixin(quant_method=method)

        def dequantize(dtype=None):
            if not has_way_back:
                raise NotImplementedError(f"{method} has no implementation of `dequantize`, please raise an issue")
            layer.weight = torch.nn.Parameter(held.to(dtype))
            del layer.forward
            model.is_quantized = False
            del model.config.quantization_config
            return model

        model.dequantize = dequantize
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return asked


@pytest.mark.parametrize("reward", [False, True])
def test_an_adapter_is_merged_into_what_a_base_in_few_bits_stands_for(tmp_path, monkeypatch, reward):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, reward=reward, tokenizer=True)
    load = load_reward_model if reward else load_causal_lm
    wanted = load(str(adapter), dtype=torch.float32)
    saved_in_few_bits(monkeypatch, base)
    merge_adapter(str(adapter), tmp_path / "merged")
    for path in (adapter, tmp_path / "merged"):
        got = checksums(load(str(path), dtype=torch.float32))
        assert got.keys() == checksums(wanted).keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in checksums(wanted).items())


@pytest.mark.parametrize("reward", [False, True])
def test_where_there_is_no_way_back_the_message_names_the_base_and_the_way_out(tmp_path, monkeypatch, reward):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, reward=reward)
    saved_in_few_bits(monkeypatch, base, method="gptq", has_way_back=False)
    wanted = rf"{base}: holds quantized weights, .* for gptq .*base_model_name_or_path in the adapter's adapter_config"
    with pytest.raises(ModelError, match=wanted):
        (load_reward_model if reward else load_causal_lm)(str(adapter), dtype=torch.float32)


def test_weights_saved_in_few_bits_go_to_the_device_that_computes_as_they_are_loaded(tmp_path, monkeypatch):
    base = save_model(tmp_path / "base")
    asked = saved_in_few_bits(monkeypatch, base)
    roles_of(run_config(base, lora={}))
    assert asked[-1]["device_map"] == {"": CPU}
    head = {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)}
    save_file(head, base / "value_head.safetensors")
    _model_and_head(ValueHeadReward(type="value_head", path=str(base)), torch.device("cpu"))
    assert asked[-1]["device_map"] == {"": CPU} and len(asked) == 2


def test_a_judge_saved_in_few_bits_goes_to_the_device_that_computes_as_it_is_loaded(tmp_path, monkeypatch):
    folder, asked = save_model(tmp_path / "judge", num_labels=1), {}
    plain = shutil.copytree(folder, tmp_path / "plain")
    load = AutoModelForSequenceClassification.from_pretrained
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq"}))

    def from_pretrained(path, **options):
        asked["device_map"] = options.pop("device_map")
        return load(plain, **options)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", from_pretrained)
    _model_and_head(ModelReward(type="model", path=str(folder)), CPU)
    assert asked == {"device_map": {"": CPU}}


def test_a_reward_model_is_trained_as_an_adapter_on_weights_saved_in_few_bits(tmp_path, monkeypatch):
    base = save_model(tmp_path / "base")
    saved_in_few_bits(monkeypatch, base)
    config = RewardModelConfig(path=str(base), lora={"r": 2})
    model = adapted(start_model(config, None, precision=None, device=CPU), config, None)
    model(torch.tensor([[5, 7, 8]])).logits.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    own = ("lora_", "score.modules_to_save")
    assert trained == {name for name, _ in model.named_parameters() if any(part in name for part in own)}


# With it


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, an adapter to start from, and a reward adapter."""
    root = tmp_path_factory.mktemp("few_bits")
    base = save_model(root / "base", tied=False, hidden=64)
    return base, save_adapter(root / "start", base, tokenizer=True), save_adapter(root / "judge", base, reward=True)


def stand_for(whole, small):
    """Gives the weights of ``whole`` the values that those of ``small`` stand for."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    weights = {name.replace(".base_layer", ""): p for name, p in small.named_parameters()}
    for name, parameter in whole.named_parameters():
        few_bits = weights[name.replace(".base_layer", "")]
        if few_bits.dtype == torch.uint8:
            parameter.data = dequantize_4bit(few_bits.data, few_bits.quant_state)
        elif few_bits.dtype == torch.int8:
            parameter.data = int8_vectorwise_dequant(few_bits.data, few_bits.SCB)


def of_all(roles):
    """Every tensor, and what reference and reward adapter say."""
    batch = micro_batch()
    ids = (batch.token_ids, batch.attention_mask, batch.position_ids)
    return checksums(roles.policy), [roles.ref_logprobs(batch, 1.0), roles.reward_scores("judge", *ids)]


@installed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("start", ["fresh", "loaded"])
@pytest.mark.parametrize("value", ["adapter", "head", "model"])
def test_one_base_in_few_bits_plays_four_roles_and_only_adapters_and_heads_train(folders, bits, start, value):
    base, loaded, judge = folders
    path = base if start == "fresh" else loaded
    roles = roles_of(run_config(path, lora={}, model={"quantization": bits}, value={"kind": value}))
    roles.add_reward_adapter("judge", str(judge))
    batch = micro_batch()
    old = roles.score_pass(batch, 1.0)
    assert torch.equal(old.logprobs, roles.ref_logprobs(batch, 1.0))  # a KL of exactly 0
    before, said = of_all(roles)
    for step in range(3):
        for pass_ in roles.passes:
            with pass_(batch, temperature=1.0) as new:
                for got, wanted in zip((new.logprobs, new.values), (old.logprobs, old.values), strict=True):
                    assert got is None or step > 0 or torch.equal(got, wanted)  # a ratio of exactly 1
                sum(x.add(-1).square().sum() for x in (new.logprobs, new.values) if x is not None).backward()
            optimizer = torch.optim.SGD(pass_.parameters(), lr=0.01)
            assert all(p.grad is not None for p in pass_.parameters())
            optimizer.step()
            optimizer.zero_grad()
    after, says = of_all(roles)
    assert all(torch.equal(a, b) for a, b in zip(said, says, strict=True))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    trained = {id(p) for pass_ in roles.passes for p in pass_.parameters()}
    assert changed == {name for name, p in roles.policy.named_parameters(remove_duplicate=False) if id(p) in trained}
    assert roles.role("value").head.weight.dtype == torch.float32
    assert not torch.equal(roles.score_pass(batch, 1.0).logprobs, old.logprobs)


@installed
def test_gradients_are_those_of_the_weights_that_4_bits_stand_for(folders):
    roles = roles_of(run_config(folders[1], lora={}, model={"quantization": "4bit"}, value={"kind": "head"}))
    batch = micro_batch()
    roles.score_pass(batch, 1.0)
    wanted = roles_of(run_config(folders[1], lora={}, value={"kind": "head"}))
    stand_for(wanted.policy, roles.policy)
    gradients = []
    for each in (roles, wanted):
        (pass_,) = each.passes
        with pass_(batch, temperature=1.0) as out:
            out.logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in each.role("policy").trained.values()]))
    assert gradients[1].norm() > 1
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()


@installed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_judge_in_few_bits_keeps_its_head_and_scores_by_what_they_stand_for(tmp_path, bits, kind):
    if kind == "decoder":
        save_model(tmp_path, num_labels=1, hidden=64)
    else:
        save_encoder(tmp_path)
    few_bits = FewBits(bits, CPU, torch.float32)
    whole, small = (load_reward_model(str(tmp_path), few_bits=each) for each in (None, few_bits))
    head = "score" if kind == "decoder" else "classifier"
    assert torch.equal(small.get_submodule(head).weight, whole.get_submodule(head).weight)
    assert {p.dtype for p in small.parameters()} == {torch.float32, torch.uint8 if bits == "4bit" else torch.int8}
    stand_for(whole, small)
    ids = torch.tensor([[5, 7, 8, 9]])
    with torch.no_grad():
        got, wanted = (each(ids).logits.item() for each in (small, whole))
    # 8 bits round what comes into a layer too
    assert got == pytest.approx(wanted, abs=1e-4 if bits == "4bit" else 0.1)


@installed
def test_a_critic_of_its_own_is_no_copy_of_weights_in_few_bits(tmp_path, folders):
    settings = BitsAndBytesConfig(load_in_4bit=True)
    saved = AutoModelForCausalLM.from_pretrained(folders[0], quantization_config=settings, device_map={"": CPU})
    saved.save_pretrained(tmp_path)
    config = run_config(folders[0], lora={}, value={"kind": "model"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    with pytest.raises(ConfigError, match=r"value\.kind model: .* holds quantized weights"):
        build_roles(config, load_tokenizer(str(folders[0])), device="cpu", autocast_dtype=None)
