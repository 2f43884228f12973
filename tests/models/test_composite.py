"""Models with eyes, whose text model has settings of its own, through every role."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.models.build import (
    QUERIES,
    micro_batch,
    plain_adapted,
    save_adapter,
    save_model,
    save_seeing,
    save_two_trunks,
)
from tests.stages.test_sft import stage as sft_config
from tests.tiny import PAD
from tests.train.runs import tiny_run
from tether.config.reward_stage import RewardModelConfig
from tether.models.build import build_roles
from tether.models.classifiers import load_reward_model
from tether.models.loading import load_config
from tether.models.preprocessing import PROCESSOR_FILES, read_processor
from tether.models.saving import files_written, merge_adapter, verify_manifest
from tether.models.tokenizer import load_tokenizer
from tether.stages import reward as stage
from tether.stages import training
from tether.stages.sft import train_sft
from tether.train.hub import model_files
from tether.train.run import train_policy


@pytest.mark.parametrize(
    "sharing",
    [{"value__kind": "model"}, {"value__kind": "head"}, {"model__lora": {}}],
    ids=["model", "head", "adapter"],
)
def test_a_run_trains_one_and_leaves_a_critic_that_starts_another(tmp_path, sharing):
    options = {"model__path": str(save_seeing(tmp_path / "seeing")), **sharing}
    train_policy(tiny_run(tmp_path, **options, value__save=True, train__max_steps=1))
    folder, kind = tmp_path / "out" / "critic", "adapter" if "model__lora" in sharing else "model"
    if kind == "model":
        critic = AutoModelForSequenceClassification.from_pretrained(folder)
        assert critic.config.get_text_config().pad_token_id == PAD
    again = tiny_run(tmp_path, **options | {"value__kind": kind, "value__init": str(folder)})
    roles = build_roles(again, load_tokenizer(again.model.path), device="cpu", autocast_dtype=None)
    assert roles.score_pass(micro_batch(), 1.0).values.abs().max() > 1e-5


def test_a_reward_adapter_of_one_is_merged(tmp_path):
    adapter = save_adapter(tmp_path / "adapter", save_seeing(tmp_path / "seeing"), reward=True, tokenizer=True)
    merge_adapter(str(adapter), tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.get_text_config().pad_token_id == PAD
    ids, model = torch.tensor([QUERIES[2]]), load_reward_model(str(adapter))
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits)


def test_an_adapter_of_the_stage_is_opened_on_the_trunk_that_it_was_trained_on(tmp_path):
    base = save_two_trunks(tmp_path / "base")
    config = RewardModelConfig(path=str(base), lora={"r": 4, "target_modules": ["q_proj", "out_proj", "down_proj"]})
    model = stage.start_model(config, None, precision=None, device=torch.device("cpu"))
    trained = stage.adapted(model, config, None).eval()
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    training.save(trained, load_tokenizer(str(base)), tmp_path / "adapter")
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    ids = torch.tensor([QUERIES[2]])
    with torch.no_grad():
        wanted = trained(ids).logits
        for path in ("adapter", "merged"):
            torch.testing.assert_close(load_reward_model(str(tmp_path / path)).eval()(ids).logits, wanted)


def test_an_adapter_of_transformers_own_classifier_is_opened_on_that(tmp_path):
    adapter = save_adapter(tmp_path / "adapter", save_two_trunks(tmp_path / "base"), reward=True)
    wanted = plain_adapted(AutoModelForSequenceClassification, tmp_path / "base", adapter, num_labels=1)
    ids = torch.tensor([QUERIES[2]])
    with torch.no_grad():
        torch.testing.assert_close(load_reward_model(str(adapter))(ids).logits, wanted(ids).logits)


def with_processor(folder):
    """What each file of a processor holds, put beside a model."""
    held = {name: json.dumps({"holds": name}).encode() for name in PROCESSOR_FILES}
    for name, content in held.items():
        (folder / name).write_bytes(content)
    return held


def processor_in(folder):
    """The processor's files in a folder, all of which its manifest must list."""
    found = {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).exists()}
    verify_manifest(folder)
    assert found.keys() <= set(files_written(folder))
    return found


def test_what_the_processor_reads_goes_with_every_model_that_sees(tmp_path):
    model = save_seeing(tmp_path / "seeing")
    held = with_processor(model)
    del held["chat_template.json"]  # would be read before the template that the tokenizer brings, which is the run's
    config = tiny_run(tmp_path, model__path=str(model), train__max_steps=1, train__save_steps=1)
    train_policy(config)
    assert processor_in(config.output_dir) == processor_in(config.output_dir / "checkpoint-1") == held
    assert held.keys() <= set(model_files(config.output_dir))
    adapter = save_adapter(tmp_path / "adapter", model, tokenizer=True)
    merge_adapter(str(adapter), tmp_path / "merged")
    assert processor_in(tmp_path / "merged") == held


def test_a_stage_hands_the_processor_on(tmp_path):
    model = save_seeing(tmp_path / "model")
    held = with_processor(model)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(model)
    config = sft_config(tmp_path, rows=[{"prompt": "the cat", "completion": "sees"}] * 6, max_steps=1)
    train_sft(config)
    assert processor_in(config.output_dir) == held


def test_an_adapter_leaves_the_processor_to_its_base(tmp_path, monkeypatch):
    model = save_seeing(tmp_path / "seeing")
    with_processor(model)
    config = tiny_run(tmp_path, model__path=str(model), model__lora={"r": 2}, train__max_steps=1)
    monkeypatch.setattr("tether.models.build.read_processor", lambda *args, **kwargs: pytest.fail("it is read"))
    train_policy(config)
    assert processor_in(config.output_dir) == {}


def test_a_model_that_reads_text_alone_brings_none(tmp_path):
    with_processor(save_model(tmp_path / "model"))
    assert read_processor(str(tmp_path / "model"), load_config(str(tmp_path / "model"))) == {}
