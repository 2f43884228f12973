"""TRL's trainer: what it takes, what it does, what it leaves behind."""

import copy
import json
import math
import re
import shutil
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Gemma3TextConfig,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    TrainerCallback,
)

from tests.compat.trl_runs import TEXTS, arguments, classifier, loaded, policy, rows, trainer
from tests.tiny import EOS, PAD, SPECIAL, VOCAB_SIZE, WORDS, save_tiny, tiny_config, tiny_tokenizer
from tether.compat.trl import PPOTrainer, events
from tether.compat.trl.arguments import check_kinds
from tether.compat.trl.data import prompts_of
from tether.compat.trl.former import OF_TRANSFORMERS
from tether.compat.trl.samples import print_table
from tether.config.load import load_config
from tether.config.schema import RunConfig
from tether.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError
from tether.metrics.writers import read_jsonl
from tether.train.run import train_policy

TRL_METRICS = {
    "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
    "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg",
    "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode", "epoch",
}  # fmt: skip


def lora():
    """Settings of an adapter; PEFT writes into those that it is given."""
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])


def virtual():
    """Settings of virtual tokens, which are no part of a model's layers."""
    return PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)


def of_head():
    """Settings of an adapter of a classifier's head."""
    return LoraConfig(target_modules=["score"])


def words(prompts, completions, **columns):
    return [float(len(completion.split())) for completion in completions]


def short(prompts, completions):
    return [-1.0 for _ in completions]


def tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before, model):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}


def timeless(row):
    return {name: value for name, value in row.items() if not re.search("time/|speed/|memory/|^eps$|^epoch$", name)}


class Seen(TrainerCallback):
    """Notes every event."""

    def __init__(self):
        self.events, self.logs, self.given = [], [], {}

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def noted(args, state, control, **kwargs):
            self.events.append((name, state.global_step))
            self.given = {**kwargs, "args": args}
            self.logs += [kwargs["logs"]] if name == "on_log" else []

        return noted


def test_a_run_trains_both_models_in_place_and_logs_under_trls_names(tmp_path):
    model, value, reward, seen = policy(tmp_path), classifier(tmp_path), classifier(tmp_path), Seen()
    before = [tensors(each) for each in (model, value, reward)]
    made = trainer(tmp_path, model=model, value_model=value, reward_model=reward, callbacks=[seen])
    reference = made.ref_model
    assert made.train() is None
    assert made.policy_model is model is made.model.policy
    assert made.model.value_model is value
    assert len(changed(before[0], model)) > 10
    assert len(changed(before[1], value)) > 10
    assert not changed(before[2], reward)
    assert not changed(before[0], reference)
    history = made.state.log_history
    assert [row["step"] for row in history] == [1, 2]
    assert all(row.keys() >= TRL_METRICS for row in history)
    assert (history[0]["objective/kl"], history[0]["val/first_ratio_error"]) == (0, 0)
    assert history[1]["objective/kl"] != 0
    assert (made.state.global_step, made.state.episode, made.state.max_steps) == (2, 16, 2)
    assert history[1]["epoch"] == pytest.approx(16 / len(TEXTS))
    names = [name for name, _ in seen.events]
    assert names[0] == "on_train_begin"
    assert names[-1] == "on_train_end"
    assert [step for name, step in seen.events if name == "on_step_end"] == [1, 2]
    assert names.index("on_log") < names.index("on_step_end")
    assert [{k: v for k, v in row.items() if k != "step"} for row in history] == seen.logs
    assert seen.given["args"] is made.args
    assert seen.given["model"] is made.model
    assert seen.given["processing_class"] is made.processing_class
    assert seen.given["optimizer"] is made.optimizer


def test_the_policy_is_saved_as_transformers_saves_it(tmp_path):
    made = trainer(tmp_path)
    made.train()
    made.save_model(tmp_path / "saved")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert not changed(tensors(made.policy_model), again)
    assert again.generation_config.eos_token_id == EOS
    assert again.config.use_cache == loaded(tmp_path, "llama", None).config.use_cache
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"metrics.jsonl", "samples.jsonl", "config.yaml", "report.html", "checkpoint-2"}
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2]


def test_what_scripts_write_at_their_end(tmp_path, capsys):
    made = trainer(tmp_path, eval_dataset=rows(tiny_tokenizer(), TEXTS[:2]), reward_model=words)
    made.train()
    made.save_state()
    written = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert (written["global_step"], written["log_history"]) == (2, made.state.log_history)
    made.log_metrics("eval", {"eval_scores": 1.5})
    assert "***** eval metrics *****\n  eval_scores = 1.5\n" in capsys.readouterr().out.replace(" " * 8, " ")
    made.save_metrics("train", {"episodes": 16})
    made.save_metrics("eval", {"eval_scores": 1.5})
    made.save_metrics("test", {"other": 1.0}, combined=False)
    saved = {name: json.loads((tmp_path / "out" / f"{name}_results.json").read_text()) for name in ("eval", "all")}
    assert saved == {"eval": {"eval_scores": 1.5}, "all": {"episodes": 16, "eval_scores": 1.5}}
    assert not made.is_deepspeed_enabled and not made.is_fsdp_enabled


def test_metrics_are_saved_before_a_run_too(tmp_path):
    trainer(tmp_path).save_metrics("eval", {"eval_scores": 1.5})
    assert (tmp_path / "out" / "all_results.json").is_file()


def test_other_attributes_of_transformers_are_told(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(AttributeError, match="PPOTrainer has no callback_handler: use add_callback, pop_callback and"):
        _ = made.callback_handler
    with pytest.raises(AttributeError, match=r"has no floating_point_ops, which transformers\.Trainer has: docs"):
        made.floating_point_ops({})
    with pytest.raises(AttributeError, match="'PPOTrainer' object has no attribute 'nonsense'"):
        _ = made.nonsense
    assert not hasattr(made, "callback_handler") and not hasattr(made, "_nonsense")
    for name, instead in OF_TRANSFORMERS.items():
        assert not hasattr(PPOTrainer, name)
        used = re.findall(r"\w+", instead.partition(", with")[0].partition(", or the")[0].partition(", whose")[0])
        known = {*dir(made), "and", "or", "once", "for", "each", "setting"}
        assert set(used) <= known, name


def test_evaluations_of_other_data_have_their_own_prefix(tmp_path):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=5, metric_for_best_model="scores")
    made = trainer(tmp_path, args=args, eval_dataset=rows(tiny_tokenizer(), TEXTS[:2]), reward_model=words)
    own = made.evaluate()
    seen = Seen()
    made.add_callback(seen)
    others = made.evaluate(Dataset.from_list(rows(tiny_tokenizer(), TEXTS[2:])), metric_key_prefix="test")
    assert {name.removeprefix("test_") for name in others} == {name.removeprefix("eval_") for name in own}
    assert made.state.log_history[-1]["test_scores"] == others["test_scores"]
    assert [name for name, _ in seen.events] == ["on_log", "on_evaluate"]
    assert made.state.best_metric == own["eval_scores"]
    several = made.evaluate({"a": rows(tiny_tokenizer(), TEXTS[:2]), "b": rows(tiny_tokenizer(), TEXTS[2:])})
    assert several["eval_a_scores"] == own["eval_scores"] and several["eval_b_scores"] == others["test_scores"]
    with pytest.raises(DataError, match="eval_dataset: wanted a column input_ids"):
        made.evaluate([{"question": "the cat"}])
    with pytest.raises(ConfigError, match="there is no eval_dataset; give one to PPOTrainer"):
        trainer(tmp_path).evaluate()


def test_completions_are_sent_to_the_run_of_wandb(tmp_path, monkeypatch, caplog):
    sent = []
    wandb = SimpleNamespace(run=object(), log=sent.append, Table=lambda columns, data: (columns, data))
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(events, "get_reporting_integration_callbacks", lambda names: [])
    data = rows(tiny_tokenizer(), TEXTS[:2])
    made = trainer(tmp_path, args=arguments(tmp_path, report_to=["wandb"]), eval_dataset=data, reward_model=words)
    table = made.generate_completions()
    (columns, values) = sent[0]["completions"]
    assert columns == ["query", "model response", "score"] and values == [list(row.values()) for row in table]
    wandb.run = None
    made.generate_completions()
    trainer(tmp_path, eval_dataset=data, reward_model=words).generate_completions()
    assert len(sent) == 1
    wandb.run, wandb.Table = object(), None
    made.generate_completions()
    assert "generate_completions: wandb failed: TypeError" in caplog.text


def test_a_card_and_what_scripts_ask_before_they_write_or_stop(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(ConfigError, match="holds no run yet; train first"):
        made.create_model_card()
    assert made.is_world_process_zero() is made.is_local_process_zero() is True
    assert made.control.should_training_stop is False
    made.train()
    card = made.create_model_card(model_name="mine", dataset_name="yours", tags="small")
    text = card.read_text(encoding="utf-8")
    assert card == tmp_path / "out" / "README.md" and all(word in text for word in ("mine", "yours", "small"))


def test_it_is_the_run_that_tether_makes_of_the_same_settings(tmp_path):
    """No second loop: every metric of the updates is bitwise that of ``train_policy`` on the same folders."""
    loaded(tmp_path, "llama", None), loaded(tmp_path, "llama", 1)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    judge = str(tmp_path / "llama-1")
    args = arguments(tmp_path, num_mini_batches=2, missing_eos_penalty=0.5, kl_estimator="k3", whiten_rewards=True)
    made = trainer(tmp_path, args=args, train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS]))
    made.train()
    config = RunConfig.model_validate({
        "model": {"path": str(tmp_path / "llama-None")},
        "value": {"init": judge},
        "rewards": [{"type": "model", "path": judge, "name": "llama-1"}],
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "sampling": {"response_length": 6, "temperature": 0.7},
        "ppo": {
            "num_ppo_epochs": 2, "num_mini_batches": 2, "missing_eos_penalty": 0.5, "kl_estimator": "k3",
            "whiten_rewards": True,
        },
        "train": {
            "total_episodes": 16, "rollout_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3,
            "adam_epsilon": 1e-8, "gradient_checkpointing": True, "bf16": False, "seed": 0,
        },
        "output_dir": str(tmp_path / "native"),
    })  # fmt: skip
    native = train_policy(config)
    assert [timeless(row) for row in made.state.log_history] == [timeless(row) for row in native.updates]


def test_peft_config_trains_an_adapter_over_the_model_as_reference(tmp_path):
    model = policy(tmp_path)
    before = tensors(model)
    made = trainer(tmp_path, model=model, peft_config=lora())
    made.train()
    assert made.is_peft_model
    assert made.ref_model is None
    assert (made.state.log_history[0]["objective/kl"], made.state.log_history[1]["objective/kl"] != 0) == (0, True)
    made.save_model()
    base = policy(tmp_path)
    assert not changed(before, base)
    again = PeftModel.from_pretrained(base, tmp_path / "out")
    assert again.peft_config["default"].base_model_name_or_path == str(tmp_path / "llama-None")
    assert again.peft_config["default"].task_type == "CAUSAL_LM"
    ids = torch.tensor([[7, 20, 22]])
    assert torch.equal(again(ids).logits, made.policy_model.eval()(ids).logits)
    with made.policy_model.disable_adapter():
        assert torch.equal(made.policy_model(ids).logits, policy(tmp_path).eval()(ids).logits)


def test_adapters_by_name_one_trains_and_one_is_the_reference(tmp_path):
    model = get_peft_model(policy(tmp_path), lora(), adapter_name="learner")
    model.add_adapter("kept", lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    before = tensors(model)
    args = arguments(tmp_path, model_adapter_name="learner", ref_adapter_name="kept")
    made = trainer(tmp_path, args=args, model=model)
    made.train()
    moved = changed(before, model)
    assert moved
    assert all(".learner." in name for name in moved)
    assert made.state.log_history[0]["objective/kl"] != 0  # lora_A differs between the two
    made.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    again = PeftModel.from_pretrained(policy(tmp_path), tmp_path / "out")
    ids = torch.tensor([[7, 20, 22]])
    assert torch.equal(again(ids).logits, made.policy_model.eval()(ids).logits)


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_adapter_that_was_trained_before_is_its_own_start(tmp_path, is_whole):
    whole = {"modules_to_save": ["down_proj"]} if is_whole else {}
    start = get_peft_model(policy(tmp_path), LoraConfig(r=2, target_modules=["q_proj"], **whole))
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.05)
    start.save_pretrained(tmp_path / "sft")
    model = PeftModel.from_pretrained(policy(tmp_path), tmp_path / "sft", is_trainable=True)
    ids = torch.tensor([[7, 20, 22]])
    before = start.eval()(ids).logits
    made = trainer(tmp_path, model=model)
    made.train()
    history = made.state.log_history
    assert history[0]["objective/kl"] == 0 and history[1]["objective/kl"] != 0
    made.save_model()
    again = PeftModel.from_pretrained(policy(tmp_path), tmp_path / "out")
    trained = made.policy_model.eval()(ids).logits
    assert torch.equal(again(ids).logits, trained) and not torch.equal(trained, before)
    made.policy_model.set_adapter("reference")
    assert torch.equal(made.policy_model(ids).logits, before)


def test_a_reference_model_is_what_the_kl_is_to(tmp_path):
    other = policy(tmp_path)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    made = trainer(tmp_path, ref_model=other)
    assert made.ref_model is other
    made.train()
    assert made.state.log_history[0]["objective/kl"] > 0.1


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_precision_is_autocast_over_float32_weights(tmp_path, kind):
    made = trainer(tmp_path, args=arguments(tmp_path, **{kind: True}), peft_config=lora())
    made.train()
    first = made.state.log_history[0]
    assert ("policy/loss_scale" in first) == (kind == "fp16")
    assert (first["objective/kl"], first["val/first_ratio_error"]) == (0, 0)
    assert {parameter.dtype for parameter in made.policy_model.parameters()} == {torch.float32}


@pytest.mark.parametrize("peft_config", [None, lora()])
def test_a_policy_may_be_made_in_memory(tmp_path, peft_config):
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    assert not model.name_or_path
    made = trainer(tmp_path, model=model, peft_config=peft_config)
    made.train()
    made.save_model(tmp_path / "saved")
    assert "path: in memory\n" in (tmp_path / "out" / "config.yaml").read_text()


def test_frozen_parameters_of_the_policy_stay(tmp_path):
    model = policy(tmp_path)
    model.model.layers[0].requires_grad_(False)
    before = tensors(model)
    trainer(tmp_path, model=model).train()
    assert changed(before, model)
    assert not any(name.startswith("model.layers.0.") for name in changed(before, model))


def test_all_models_are_in_eval_mode_and_a_judge_is_frozen(tmp_path):
    made = {"model": policy(tmp_path), "value_model": classifier(tmp_path), "reward_model": classifier(tmp_path)}
    for model in made.values():
        model.train()
    run = trainer(tmp_path, **made)
    for do in (lambda: None, run.train):
        do()
        assert not any(module.training for model in made.values() for module in model.modules())
        trains = {name: {p.requires_grad for p in model.parameters()} for name, model in made.items()}
        assert trains == {"model": {True}, "value_model": {True}, "reward_model": {False}}


def test_a_judge_with_an_adapter_scores_alike_merged_and_from_its_folder(tmp_path):
    loaded(tmp_path, "llama", 1)
    torch.manual_seed(3)
    judge = get_peft_model(classifier(tmp_path), LoraConfig(task_type="SEQ_CLS", init_lora_weights=False))
    judge.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    made = trainer(tmp_path, reward_model=[str(tmp_path / "judge"), judge.merge_and_unload(), classifier(tmp_path)])
    made.train()
    row = made.state.log_history[0]
    folder, merged, base = (row[f"rewards/{name}"] for name in ("judge", "llama-1_1", "llama-1_2"))
    assert folder == pytest.approx(merged, abs=1e-5) and abs(folder - base) > 1e-3


class Backbone(torch.nn.Module):
    """Notes how it was called; its hidden states are the token ids."""

    def __init__(self):
        super().__init__()
        self.given, self.dummy = [], torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask, **kwargs):
        self.given.append({"input_ids": input_ids, "attention_mask": attention_mask, **kwargs})
        return SimpleNamespace(hidden_states=(None, input_ids.float().unsqueeze(-1)))


class ByRules(torch.nn.Module):
    """A judge as TRL's users wrap rules: what TRL asks of a reward model, and no more."""

    base_model_prefix = "backbone"

    def __init__(self, scores=lambda states: states):
        super().__init__()
        self.backbone, self.scores = Backbone(), scores

    def score(self, states):
        return self.scores(states)


def test_a_module_of_the_scripts_own_judges_as_trl_asks_it_to(tmp_path):
    def last(prompts, completions, completion_ids):
        return [float(ids[-1]) for ids in completion_ids]

    judge = ByRules()
    args = arguments(tmp_path, local_rollout_forward_batch_size=3)
    made = trainer(tmp_path, args=args, reward_model=[judge, last])
    made.train()
    assert made.reward_model[0] is judge
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert samples and all(sample["rewards"]["ByRules"] == sample["rewards"]["last"] for sample in samples)
    calls = judge.backbone.given
    assert [len(call["input_ids"]) for call in calls] == [3, 3, 2, 3, 3, 2]
    assert not all(call["attention_mask"][:, 0].all() for call in calls)  # queries are padded on the left
    for call in calls:
        ids, mask, positions = (call.pop(name) for name in ("input_ids", "attention_mask", "position_ids"))
        assert mask.dtype == torch.bool and not ids[~mask].any()
        assert torch.equal(positions[mask], (mask.cumsum(1) - 1)[mask])
        assert call == {"return_dict": True, "output_hidden_states": True, "use_cache": False}


def test_a_module_that_has_no_score_for_each_token_is_an_error(tmp_path):
    with pytest.raises(RewardError, match=r"reward ByRules: score returned a tensor of shape \(8,\) for 8 answers of"):
        trainer(tmp_path, reward_model=ByRules(lambda states: states[:, -1, 0])).train()
    with pytest.raises(RewardError, match="reward ByRules returned nan"):
        trainer(tmp_path, reward_model=ByRules(lambda states: states * math.nan)).train()


def test_a_wrapped_classifier_scores_as_the_classifier_does(tmp_path):
    class Wrapped:
        base_model_prefix = "inner"

        def __init__(self, model):
            self.inner, self.score = model.model, model.score

    judge = classifier(tmp_path)
    made = trainer(tmp_path, reward_model=[classifier(tmp_path), Wrapped(judge)])
    made.train()
    row = made.state.log_history[0]
    assert row["rewards/llama-1"] == pytest.approx(row["rewards/Wrapped"], abs=1e-5)


class OwnCritic(torch.nn.Module):
    """A critic as TRL's trainer asks for it: a backbone, and a head of two layers."""

    base_model_prefix = "trunk"

    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.unused = trunk, torch.nn.Linear(4, 4)
        self.score = scores_of_two_layers()


def scores_of_two_layers():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_module_of_the_scripts_own_may_be_the_critic(tmp_path, bf16):
    """And a classifier whose head is no single layer may be it, and the judge, with the same results."""
    judge = classifier(tmp_path)
    judge.score = scores_of_two_layers()
    of_judge, as_classifier, critic = tensors(judge), copy.deepcopy(judge), OwnCritic(classifier(tmp_path).model)

    def run(value, **given):
        made = trainer(
            tmp_path, args=arguments(tmp_path, save_steps=1, bf16=bf16), value_model=value, reward_model=judge
        )
        made.train(**given)
        assert made.value_model is value is made.model.value_model
        return [timeless(row) for row in made.state.log_history]

    before = tensors(critic)
    assert run(as_classifier) == run(critic)
    assert {name.split(".")[0] for name in changed(before, critic)} == {"trunk", "score"}
    assert not changed(of_judge, judge)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    again = OwnCritic(classifier(tmp_path).model)
    run(again, resume_from_checkpoint=True)
    assert changed(tensors(critic), again) == {"unused.weight", "unused.bias"}  # neither trunk nor score


class MethodCritic(torch.nn.Module):
    """A critic whose ``score`` is a method, which leaves the last dimension out."""

    base_model_prefix = "trunk"

    def __init__(self, trunk, head):
        super().__init__()
        self.trunk, self.head = trunk, head

    def score(self, states):
        return self.head(states).squeeze(-1)


def test_a_method_of_the_scripts_own_may_be_the_critics_head(tmp_path):
    of_method, as_classifier = classifier(tmp_path), classifier(tmp_path)
    critic = MethodCritic(of_method.model, of_method.score)
    before, losses = tensors(critic), []
    for value in (critic, as_classifier):
        made = trainer(tmp_path, value_model=value)
        made.train()
        losses.append([row["loss/value_avg"] for row in made.state.log_history])
        shutil.rmtree(tmp_path / "out")
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert changed(before, critic) == set(before)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_critic_on_the_policys_own_layers_is_a_head_of_the_policy(tmp_path, is_adapted):
    model = policy(tmp_path)
    value = MethodCritic(model.model, scores_of_two_layers())
    before = tensors(value.head)
    args = arguments(tmp_path, vf_coef=0.5, save_steps=1)
    made = trainer(tmp_path, args=args, model=model, value_model=value, peft_config=lora() if is_adapted else None)
    made.train()
    config = load_config(tmp_path / "out" / "config.yaml", section=RunConfig)
    assert (config.value_kind, config.ppo.vf_coef) == ("head", 0.5)
    assert changed(before, value.head) == set(before)
    assert made.state.log_history[0]["objective/kl"] == 0
    assert [each.value_weight for each in made._optimizers] == [0.5]
    with torch.no_grad():  # the critic reads the layers that the policy trained
        ids = torch.tensor([[7, 8]])
        states = made.policy_model(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(value.trunk(ids).last_hidden_state, states)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    base = policy(tmp_path)
    again = MethodCritic(base.model, scores_of_two_layers())
    more = trainer(tmp_path, args=args, model=base, value_model=again, peft_config=lora() if is_adapted else None)
    more.train(resume_from_checkpoint=True)
    assert not changed(tensors(value), again)


def test_a_head_that_makes_no_number_of_a_state_is_refused(tmp_path):
    critic, without, headless = (OwnCritic(classifier(tmp_path).model) for _ in range(3))
    critic.score, headless.score = torch.nn.Linear(16, 3), None
    without.trunk = torch.nn.Linear(4, 4)
    loose, wide = (MethodCritic(classifier(tmp_path).model, torch.nn.Linear(16, 2)) for _ in range(2))
    loose.scale = torch.nn.Parameter(torch.ones(1))
    narrow, pair = classifier(tmp_path), classifier(tmp_path)
    narrow.score, pair.score = torch.nn.Sequential(torch.nn.Linear(8, 1)), torch.nn.Sequential(torch.nn.Linear(16, 2))
    for given, message in (
        ({"value_model": critic}, "value_model: got a classifier with 3 labels, wanted a sequence classifier"),
        ({"value_model": headless}, "value_model: got OwnCritic, wanted a sequence classifier .*, or a module with b"),
        ({"value_model": without}, "value_model: got OwnCritic with a Linear as backbone, wanted .* a model of transf"),
        ({"value_model": loose}, "value_model: scale of MethodCritic are in none of its modules, wanted a sequence"),
        ({"value_model": wide}, r"value_model: the score of MethodCritic gives values of shape \[2, 2\] for hidden"),
        ({"value_model": narrow}, r"value_model: the score of LlamaForSeq.* gives RuntimeError: .*\[2, 1\]"),
        ({"reward_model": pair}, r"reward_model: the score of Llama.* gives values of shape \[2, 2\] .* \[2, 16\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path, **given)


def test_judge_and_critic_may_be_in_pefts_wrapper(tmp_path):
    torch.manual_seed(3)
    judge = get_peft_model(classifier(tmp_path), LoraConfig(task_type="SEQ_CLS", init_lora_weights=False))
    merged = copy.deepcopy(judge).merge_and_unload()
    critic = get_peft_model(classifier(tmp_path), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]))
    before, of_judge = tensors(critic), tensors(judge)
    made = trainer(tmp_path, reward_model=[judge, merged], value_model=critic)
    made.train()
    row = made.state.log_history[0]
    assert row["rewards/llama-1_0"] == pytest.approx(row["rewards/llama-1_1"], abs=1e-5)
    assert made.value_model is critic is made.model.value_model and not changed(of_judge, judge)
    assert {re.sub(r".*\.(score|lora_[AB])\..*", r"\1", name) for name in changed(before, critic)} == {
        "lora_A", "lora_B", "score",
    }  # fmt: skip
    critic.save_pretrained(tmp_path / "critic")
    again = PeftModel.from_pretrained(classifier(tmp_path), tmp_path / "critic")
    assert not changed(tensors(critic), again)


def test_rewards_may_be_functions_paths_and_models_which_are_added_up(tmp_path):
    loaded(tmp_path, "llama", 1)
    made = trainer(tmp_path, reward_model=[words, short, str(tmp_path / "llama-1"), classifier(tmp_path)])
    made.train()
    names = {name for name in made.state.log_history[0] if name.startswith("rewards/")}
    assert names == {"rewards/words", "rewards/short", "rewards/llama-1_2", "rewards/llama-1_3"}
    row = made.state.log_history[0]
    assert row["rewards/llama-1_2"] == pytest.approx(row["rewards/llama-1_3"])
    assert row["objective/scores"] == pytest.approx(sum(row[name] for name in names), abs=1e-5)
    for sample in read_jsonl(tmp_path / "out" / "samples.jsonl"):
        assert sample["rewards"]["words"] == len(sample["response"].split())


def test_reward_functions_are_given_prompts_and_columns(tmp_path):
    seen = []

    def judge(prompts, completions, level):
        seen.extend(zip(prompts, level, strict=True))
        return [0.0] * len(prompts)

    tokenizer = tiny_tokenizer()
    data = [row | {"level": i} for i, row in enumerate(rows(tokenizer))]
    trainer(tmp_path, reward_model=judge, train_dataset=data).train()
    assert set(seen) == set(zip(TEXTS, range(6), strict=True))
    with pytest.raises(ConfigError, match="judge needs level"):
        trainer(tmp_path, reward_model=judge)


def test_without_a_stop_token_answers_run_on_and_the_penalty_is_for_those_without_an_end(tmp_path):
    args = arguments(tmp_path, stop_token=None, missing_eos_penalty=3.0, response_length=60)
    made = trainer(tmp_path, args=args, reward_model=short)
    made.train()
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert {sample["length"] for sample in samples} == {60}
    assert {sample["score"] for sample in samples} == {-1.0, -4.0}
    assert {sample["rewards"]["short"] for sample in samples} == {-1.0}


def test_another_stop_token_ends_answers(tmp_path):
    made = trainer(tmp_path, args=arguments(tmp_path, stop_token=None, stop_token_id=20, response_length=30))
    made.train()
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    ended = [sample for sample in samples if sample["finish_reason"] == "stop"]
    assert ended
    assert all("cat" not in sample["response"].split() for sample in ended)  # the end is not part of the text
    assert min(sample["length"] for sample in ended) < 30


def test_the_penalty_is_for_answers_that_the_stop_token_did_not_end(tmp_path):
    args = arguments(tmp_path, stop_token=None, stop_token_id=20, response_length=30, missing_eos_penalty=3.0)
    trainer(tmp_path, args=args, reward_model=short).train()
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    scores = {(sample["finish_reason"], sample["score"]) for sample in samples}
    assert scores == {("stop", -1.0), ("length", -4.0)}


def test_another_end_of_the_models_turns_is_told(tmp_path, caplog):
    model, tokenizer = policy(tmp_path), tiny_tokenizer(chat_template=False)
    model.generation_config.eos_token_id = [EOS, 20]
    trainer(tmp_path, model=model)  # its chat template ends turns by the end token
    assert "stop_token" not in caplog.text
    trainer(tmp_path, model=model, processing_class=tokenizer)
    assert "answers end only at <eos>, as in TRL, but the model also ends its own at cat (20); set stop_" in caplog.text


def test_a_stop_token_that_the_model_does_not_know(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens("<stop>")
    args = arguments(tmp_path, stop_token=None, stop_token_id=len(tokenizer) - 1)
    with pytest.raises(ConfigError, match="answers end at token 40, <stop>, but the model knows only 40 tokens"):
        trainer(tmp_path, args=args, processing_class=tokenizer)


@pytest.mark.parametrize("starts", [False, True])
def test_padding_by_the_end_token_on_the_left_is_taken_off(tmp_path, starts):
    tokenizer = tiny_tokenizer(pad="eos")
    tokenizer.bos_token = "<eos>" if starts else "<bos>"
    data = [{"input_ids": ids} for ids in ([EOS] * 3 + [7, 20], [EOS, 7, EOS, EOS, 20], [7, 20])]
    prompts = prompts_of(data, tokenizer, None, "rows").prompts
    first = (EOS, 7, 20) if starts else (7, 20)
    assert [prompt.token_ids for prompt in prompts] == [first, (EOS, 7, EOS, EOS, 20), (7, 20)]
    with pytest.raises(DataError, match="already ends" if starts else "no prompt"):
        prompts_of([{"input_ids": [EOS] * 3}], tokenizer, None, "rows")


def test_rows_that_are_not_tokenized_are_read_as_those_of_a_file():
    turn = {"role": "user", "content": "the cat"}
    rows = [
        {"prompt": None, "messages": [{"role": "human", "content": [{"type": "text", "text": "the cat"}]}], "id": 1},
        {"prompt": [turn], "messages": [], "id": 2},
        {"prompt": json.dumps([turn]), "messages": None, "id": 3},
    ]
    data = prompts_of(rows, tiny_tokenizer(), None, "rows")
    assert [prompt.source for prompt in data.prompts] == [[turn]] * 3 and data.columns == ["id"]
    with pytest.raises(DataError) as refused:
        prompts_of([{"prompt": 3}, rows[1], {"prompt": None}], tiny_tokenizer(), None, "rows")
    assert [line[:11] for line in str(refused.value).splitlines()] == ["rows, row 0", "rows, row 2"]


def test_padding_in_the_dataset_is_no_part_of_a_prompt(tmp_path):
    """Left, right, by mask or by the pad token: the same run."""
    tokenizer, histories = tiny_tokenizer(), []
    padded = tokenizer(list(TEXTS), padding="max_length", max_length=9)
    forms = [
        rows(tokenizer),
        [{"input_ids": [PAD] * 3 + row["input_ids"]} for row in rows(tokenizer)],
        Dataset.from_dict({name: padded[name] for name in ("input_ids", "attention_mask")}),
        [{"input_ids": torch.tensor(row["input_ids"])} for row in rows(tokenizer)],
    ]
    for data in forms:
        made = trainer(tmp_path, args=arguments(tmp_path, total_episodes=8), train_dataset=data)
        made.train()
        histories.append(timeless(made.state.log_history[0]))
    assert all(history == histories[0] for history in histories)


def test_a_collator_may_tokenize(tmp_path):
    tokenizer = tiny_tokenizer()

    def collated(features):
        return tokenizer([feature["question"] for feature in features], return_tensors="pt", padding=True)

    args = arguments(tmp_path, total_episodes=8)
    made = trainer(tmp_path, args=args, train_dataset=[{"question": text} for text in TEXTS], data_collator=collated)
    made.train()
    usual = trainer(tmp_path, args=args, data_collator=DataCollatorWithPadding(tokenizer))
    usual.train()
    assert timeless(made.state.log_history[0]) == timeless(usual.state.log_history[0])


def test_evaluation_and_early_stopping(tmp_path):
    args = arguments(
        tmp_path, total_episodes=80, eval_strategy="steps", eval_steps=1, metric_for_best_model="scores",
        learning_rate=1e-9, load_best_model_at_end=True, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    data = rows(tiny_tokenizer(), TEXTS[:3])
    made = trainer(tmp_path, args=args, eval_dataset=data, callbacks=[EarlyStoppingCallback(2)], reward_model=short)
    made.train()
    assert made.state.global_step == 2  # no evaluation is better than the one before the first update
    scores = [row["eval_scores"] for row in made.state.log_history if "eval_scores" in row]
    assert scores == [-1.0] * 3
    metrics = made.evaluate()
    assert metrics["eval_scores"] == -1.0
    assert made.state.log_history[-1]["eval_kl"] == metrics["eval_kl"]


def test_without_a_strategy_nothing_is_evaluated_and_samples_are_shown_by_number(tmp_path, monkeypatch):
    shown = []
    args = arguments(tmp_path, total_episodes=32, num_sample_generations=2, per_device_eval_batch_size=2)
    made = trainer(tmp_path, args=args, eval_dataset=rows(tiny_tokenizer(), TEXTS[:3]))
    monkeypatch.setattr(made, "generate_completions", lambda sampling: shown.append(made.state.global_step))
    made.train()
    assert shown == [1, 3]
    assert not any("eval_scores" in row for row in made.state.log_history)


def test_the_main_metrics_of_an_update_are_printed_and_all_are_written(tmp_path, capsys):
    made = trainer(tmp_path)
    made.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(printed) == 2 and all("objective/scores" in line and "time/" not in line for line in printed)
    assert "time/rollout_s" in made.state.log_history[0]
    made.log({"mine": 1.0})
    assert "mine" in capsys.readouterr().out


def test_generated_completions(tmp_path, capsys):
    made = trainer(
        tmp_path,
        args=arguments(tmp_path, missing_eos_penalty=5.0, per_device_eval_batch_size=2),
        eval_dataset=rows(tiny_tokenizer(), TEXTS[:3]),
        reward_model=words,
    )
    table = made.generate_completions()
    assert [row["query"] for row in table] == list(TEXTS[:3])
    for row in table:
        assert row["score"] == len([word for word in row["model response"].split() if not word.startswith("<")])
    assert table[0]["query"] in capsys.readouterr().out
    assert made.generate_completions(sampling=True) == table[:2]
    assert trainer(tmp_path).generate_completions() == []


def test_hostile_text_cannot_act_on_the_terminal(capsys):
    print_table([{"query": "[red]a[/red]", "model response": "\x1b[2J\u202e", "score": -0.5}])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown
    assert "[red]a[/red]" in shown


def test_callbacks_are_added_as_objects_or_classes_and_taken_out(tmp_path):
    made = trainer(tmp_path, callbacks=[Seen])
    extra = Seen()
    made.add_callback(extra)
    first = made.pop_callback(Seen)
    assert isinstance(first, Seen)
    assert first is not extra
    made.remove_callback(extra)
    assert made.pop_callback(Seen) is None
    made.train()
    assert extra.events == first.events == []


def test_only_callbacks_are_added(tmp_path):
    made = trainer(tmp_path)
    for wrong, name in ((None, "NoneType"), (print, "builtin_function_or_method"), (dict, "dict")):
        with pytest.raises(ConfigError, match=f"callbacks: got a list with {name}, wanted"):
            made.add_callback(wrong)


def test_a_tracker_that_is_unknown_or_does_not_start_is_told_by_its_argument(tmp_path, monkeypatch):
    class Unset:
        def __init__(self):
            raise RuntimeError("needs a variable.")

    for name, found, told in (("nonsense", None, "nonsense is not supported, only "), ("x", [Unset], "needs a variab")):
        if found:
            monkeypatch.setattr(events, "get_reporting_integration_callbacks", lambda names, found=found: found)
        with pytest.raises(ConfigError, match=rf"^PPOConfig\.report_to: got \['{name}'\]: {told}.*Or set it to none$"):
            trainer(tmp_path, args=arguments(tmp_path, report_to=[name]))


def test_report_to_starts_the_callbacks_of_transformers(tmp_path, monkeypatch):
    tracker, asked = Seen(), []
    monkeypatch.setattr(
        events, "get_reporting_integration_callbacks", lambda names: asked.append(names) or [tracker]
    )
    args = arguments(tmp_path, report_to=["tracker"])
    trainer(tmp_path, args=args).train()
    assert asked == [["tracker"]]
    assert len([logs["objective/scores"] for logs in tracker.logs]) == 2
    assert tracker.given["args"].report_to == ["tracker"]


def test_log_may_be_replaced(tmp_path):
    made, seen = trainer(tmp_path), []
    original = made.log

    def log(logs, *args):
        seen.append(logs["objective/scores"])
        original(logs | {"extra": 1.0}, *args)

    made.log = log
    made.train()
    assert [row["extra"] for row in made.state.log_history] == [1.0, 1.0]
    assert seen == [row["objective/scores"] for row in made.state.log_history]


def test_an_optimizer_and_its_schedule_from_the_user(tmp_path):
    model, value = policy(tmp_path), classifier(tmp_path)
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    before, of_value = tensors(model), tensors(value)
    made = trainer(tmp_path, model=model, value_model=value, optimizers=(optimizer, schedule))
    assert made.optimizer is optimizer
    assert made.lr_scheduler is schedule
    made.train()
    assert [row["lr"] for row in made.state.log_history] == [0.1, 0.05]  # once an update
    assert changed(before, model)
    assert "score.weight" in changed(of_value, value)
    with pytest.raises(ConfigError, match="none of the parameters that the policy trains"):
        trainer(tmp_path, optimizers=(optimizer, None))
    other = policy(tmp_path)
    with pytest.raises(ConfigError, match="optimizers: got none of value_model's parameters"):
        trainer(tmp_path, model=other, optimizers=(torch.optim.SGD(other.parameters(), lr=0.1), None))
    with pytest.raises(ConfigError, match="schedule without its optimizer"):
        trainer(tmp_path, optimizers=(None, schedule))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_an_optimizer_may_also_hold_what_does_not_train(tmp_path, is_adapted):
    """Scripts give it all parameters of a model, those that they froze and those under an adapter too."""

    def run(**given):
        model, value = policy(tmp_path), classifier(tmp_path)
        model.model.layers[0].requires_grad_(False)
        model = get_peft_model(model, lora()) if is_adapted else model
        optimizer = torch.optim.AdamW([*model.parameters(), *value.parameters()], lr=1e-3)
        before = tensors(model)
        args = arguments(tmp_path, save_steps=1)
        trainer(tmp_path, args=args, model=model, value_model=value, optimizers=(optimizer, None)).train(**given)
        return before, model

    before, model = run()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert changed(before, model)
    assert changed(before, model).isdisjoint(frozen)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    assert not changed(tensors(model), run(resume_from_checkpoint=True)[1])


def test_optimizers_that_could_not_step_are_refused(tmp_path):
    model, value = policy(tmp_path), classifier(tmp_path)
    both = [*model.parameters(), *value.parameters()]
    optimizer, other, of = torch.optim.SGD(both, lr=0.1), torch.optim.SGD(both, lr=0.1), torch.optim.lr_scheduler
    for given, message in (
        ((torch.optim.LBFGS(both), None), "optimizers: got LBFGS, which computes the loss several times a step"),
        ((optimizer, of.LambdaLR(other, lambda step: 1.0)), "got a LambdaLR of another optimizer, so the learning"),
        ((optimizer, of.ReduceLROnPlateau(optimizer)), "got a ReduceLROnPlateau, .*lr_scheduler_type to reduce_lr"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path, model=model, value_model=value, optimizers=given)


@pytest.mark.parametrize("has_schedule", [False, True])
def test_vf_coef_weighs_the_value_loss_in_the_users_optimizer(tmp_path, has_schedule):
    moved = {}
    for coef in (0.1, 0.4):
        model, value = policy(tmp_path), classifier(tmp_path)
        optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = tensors(value)["score.weight"].clone()
        one_step = {"num_ppo_epochs": 1, "num_mini_batches": 1, "total_episodes": 8}
        args = arguments(tmp_path / str(coef), vf_coef=coef, max_grad_norm=0.0, **one_step)
        given = (optimizer, schedule if has_schedule else None)
        trainer(tmp_path, args=args, model=model, value_model=value, optimizers=given).train()
        moved[coef] = tensors(value)["score.weight"] - before
    assert float(moved[0.1].abs().max()) > 1e-4
    torch.testing.assert_close(moved[0.4], 4 * moved[0.1], rtol=1e-3, atol=1e-6)


def test_vf_coef_does_nothing_where_policy_and_critic_have_optimizers_of_their_own(tmp_path):
    trained = []
    for coef in (0.1, 0.4):
        value = classifier(tmp_path)
        trainer(tmp_path, args=arguments(tmp_path / str(coef), vf_coef=coef), value_model=value).train()
        trained.append(tensors(value))
    assert all(torch.equal(trained[0][name], x) for name, x in trained[1].items())


@pytest.mark.parametrize("has_schedule", [False, True])
def test_losses_of_the_users_optimizer_are_scaled_in_float16(tmp_path, has_schedule):
    model, value = policy(tmp_path), classifier(tmp_path)
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if has_schedule else None
    args = arguments(tmp_path, fp16=True)
    made = trainer(tmp_path, args=args, model=model, value_model=value, optimizers=(optimizer, schedule))
    made.train()
    assert made.state.log_history[0]["policy/loss_scale"] > 1


def test_a_run_goes_on_from_a_checkpoint_bitwise(tmp_path):
    args = arguments(tmp_path, save_steps=1)
    whole = trainer(tmp_path, args=args)
    whole.train()
    half = trainer(tmp_path, args=args)
    kept = {path.name for path in (tmp_path / "out" / "checkpoint-1").iterdir()}
    assert kept >= {"model.safetensors", "tether_state"}
    assert kept.isdisjoint({"trainer_state.json", "training_args.bin"})
    half.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert [timeless(row) for row in half.state.log_history] == [timeless(row) for row in whole.state.log_history]
    assert not changed(tensors(whole.policy_model), half.policy_model)
    with pytest.raises(ConfigError, match="has already trained"):
        half.train()


def test_a_longer_run_goes_on_with_as_many_updates_of_warm_up(tmp_path):
    half = trainer(tmp_path, args=arguments(tmp_path, warmup_steps=2, total_episodes=32, save_steps=2))
    half.train()
    more = trainer(tmp_path, args=arguments(tmp_path, warmup_steps=2, total_episodes=40, save_steps=2))
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 5
    assert load_config(tmp_path / "out" / "config.yaml").train.warmup_steps == 2
    other = trainer(tmp_path, args=arguments(tmp_path, warmup_steps=3, total_episodes=40, save_steps=2))
    with pytest.raises(CheckpointError, match=r"train\.warmup_steps: was 2, now 3"):
        other.train(resume_from_checkpoint=True)


def test_a_run_that_reads_other_rows_is_refused_before_its_folder_changes(tmp_path):
    trainer(tmp_path, args=arguments(tmp_path, save_steps=1)).train()
    first, metrics = tmp_path / "out" / "checkpoint-1", (tmp_path / "out" / "metrics.jsonl").read_text()
    other = trainer(tmp_path, args=arguments(tmp_path, save_steps=1), train_dataset=rows(tiny_tokenizer(), TEXTS[1:]))
    with pytest.raises(CheckpointError, match=r"data\.prompts changed since"):
        other.train(resume_from_checkpoint=str(first))
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == metrics


def test_a_second_run_replaces_the_first(tmp_path):
    for episodes in (16, 8):
        trainer(tmp_path, args=arguments(tmp_path, total_episodes=episodes)).train()
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1]
    assert not (tmp_path / "out" / "checkpoint-2").exists()


@pytest.mark.parametrize(
    ("role", "place"), [("model", "."), ("ref_model", "checkpoint-2"), ("value_model", "checkpoint-2")]
)
def test_a_run_does_not_remove_the_models_that_it_was_given(tmp_path, role, place):
    first = trainer(tmp_path)
    first.train()
    first.save_model()
    source = tmp_path / "out" / place
    kept = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    of = {"model": policy, "ref_model": policy}.get(role, classifier)(tmp_path)
    of.name_or_path = str(source)
    with pytest.raises(ConfigError, match=f"would overwrite .*, which {role}.* names; choose another"):
        trainer(tmp_path, **{role: of}).train()
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == kept


def test_a_reward_model_given_by_a_path_is_not_removed(tmp_path):
    loaded(tmp_path, "llama", 1)
    (tmp_path / "out").mkdir()
    judge = (tmp_path / "llama-1").rename(tmp_path / "out" / "checkpoint-7")
    with pytest.raises(ConfigError, match="checkpoint-7, which reward_model checkpoint-7 names"):
        trainer(tmp_path, reward_model=str(judge), value_model=classifier(tmp_path)).train()
    judge.rename(tmp_path / "llama-1")


@pytest.mark.parametrize("name", ["config.yaml", "samples.jsonl"])
def test_files_that_no_run_wrote_are_not_written_over(tmp_path, name):
    made = trainer(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"output_dir: .* holds a .*, which the run would .* or remove it"):
        made.train()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "mine: 1\n"


def test_files_are_no_folders_to_write_to(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"^PPOConfig\.output_dir: .*out is a file; name a folder$"):
        trainer(tmp_path)
    (tmp_path / "out").rename(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^output_dir: .*file is a file; name a folder$"):
        trainer(tmp_path).save_model(tmp_path / "file")


def test_a_stopped_run_does_not_go_on_to_save(tmp_path):
    made = trainer(tmp_path)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            made._phases.stop.reason = "SIGINT"

    made.add_callback(Stop)
    with pytest.raises(KeyboardInterrupt, match="SIGINT: stopped after 1 update, and the state is saved"):
        made.train()
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


def bert():
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForMaskedLM.from_config(BertConfig(vocab_size=VOCAB_SIZE, **shape))


class Table:
    """Indexed by its columns, as tables of pandas are."""

    def __len__(self):
        return 2

    def __getitem__(self, column):
        return {"input_ids": [[7], [8]]}[column]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {"model": "gpt2"}, "model: got str, wanted a causal language model"),
        (lambda f: {"model": classifier(f)}, "model: got LlamaForSequenceClassification, wanted a causal"),
        (lambda f: {"model": bert()}, "model: got BertForMaskedLM, wanted a causal language model"),
        (lambda f: {"ref_model": classifier(f)}, "ref_model: got LlamaForSequenceClassification, wanted a causal"),
        (lambda f: {"ref_model": policy(f).to(torch.bfloat16)}, "ref_model: its weights are torch.bfloat16"),
        (lambda f: {"value_model": policy(f)}, "value_model: got LlamaForCausalLM without .* wanted a sequence class"),
        (lambda f: {"value_model": None}, "value_model: got NoneType, wanted a sequence classifier"),
        (lambda f: {"value_model": classifier(f, num_labels=2)}, "value_model: got a classifier with 2 labels"),
        (lambda f: {"value_model": classifier(f).requires_grad_(False)}, "value_model: none of its parameters"),
        (lambda f: {"reward_model": policy(f)}, "reward_model: got LlamaForCausalLM without .* or a list"),
        (lambda f: {"reward_model": None}, "reward_model: got NoneType, wanted a sequence classifier .* a list"),
        (lambda f: {"reward_model": []}, "reward_model: got an empty list"),
        (lambda f: {"reward_model": get_peft_model(classifier(f), virtual())}, "reward_model: got Peft.* with virtual"),
        (lambda f: {"value_model": get_peft_model(classifier(f), virtual())}, "value_model: got Peft.* with virt"),
        (lambda f: {"reward_model": get_peft_model(classifier(f), of_head())},
         r"reward_model: got Llama.*\. Merge its adapter first, reward_model\.merge_and_unload\(\), or give the "),
        (lambda f: {"value_model": get_peft_model(classifier(f), of_head())},
         r"value_model: got Llama.*value_model\.merge_and_unload\(\), and all its weights train; .*kind: adapter"),
        (lambda f: {"reward_model": torch.nn.Linear(1, 1)}, "reward_model: got Linear, wanted"),
        (lambda f: {"reward_model": lambda texts: texts}, "does not take prompts and completions"),
        (lambda f: {"reward_model": [words, 3]}, "reward_model: got int, wanted"),
        (lambda f: {"peft_config": {"r": 4}}, "peft_config: got dict, wanted a peft.LoraConfig"),
        (lambda f: {"model": get_peft_model(policy(f), lora()), "peft_config": lora()}, "is a PEFT model already"),
        (lambda f: {"peft_config": LoraConfig(task_type="SEQ_CLS")}, "an adapter for SEQ_CLS, wanted one for CAUSAL"),
        (lambda f: {"model": policy(f).requires_grad_(False)}, "model: none of its parameters requires a gradient"),
        (lambda f: {"train_dataset": None}, "train_dataset: got NoneType, wanted one datasets.Dataset"),
        (lambda f: {"eval_dataset": {"a": [], "b": []}}, r"eval_dataset: got several datasets \(a, b\)"),
        (lambda f: {"eval_dataset": {"input_ids": [7]}}, r"eval_dataset: got a single row \(input_ids\), wanted"),
        (lambda f: {"train_dataset": ["text"]}, "train_dataset: its rows are of type str, wanted mappings"),
        (lambda f: {"train_dataset": Table()}, "train_dataset: got Table, which has no row 0, wanted one datasets"),
        (lambda f: {"data_collator": lambda rows: rows}, "data_collator: got list without input_ids"),
        (lambda f: {"data_collator": lambda rows: {"input_ids": []}}, "got 0 rows of input_ids for train_dataset, row"),
        (lambda f: {"data_collator": lambda rows: rows[0]["text"]}, "data_collator raised KeyError for train_dataset"),
        (lambda f: {"callbacks": TrainerCallback()}, "callbacks: got TrainerCallback, wanted a list of transformers"),
        (lambda f: {"callbacks": ["print"]}, "callbacks: got a list with str, wanted a list of transformers"),
        (lambda f: {"callbacks": [dict]}, "callbacks: got a list with dict, wanted a list of transformers"),
        (lambda f: {"optimizers": None}, "optimizers: got NoneType, wanted"),
        (lambda f: {"optimizers": (1, 2)}, "optimizers: got int and int, wanted a torch optimizer"),
    ],
)
def test_wrong_kinds_of_argument_name_what_is_accepted(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **change(tmp_path))


def test_a_critic_that_reads_what_is_behind_a_token_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB_SIZE}
    config = Gemma3TextConfig(use_bidirectional_attention=True, num_labels=1, **sizes)
    with pytest.raises(ModelError, match="also reads what comes after a token; wanted a causal language model"):
        trainer(tmp_path, value_model=AutoModelForSequenceClassification.from_config(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({}, None, None), r"args: got dict, wanted a tether\.compat\.trl\.PPOConfig"),
        ((None, "gpt2", None), "processing_class: got str, wanted the policy's tokenizer"),
        ((None, tiny_tokenizer(), "pad"), "data_collator: got str, wanted a function of a list of rows"),
    ],
)
def test_wrong_kinds_of_the_other_arguments(tmp_path, given, message):
    args, tokenizer, collator = given
    with pytest.raises(ConfigError, match=message):
        check_kinds(arguments(tmp_path) if args is None else args, tokenizer, collator)


def test_a_tokenizer_that_was_made_without_files_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"processing_class: no tokenizer with a vocabulary is there"):
        check_kinds(arguments(tmp_path), Qwen2Tokenizer(), None)


def quantized(model):
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {"model": quantized(policy(f))}, "model: has quantized weights, .* give a peft_config"),
        (lambda f: {"value_model": quantized(classifier(f))}, r"value_model: .* quantized .*get_peft_model\(value_m"),
        (lambda f: {"model": policy(f).half()}, "^model: the weights that train are torch.float16, .*=torch.float32"),
        (lambda f: {"value_model": classifier(f).half()}, "value_model: the weights that train are torch.float16"),
    ],
)
def test_weights_that_cannot_learn_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **change(tmp_path))


def half_way(model):
    """A model whose first layer is in bfloat16."""
    model.base_model.layers[0].to(torch.bfloat16)
    return model


@pytest.mark.parametrize("role", ["model", "ref_model", "value_model", "reward_model"])
def test_layers_of_several_types_that_cannot_compute_are_told(tmp_path, role):
    make = policy if role in ("model", "ref_model") else classifier
    told = rf"^{role}.*: has weights of the types torch\.bfloat16, torch\.float32, which its layers .*; wanted one type"
    with pytest.raises(ConfigError, match=told):
        trainer(tmp_path, **{role: half_way(make(tmp_path))})


def test_layers_of_several_types_may_compute_under_autocast(tmp_path):
    args = arguments(tmp_path, total_episodes=8, bf16=True)
    model = half_way(policy(tmp_path))
    before = [layer.mlp.up_proj.weight.clone() for layer in model.base_model.layers]
    trainer(tmp_path, args=args, model=model, value_model=half_way(classifier(tmp_path))).train()
    after = [layer.mlp.up_proj.weight for layer in model.base_model.layers]
    assert [weight.dtype for weight in after] == [torch.bfloat16, *[torch.float32] * (len(after) - 1)]
    assert not torch.equal(before[-1], after[-1])


def test_weights_in_bfloat16_are_told_where_they_train(tmp_path, caplog):
    trainer(tmp_path, model=policy(tmp_path).bfloat16(), peft_config=lora())
    assert "bfloat16" not in caplog.text
    trainer(tmp_path, value_model=classifier(tmp_path).bfloat16())
    assert "value_model: the weights that train are torch.bfloat16" in caplog.text


def test_the_adapter_that_trains_is_not_its_own_reference(tmp_path):
    model = get_peft_model(policy(tmp_path), lora())
    with pytest.raises(ConfigError, match="ref_adapter_name: got default, the adapter that trains"):
        trainer(tmp_path, model=model, args=arguments(tmp_path, ref_adapter_name="default"))


def test_a_judge_that_does_not_load_leaves_the_policy_as_it_was(tmp_path):
    judge, model = save_tiny(tmp_path / "judge", num_labels=1), policy(tmp_path)
    weights = load_file(judge / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})
    before = tensors(model)
    with pytest.raises(ModelError, match=r"judge: weights are missing .*: model\.norm\.weight"):
        trainer(tmp_path, model=model, reward_model=str(judge), peft_config=lora())
    assert before.keys() == model.state_dict().keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_two_roles_cannot_be_one_object(tmp_path):
    model, judge = policy(tmp_path), classifier(tmp_path)
    with pytest.raises(ConfigError, match="ref_model: got the same object as model"):
        trainer(tmp_path, model=model, ref_model=model)
    with pytest.raises(ConfigError, match="value_model: got the same object as reward_model"):
        trainer(tmp_path, reward_model=[words, judge], value_model=judge)


def on_trunk(folder, trunk):
    """A classifier on the trunk of another model."""
    made = classifier(folder)
    made.model = trunk.model
    return made


def test_no_model_holds_weights_that_another_one_trains(tmp_path):
    model, value = policy(tmp_path), classifier(tmp_path)
    assigned = policy(tmp_path)
    assigned.load_state_dict(model.state_dict(), assign=True)
    for given, message in (
        ({"ref_model": copy.copy(model)}, r"ref_model: shares weights with model, model\.embed_tokens\.weight"),
        ({"ref_model": assigned}, "ref_model: shares weights with model"),
        ({"value_model": on_trunk(tmp_path, model)}, "value_model: shares weights with model"),
        ({"reward_model": [words, on_trunk(tmp_path, model)]}, "reward_model: shares weights with model"),
        ({"reward_model": on_trunk(tmp_path, value)}, "reward_model: shares weights with value_model"),
        ({"model": get_peft_model(model, lora()), "reward_model": on_trunk(tmp_path, model)}, "weights with model"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path, **{"model": model, "value_model": value} | given)
    judge = classifier(tmp_path)
    trainer(tmp_path, reward_model=[judge, on_trunk(tmp_path, judge)])  # neither trains


def test_models_without_weights_are_refused(tmp_path):
    for name, model in {"model": policy(tmp_path).to("meta"), "value_model": classifier(tmp_path).to("meta")}.items():
        with pytest.raises(ConfigError, match=f"{name}: got weights on the meta device"):
            trainer(tmp_path, **{name: model})


def test_models_that_cannot_read_the_tokens_are_refused(tmp_path):
    small = copy.deepcopy(loaded(tmp_path, "llama", 1))
    small.resize_token_embeddings(30)
    with pytest.raises(ModelError, match="reward_model llama-1: knows 30 tokens, but the tokenizer writes token 39"):
        trainer(tmp_path, reward_model=small)


def with_tokenizer(model, folder, tokenizer):
    """The model as if loaded from a folder with that tokenizer."""
    tokenizer.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def permuted():
    """A tokenizer of the same words under other ids."""
    ids = {word: i for i, word in enumerate((*SPECIAL, *reversed(WORDS)))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(ids, unk_token="<unk>")), unk_token="<unk>", eos_token="<eos>"
    )


@pytest.mark.parametrize("role", ["reward_model", "value_model", "ref_model"])
def test_models_to_which_the_ids_are_other_words_are_refused(tmp_path, role):
    model = policy(tmp_path) if role == "ref_model" else classifier(tmp_path)
    given = {role: with_tokenizer(model, tmp_path / "other", permuted())}
    way_out = "give its path, which then reads text" if role == "reward_model" else "load another"
    told = f"{role}.*: the tokenizer in .*other has 'three' as token 7, processing_class 'the'.*{way_out}"
    with pytest.raises(ModelError, match=told):
        trainer(tmp_path, **given)


def test_tokenizers_that_differ_in_what_scripts_add_are_one(tmp_path):
    other = tiny_tokenizer(chat_template=False)
    other.add_special_tokens({"pad_token": "[PAD]"})
    own = tiny_tokenizer()
    own.add_special_tokens({"pad_token": "<padding>"})
    given = {
        "reward_model": with_tokenizer(classifier(tmp_path), tmp_path / "other", other),
        "value_model": with_tokenizer(classifier(tmp_path), tmp_path / "own", own),
    }
    made = trainer(tmp_path, processing_class=own, **given)
    assert made.value_model is given["value_model"] and made.reward_model is given["reward_model"]


def test_a_token_that_neither_the_policy_nor_a_prompt_writes_needs_no_embedding(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens("<image>")
    trainer(tmp_path, processing_class=tokenizer)
    data = [{"input_ids": [7, 20]}, {"input_ids": [7, len(tokenizer) - 1]}]
    with pytest.raises(ModelError, match="model: knows 40 tokens, but row 1 of the prompts holds token 40, '<image>'"):
        trainer(tmp_path, processing_class=tokenizer, train_dataset=data)


def test_a_judge_of_text_without_a_template_for_conversations_is_refused_at_once(tmp_path):
    loaded(tmp_path, "llama", 1)
    judge = shutil.copytree(tmp_path / "llama-1", tmp_path / "judge")
    for path in [*judge.glob("tokenizer*"), *judge.glob("*.jinja")]:
        path.unlink()
    permuted().save_pretrained(judge)
    trainer(tmp_path, reward_model=str(judge))
    data = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    with pytest.raises(ConfigError, match=r"reward_model: .*judge reads text, .* conversations: .* \(rewards"):
        trainer(tmp_path, reward_model=str(judge), train_dataset=data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [7, 20, EOS]}, "train_dataset, row 1: the prompt already ends its answer"),
        ({"input_ids": [PAD, PAD]}, "train_dataset, row 1 has no prompt"),
        ({"input_ids": "the cat"}, "train_dataset, row 1: input_ids is str, wanted a list of token ids"),
        ({"input_ids": [7, 999]}, "row 1: input_ids holds 999, but the tokenizer's tokens are 0 to 39"),
        ({"input_ids": [7, -100]}, "row 1: input_ids holds -100, but the tokenizer's tokens are 0 to 39"),
        ({"input_ids": [7, 8], "attention_mask": [1]}, "row 1: attention_mask has 1 entries, input_ids 2; wanted"),
        ({"input_ids": [7, 0.5]}, "row 1: input_ids holds 0.5, wanted a list of token ids"),
        ({"input_ids": [[7, 8]]}, r"row 1: input_ids holds \[7, 8\], wanted a list of token ids"),
        ({"input_ids": [7, None]}, "row 1: input_ids holds null, wanted a list of token ids"),
        ({"input_ids": None}, "row 1: input_ids is NoneType, wanted a list of token ids"),
        ({"input_ids": [7, 8], "attention_mask": [1, 2]}, "row 1: attention_mask holds 2, wanted 0 for padding and 1"),
        ({"input_ids": [7, 8], "attention_mask": "11"}, "row 1: attention_mask is str, wanted 0 for padding and 1"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        trainer(tmp_path, train_dataset=[{"input_ids": [7, 20]}, row])


def test_rows_without_a_prompt_name_their_columns(tmp_path):
    with pytest.raises(DataError, match=r"wanted a column input_ids .* its columns are question"):
        trainer(tmp_path, train_dataset=[{"question": "why"}])


def test_nothing_has_changed_after_a_refusal(tmp_path):
    model, value = policy(tmp_path), classifier(tmp_path)
    head = value.score
    with pytest.raises(ConfigError):
        trainer(tmp_path, model=model, value_model=value, peft_config=lora(), args=arguments(tmp_path, cliprange=2.0))
    assert value.score is head
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not (tmp_path / "out").exists()


def test_kl_coef_0_has_no_reference(tmp_path):
    made = trainer(tmp_path, args=arguments(tmp_path, kl_coef=0.0))
    made.train()
    assert made.ref_model is None
    assert "objective/kl" not in made.state.log_history[0]
    assert math.isfinite(made.state.log_history[1]["objective/scores"])


def test_messages_and_gpt2(tmp_path):
    """Another family, tied, with chat messages in place of token ids."""
    data = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    made = trainer(
        tmp_path, model=policy(tmp_path, "gpt2"), value_model=classifier(tmp_path, "gpt2"), reward_model=short,
        train_dataset=data,
    )  # fmt: skip
    made.train()
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert samples[0]["query"].startswith("<user>")
    made.save_model()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_a_router_among_the_targets_of_an_adapter_is_refused(tmp_path):
    """It has the type of a linear layer, and would fail in PEFT at the first token."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(PhimoeConfig(**sizes, **heads, eos_token_id=EOS))
    with pytest.raises(ConfigError, match=r"^peft_config\.target_modules: all-linear includes .*a PhimoeTopKRouter"):
        trainer(tmp_path, model=model, peft_config=LoraConfig(target_modules="all-linear"))
