"""Adapters trained as sequence classifiers, on the policy's base: as rewards and as critics."""

import shutil

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.models.build import edit_json, micro_batch, plain_adapted, roles_of, run_config, save_adapter, save_model
from tests.rewards.value_heads import plain_value, save_value_head
from tests.tiny import EOS, KINDS, PAD
from tether.data.collate import pad_left
from tether.errors import ConfigError, ModelError
from tether.rewards.build import check_rewards

ROWS = [[5, 7, 8, 9, EOS], [8, EOS], [5, 11, 12, 13, 14, 6, 7]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("rewards")
    model = save_model(root / "model", tied=False)
    return model, save_adapter(root / "reward", model, reward=True, seed=7)


def adapter_reward(path, **sections):
    return {"rewards": [{"type": "adapter", "path": str(path)}]} | sections


def plain_scores(base, adapter):
    """What PEFT and transformers say of each row alone, without padding."""
    model = plain_adapted(AutoModelForSequenceClassification, base, adapter, num_labels=1)
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]


def edited(folder, source, change):
    """A copy of an adapter with its tensors changed in place."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_peft(tmp_path, kind, tied):
    base = save_model(tmp_path / "base", kind, tied=tied)
    reward = save_adapter(tmp_path / "reward", base, reward=True)
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    roles.add_reward_adapter("judge", str(reward))
    wanted = plain_scores(base, reward)
    assert max(wanted) - min(wanted) > 1e-2
    assert roles.reward_scores("judge", *pad_left(ROWS)).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("pickled", [False, True])
def test_llamafactorys_adapters_keep_their_head_in_a_file(tmp_path, pickled):
    reward = save_value_head(tmp_path, form="adapter", pickled=pickled)
    config = run_config(tmp_path / "base", lora={}, **adapter_reward(reward))
    check_rewards(config.rewards)
    roles = roles_of(config)
    roles.add_reward_adapter("judge", str(reward))
    wanted = [plain_value(reward, ids) for ids in ROWS]
    assert max(wanted) - min(wanted) > 1e-2
    assert roles.reward_scores("judge", *pad_left(ROWS)).tolist() == pytest.approx(wanted, abs=1e-5)
    assert roles.role("value").source == str(reward)  # the critic is copied from it as from others


def test_an_adapter_without_any_head_is_refused(folders, tmp_path):
    base, _ = folders
    bare = save_adapter(tmp_path / "bare", base)
    with pytest.raises(ModelError, match=r"rewards.0.path: .*bare is an adapter without a head .*CAUSAL_LM"):
        check_rewards(run_config(base, lora={}, **adapter_reward(bare)).rewards)


def test_only_some_modules_adapted_and_a_loaded_policy(folders, tmp_path):
    base, _ = folders
    reward = save_adapter(tmp_path / "reward", base, reward=True, target_modules=["q_proj", "down_proj"], r=2)
    start = save_adapter(tmp_path / "start", base, tokenizer=True, modules_to_save=["embed_tokens"])
    roles = roles_of(run_config(start, lora={}))
    roles.add_reward_adapter("judge", str(reward))
    assert roles.reward_scores("judge", *pad_left(ROWS)).tolist() == pytest.approx(plain_scores(base, reward), abs=1e-5)


def test_a_copy_of_the_base_is_the_base_and_a_changed_one_is_not(folders, tmp_path):
    base, reward = folders
    copied = shutil.copytree(base, tmp_path / "copied")
    roles = roles_of(run_config(copied, lora={}, value={"kind": "head"}))
    roles.add_reward_adapter("judge", str(reward))
    other = save_model(tmp_path / "other", tied=False, seed=9)
    roles = roles_of(run_config(other, lora={}, value={"kind": "head"}))
    with pytest.raises(ModelError, match=r"trained on .*/model, but the policy's base is .*/other"):
        roles.add_reward_adapter("judge", str(reward))
    assert list(roles.policy.peft_config) == ["default"]


def test_a_base_of_another_size_is_refused_by_shape(folders, tmp_path):
    base, _ = folders
    wide = save_model(tmp_path / "wide", hidden=32)
    reward = save_adapter(tmp_path / "reward", wide, reward=True)
    edit_json(reward / "adapter_config.json", lambda c: c.update(base_model_name_or_path=str(base)))
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    with pytest.raises(ModelError, match=r"score.weight has shape \[1, 32\], wanted \[1, 16\]"):
        roles.add_reward_adapter("judge", str(reward))


LORA_KEY = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LORA_KEY), r"weights are missing: .*layers.1.mlp.up_proj.lora_B.weight"),
        (
            lambda t: t.update({LORA_KEY.replace(".1.", ".2."): t[LORA_KEY].clone()}),
            r"no place in LlamaForCausalLM: .*layers.2",
        ),
        (lambda t: t.update({LORA_KEY: t[LORA_KEY][:, :3].contiguous()}), r"has shape \[32, 3\], wanted \[32, 4\]"),
        (lambda t: t.pop("base_model.model.score.weight"), r"no head; it holds"),
        (lambda t: t.update({"base_model.model.v_head.weight": torch.ones(1, 16)}), r"several heads: score, v_head"),
        (
            lambda t: t.update({"base_model.model.score.weight": torch.ones(3, 16)}),
            r"shape \[3, 16\], wanted \[1, 16\]",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(folders, tmp_path, change, message):
    base, reward = folders
    broken = edited(tmp_path / "broken", reward, change)
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    with pytest.raises(ModelError, match=message):
        roles.add_reward_adapter("judge", str(broken))


def test_a_bias_and_another_name_of_the_head_are_kept(folders, tmp_path):
    base, reward = folders

    def rename(tensors):
        tensors["base_model.model.v_head.summary.weight"] = tensors.pop("base_model.model.score.weight")
        tensors["base_model.model.v_head.summary.bias"] = torch.tensor([0.75])

    biased = edited(tmp_path / "biased", reward, rename)
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    for name, path in (("plain", reward), ("biased", biased)):
        roles.add_reward_adapter(name, str(path))
    plain, shifted = (roles.reward_scores(name, *pad_left(ROWS)) for name in ("plain", "biased"))
    assert (shifted - plain).tolist() == pytest.approx([0.75] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [("bias", "all", "bias=all changes"), ("init_lora_weights", "pissa", "init_lora_weights=pissa changes")],
)
def test_adapters_that_change_the_base_are_refused(folders, tmp_path, setting, value, message):
    base, reward = folders
    changed = shutil.copytree(reward, tmp_path / "changed")
    edit_json(changed / "adapter_config.json", lambda config: config.update({setting: value}))
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    with pytest.raises(ModelError, match=message):
        roles.add_reward_adapter("judge", str(changed))


def test_the_critic_starts_as_a_copy_of_the_reward_adapter(folders):
    base, reward = folders
    for init in (None, "reward", str(reward)):
        roles = roles_of(run_config(base, lora={}, value={"init": init}, **adapter_reward(reward)))
        roles.add_reward_adapter("judge", str(reward))
        ids, mask, positions = pad_left(ROWS)
        with roles.use("value") as model, torch.no_grad():
            hidden = model.base_model(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state[:, -1]
        values = roles.role("value").head(hidden).squeeze(-1).detach()
        assert torch.equal(values, roles.reward_scores("judge", ids, mask, positions))
        assert {p.shape for p in roles.role("value").trained.values()} >= {torch.Size([1, 16]), torch.Size([4, 16])}


def test_training_the_critic_leaves_the_reward_it_was_copied_from(folders):
    base, reward = folders
    roles = roles_of(run_config(base, lora={}, **adapter_reward(reward)))
    roles.add_reward_adapter("judge", str(reward))
    before = roles.reward_scores("judge", *pad_left(ROWS))
    critic = roles.passes[1]
    old = roles.score_pass(micro_batch(), 1.0).values
    with critic(micro_batch(), temperature=1.0) as out:
        out.values.square().sum().backward()
    torch.optim.SGD(critic.parameters(), lr=0.1).step()
    assert torch.equal(roles.reward_scores("judge", *pad_left(ROWS)), before)
    assert not torch.equal(roles.score_pass(micro_batch(), 1.0).values, old)


def test_a_critic_from_the_policy_has_its_settings_and_says_zero(folders, tmp_path):
    base, reward = folders
    start = save_adapter(tmp_path / "start", base, tokenizer=True, r=3, modules_to_save=["lm_head"])
    for path, lora, rank in ((base, {"r": 5, "target_modules": ["v_proj"]}, 5), (start, {}, 3)):
        roles = roles_of(run_config(path, lora=lora, value={"init": "policy"}, **adapter_reward(reward)))
        policy, value = (roles.policy.peft_config[name] for name in ("default", "value"))
        assert (value.r, value.lora_alpha, value.target_modules) == (rank, policy.lora_alpha, policy.target_modules)
        assert not any("modules_to_save.value" in name for name, _ in roles.policy.named_parameters())
        assert not roles.score_pass(micro_batch(), 1.0).values.any()


def test_inits_that_cannot_be_copied_are_refused_before_a_model_loads(folders):
    base, _ = folders
    for options, wanted in ({"lora": {}}, "adapter"), ({}, "model or adapter"):
        with pytest.raises(ValidationError, match=rf"init reward: the first .* of type function, .* from {wanted};"):
            run_config(base, value={"init": "reward"}, **options)
    with pytest.raises(ConfigError, match=r"value.init: .*/model holds no adapter_config.json"):
        roles_of(run_config(base, lora={}, value={"init": str(base)}))


def test_pad_id_of_the_tokenizer_does_not_matter(folders):
    """Ids equal to the pad token inside a text are read like any other."""
    base, reward = folders
    roles = roles_of(run_config(base, lora={}, value={"kind": "head"}))
    roles.add_reward_adapter("judge", str(reward))
    rows = [[5, 7, PAD], [5, 7, 8, 9, 10]]
    together = roles.reward_scores("judge", *pad_left(rows))
    alone = torch.cat([roles.reward_scores("judge", *pad_left([row])) for row in rows])
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
