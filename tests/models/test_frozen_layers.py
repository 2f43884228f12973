"""Full fine-tuning with the first layers as they are."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, OPTConfig

from tests.models.build import save_model
from tests.tiny import KINDS
from tests.train.runs import tiny_run
from tests.train.test_run import weights
from tether.config.load import load_config
from tether.errors import ConfigError
from tether.models.layers import parameters_above, transformer_layers
from tether.models.loading import load_causal_lm
from tether.train.plan import plan
from tether.train.run import train_policy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_above_a_layer(tmp_path, kind, tied):
    model = load_causal_lm(str(save_model(tmp_path / "m", kind, tied=tied)), dtype=torch.float32)
    assert len(transformer_layers(model)) == model.config.num_hidden_layers == 2
    everything = dict(model.named_parameters())
    assert parameters_above(model, 0).keys() == everything.keys()
    above = parameters_above(model, 1)
    layers = {"gpt2": "transformer.h", "llama": "model.layers", "qwen2": "model.layers"}[kind]
    norm = {"gpt2": "transformer.ln_f", "llama": "model.norm", "qwen2": "model.norm"}[kind]
    expected = {name for name in everything if name.startswith((f"{layers}.1.", f"{norm}.", "lm_head."))}
    assert above.keys() == expected and any(name.startswith(f"{layers}.1.") for name in expected)
    assert ("lm_head.weight" in above) == (not tied)


def test_layers_that_see_images_come_before_those_that_read():
    text = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    vision = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text | {"num_key_value_heads": 1, "vocab_size": 64},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    frozen = dict(model.named_parameters()).keys() - parameters_above(model, 2).keys()
    assert any(name.startswith("model.language_model.layers.1.") for name in frozen)
    assert all(".layers.2." not in name or "vision_tower" in name for name in frozen)
    assert all(name in frozen for name, _ in model.named_parameters() if "vision_tower" in name)


def test_what_opt_runs_after_its_layers_is_above_them():
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(OPTConfig(**sizes, word_embed_proj_dim=8))
    above = parameters_above(model, 2).keys()
    before = "model.decoder."
    layer, norm = f"{before}layers.2.", f"{before}final_layer_norm."
    assert {name for name in above if not name.startswith((layer, norm))} == {f"{before}project_out.weight"}
    assert {f"{norm}weight", f"{norm}bias", f"{layer}final_layer_norm.weight"} <= above


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["model", "head"])
def test_only_what_is_above_changes(tmp_path, kind, value):
    config = tiny_run(tmp_path, kind=kind, tied=False, model__freeze_layers=1, value__kind=value)
    train_policy(config)
    before, after = weights(tmp_path / f"{kind}-untied"), weights(config.output_dir)
    trained = parameters_above(load_causal_lm(config.model.path, dtype=torch.float32), 1)
    for name, start in before.items():
        moved = not torch.equal(after[name], start)
        # the gradient of a key bias is 0 up to rounding, so that it may stay or move
        assert moved == (name in trained) or "attn.bias" in name, name


def test_plan_counts_what_trains_and_too_many_are_refused(tmp_path):
    config = tiny_run(tmp_path, model__freeze_layers=1)
    policy = plan(config).roles[0]
    assert 0 < policy.trainable < policy.parameters
    with pytest.raises(ConfigError, match=r"model\.freeze_layers 2: the model has 2 layers.*below 2"):
        plan(tiny_run(tmp_path, model__freeze_layers=2))


def test_not_together_with_lora(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: m, freeze_layers: 2, lora: {}}\nrewards: [{type: function, path: r.py, name: f}]\n"
        "data: {prompts: p}\ntrain: {max_steps: 1}\noutput_dir: o\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"freeze_layers 2 is for full fine-tuning.*target_modules"):
        load_config(file)
