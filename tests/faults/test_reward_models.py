"""Class D of the fault list: reward models of other vocabularies, without templates, with heads of other names.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.rewards.value_heads import save_value_head
from tests.stages.test_reward_stage import stage_config
from tests.tiny import WORDS, save_tiny, tiny_tokenizer
from tests.train.runs import tiny_run, write_prompts
from tether.errors import ConfigError, DataError, ModelError
from tether.metrics.writers import read_jsonl
from tether.models.tokenizer import load_tokenizer
from tether.stages.reward import train_reward_model
from tether.train.run import train_policy


def judged_run(folder, path, **changes):
    rewards = [{"type": "model", "path": str(path), "name": "judge"}]
    return tiny_run(folder, rewards=rewards, train__max_steps=1, ppo__num_ppo_epochs=1, **changes)


@pytest.fixture
def untouched(monkeypatch):
    """Fails the test if a run gets as far as its models."""
    monkeypatch.setattr("tether.train.run.build_trainer", None)


@torch.no_grad()
def plain_score(folder, text):
    """What transformers alone gives for a text that holds its special tokens."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits.item()


def test_40_a_judge_with_the_same_words_under_other_ids_reads_text(tmp_path):
    """The vocabularies have one size, so that the policy's ids would all be in range, and mean other words."""
    judge = save_tiny(tmp_path / "judge", num_labels=1, pad="eos", seed=3)
    file = judge / "tokenizer.json"
    settings = json.loads(file.read_text())
    ids = {word: settings["model"]["vocab"][other] for word, other in zip(WORDS, reversed(WORDS), strict=True)}
    settings["model"]["vocab"] |= ids
    file.write_text(json.dumps(settings))
    assert load_tokenizer(str(judge)).get_vocab().keys() == tiny_tokenizer().get_vocab().keys()
    config = judged_run(tmp_path, judge)
    train_policy(config)
    rows = read_jsonl(config.output_dir / "samples.jsonl")
    assert len(rows) == 8 and len({row["rewards"]["judge"] for row in rows}) > 4
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        text = load_tokenizer(str(judge)).apply_chat_template(turns, tokenize=False)
        assert row["rewards"]["judge"] == pytest.approx(plain_score(judge, text), abs=1e-5)


def test_43_a_base_model_without_a_template_trains_on_plain_text(tmp_path):
    policy = save_tiny(tmp_path / "plain", chat_template=False)
    judge = save_tiny(tmp_path / "judge", num_labels=1, chat_template=False, seed=3)
    config = judged_run(tmp_path, judge, model__path=str(policy))
    train_policy(config)
    checked = 0
    for row in read_jsonl(config.output_dir / "samples.jsonl"):
        end = ["<eos>"] if row["finish_reason"] == "stop" else []
        words = [*row["response"].split(), *end]
        if len(words) == row["length"]:  # no special token within it, which text does not show
            text = " ".join([row["prompt"], *words])
            assert row["rewards"]["judge"] == pytest.approx(plain_score(judge, text), abs=1e-5)
            checked += 1
    assert checked > 1


@pytest.mark.parametrize(
    ("policy", "judge", "error", "message"),
    [
        ({"chat_template": False}, {}, DataError, r"row 0 \(line 1\): .*no chat template"),
        ({}, {"chat_template": False, "pad": "eos"}, ConfigError, r"rewards\.0: .*row 0 .*has no chat template"),
    ],
    ids=["the policy's", "the judge's"],
)
def test_43_messages_without_a_template_are_refused_by_their_row(
    tmp_path, untouched, policy, judge, error, message
):
    chats = [[{"role": "user", "content": "the cat"}]]
    config = judged_run(
        tmp_path,
        save_tiny(tmp_path / "judge", num_labels=1, seed=3, **judge),
        model__path=str(save_tiny(tmp_path / "policy", **policy)),
    )
    write_prompts(tmp_path / "prompts.jsonl", chats)
    with pytest.raises(error, match=message):
        train_policy(config)


STRICT = "{% if messages | length < 2 %}{{ raise_exception('wanted user and assistant') }}{% endif %}"


def test_43_a_template_that_wants_both_turns_is_refused_for_prompts_and_will_do_for_a_judge(tmp_path, untouched):
    policy = save_tiny(tmp_path / "policy")
    (policy / "chat_template.jinja").write_text(STRICT + (policy / "chat_template.jinja").read_text())
    with pytest.raises(DataError, match=r"row 0 .*wanted user and assistant"):
        train_policy(judged_run(tmp_path, save_tiny(tmp_path / "judge", num_labels=1), model__path=str(policy)))


def test_43_a_judge_that_wants_both_turns_gets_both(tmp_path):
    judge = save_tiny(tmp_path / "judge", num_labels=1, seed=3)
    (judge / "chat_template.jinja").write_text(STRICT + (judge / "chat_template.jinja").read_text())
    result = train_policy(judged_run(tmp_path, judge))
    assert torch.isfinite(torch.tensor(result.updates[0]["rewards/judge"]))


def renamed(folder, change):
    """The reward model with other tensors in its file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["v_head.summary", "value_head", "reward_head"])
def test_44_a_head_of_another_name_with_a_bias_scores_as_it_was_trained(tmp_path, name):
    def change(tensors):
        tensors[f"{name}.weight"] = tensors.pop("score.weight")
        tensors[f"{name}.bias"] = torch.tensor([2.5])

    usual = save_tiny(tmp_path / "usual", num_labels=1, seed=3)
    odd = renamed(save_tiny(tmp_path / "odd", num_labels=1, seed=3), change)
    scores = []
    for path in (usual, odd):
        config = judged_run(tmp_path, path, output_dir=str(tmp_path / f"out-{path.name}"))
        train_policy(config)
        scores.append([row["rewards"]["judge"] for row in read_jsonl(config.output_dir / "samples.jsonl")])
    assert scores[1] == pytest.approx([score + 2.5 for score in scores[0]], abs=1e-5)


ODD_HEADS = {
    "no head": (lambda t: t.pop("score.weight"), "holds no scalar head"),
    "a head of an unknown name": (lambda t: t.update({"judge.weight": t.pop("score.weight")}), "holds no scalar head"),
    "two heads": (lambda t: t.update({"v_head.weight": t["score.weight"].clone()}), "several heads: score, v_head"),
    "a foreign weight": (lambda t: t.update({"adapter.weight": torch.ones(2, 2)}), r"no place in .*: adapter\.weight"),
    "a layer less": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        r"would be random: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
}


@pytest.mark.parametrize(("change", "told"), ODD_HEADS.values(), ids=ODD_HEADS)
def test_44_a_weight_that_is_missing_or_has_no_place_ends_the_run_before_it_began(tmp_path, change, told):
    judge = renamed(save_tiny(tmp_path / "judge", num_labels=1), change)
    config = judged_run(tmp_path, judge)
    with pytest.raises(ModelError, match=told):
        train_policy(config)
    assert not (config.output_dir / "metrics.jsonl").exists() or read_jsonl(config.output_dir / "metrics.jsonl") == []


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
def test_45_the_last_folder_of_the_reward_stage_and_its_checkpoints_all_judge(tmp_path, lora):
    stage = stage_config(tmp_path, lora=lora, num_train_epochs=2, save_steps=2)
    train_reward_model(stage)
    checkpoints = sorted(stage.output_dir.glob("checkpoint-*"))
    assert checkpoints
    kinds = ("model", "adapter") if lora else ("model",)
    for folder in (stage.output_dir, checkpoints[0]):
        for kind in kinds:
            changes = {"model": {"path": stage.model.path, "lora": {"r": 2}}}
            rewards = [{"type": kind, "path": str(folder), "name": "judge"}]
            config = tiny_run(
                tmp_path,
                rewards=rewards,
                train__max_steps=1,
                ppo__num_ppo_epochs=1,
                output_dir=str(tmp_path / f"{kind}-{folder.name}"),
                **changes,
            )
            scores = [row["rewards"]["judge"] for row in read_jsonl(train_policy(config).output_dir / "samples.jsonl")]
            assert len(set(scores)) > 2


def test_45_a_value_head_that_is_missing_is_named_with_what_writes_it(tmp_path, untouched):
    reward = save_value_head(tmp_path / "llamafactory")
    (reward / "value_head.safetensors").unlink()
    config = tiny_run(tmp_path, rewards=[{"type": "value_head", "path": str(reward)}])
    with pytest.raises(ModelError, match=r"value_head\.bin is missing.*`stage: rm` writes it"):
        train_policy(config)
    shutil.rmtree(reward)
    with pytest.raises(ModelError, match=r"rewards\.0\.path: .*does not exist"):
        train_policy(config)
