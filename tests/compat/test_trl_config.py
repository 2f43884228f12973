"""TRL's arguments: their names, their defaults, and what becomes of each."""

import dataclasses
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

import tether.compat.trl
from tests.compat.trl_runs import arguments, trainer
from tether.compat.trl import PPOConfig, PPOTrainer
from tether.compat.trl.config import DERIVED, INERT, REFUSED, TRACKERS, check_arguments, derive, run_config
from tether.compat.trl.former import NAMES, OF_CONFIG, OF_TRAINER
from tether.errors import ConfigError
from tether.machine.precision import check_precision
from tether.models.compiled import _COMPILED
from tether.models.layers import transformer_layers

DEFAULTS = {
    "num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2,
    "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "ds3_gather_for_generation": True,
    "response_length": 53, "stop_token": None, "stop_token_id": None, "temperature": 0.7, "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m", "reward_model_path": "EleutherAI/pythia-160m",
    "model_adapter_name": None, "ref_adapter_name": None, "num_sample_generations": 10,
    "local_rollout_forward_batch_size": 64, "num_mini_batches": 1, "total_episodes": None, "dataset_num_proc": None,
    "learning_rate": 3e-6, "logging_steps": 10, "gradient_checkpointing": True, "push_to_hub": False,
    "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "seed": 42, "world_size": None, "batch_size": None,
}  # fmt: skip
WRONG = ("stop", "k2")
"""Values that the type of their argument does not allow, which the tests' check of types refuses first."""
REWARDS = [{"type": "model", "path": "judge", "name": "judge"}]


def config_of(args, num_prompts=100, **changes):
    derive(args, num_prompts)
    given = {"lora": None, "rewards": REWARDS, "evaluates": True, "stop_token": "eos"} | changes
    return run_config(args, model_path="policy", num_prompts=num_prompts, **given)


def test_defaults_are_those_of_trl(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path))
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS


def test_the_parser_of_transformers_takes_them(tmp_path):
    command = ["--output_dir", str(tmp_path), "--kl_estimator", "k3", "--stop_token", "eos", "--lam", "1.0"]
    args = HfArgumentParser(PPOConfig).parse_args([*command, "--missing_eos_penalty", "1", "--bf16", "False"])
    assert (args.kl_estimator, args.stop_token, args.lam, args.missing_eos_penalty) == ("k3", "eos", 1.0, 1.0)
    assert args.bf16 is False
    with pytest.raises(SystemExit):
        HfArgumentParser(PPOConfig).parse_args([*command, "--kl_estimator", "k2"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_before_the_script_loads_a_model(tmp_path, monkeypatch, name):
    monkeypatch.setitem(TRACKERS, name, (lambda: False, "the-package"))
    told = rf"^PPOConfig\.report_to: {name} is not installed: pip install the-package, or set report_to to none$"
    with pytest.raises(ConfigError, match=told):
        PPOConfig(output_dir=str(tmp_path), report_to=name)
    args = PPOConfig(output_dir=str(tmp_path), report_to="none")
    args.report_to = [name]
    with pytest.raises(ConfigError, match=told):
        check_arguments(args)


def test_every_tracker_of_transformers_that_needs_a_package_is_checked(monkeypatch):
    with pytest.raises(ValueError, match=" is not supported, only ") as error:
        get_reporting_integration_callbacks(["?"])
    known = set(re.search("only (.*) are supported", str(error.value)).group(1).split(", "))
    assert {"tensorboard", "wandb"} < known - {"kubeflow"} <= TRACKERS.keys()  # that one needs a variable
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    for name in TRACKERS.keys() - {"comet_ml", "neptune"}:  # looked for once, when transformers is imported
        assert not TRACKERS[name][0]()


def test_a_learning_rate_of_0_leaves_the_policy_as_it_is(tmp_path):
    """By which scripts check that every ratio is 1."""
    ppo = trainer(tmp_path, args=arguments(tmp_path, learning_rate=0.0))
    before = {name: weight.clone() for name, weight in ppo.model.policy.state_dict().items()}
    ppo.train()
    rows = [row for row in ppo.state.log_history if "val/ratio" in row]
    assert len(rows) == 2 and all((row["val/ratio"], row["val/ratio_var"]) == (1, 0) for row in rows)
    after = ppo.model.policy.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_every_argument_is_read_refused_or_said_to_be_inert():
    folder = Path(tether.compat.trl.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    source = source.replace(source[source.index("INERT = frozenset") : source.index("DERIVED = ")], "")
    named = {name for pattern in (r"args\.(\w+)", r"self\.(\w+)", r'"(\w+)"') for name in re.findall(pattern, source)}
    read = {"log_level", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}  # by callbacks
    by_scripts = {"sft_model_path", "reward_model_path"}
    names = {field.name for field in dataclasses.fields(PPOConfig) if not field.name.startswith("_")}
    assert names - named - INERT - by_scripts - read == set()
    assert not INERT & (set(REFUSED) | DERIVED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused_by_name(tmp_path, name):
    args = arguments(tmp_path)
    check_arguments(args)
    kinds = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    kinds |= {"use_liger_kernel": True, "auto_find_batch_size": True}
    setattr(args, name, kinds.get(name, "x"))
    with pytest.raises(ConfigError, match=f"PPOConfig.{name} {kinds.get(name, 'x')!r}"):
        check_arguments(args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adafactor"}, "optim adafactor: wanted one of adamw_torch, "),
        ({"stop_token_id": 5}, "got stop_token eos and stop_token_id 5"),
        ({"stop_token": "stop"}, "stop_token: got 'stop', wanted eos or None"),
        ({"kl_estimator": "k2"}, "kl_estimator: got 'k2', wanted k1 or k3"),
        ({"missing_eos_penalty": -1.0}, r"PPOConfig.missing_eos_penalty: got -1.0, wanted .* subtracted"),
        ({"missing_eos_penalty": -1.0, "stop_token": None}, r"PPOConfig.missing_eos_penalty: got -1.0, wanted"),
        ({"vf_coef": -0.1}, r"PPOConfig.vf_coef: got -0.1, wanted 0 or more"),
        ({"max_steps": 3}, "got max_steps 3 and total_episodes 16"),
        ({"hub_strategy": "checkpoint"}, "hub_strategy: got checkpoint, wanted end or every_save"),
        ({"save_strategy": "best"}, "save_strategy best needs metric_for_best_model"),
        ({"num_mini_batches": 3}, "num_mini_batches 3 must divide .*, which is 8"),
        ({"num_mini_batches": 0}, "num_mini_batches: got 0, wanted at least 1"),
        ({"cliprange": 2.0}, "cliprange: ppo.cliprange: got 2, wanted"),
        ({"temperature": 0.0}, "temperature: sampling.temperature: got 0, wanted"),
        ({"local_rollout_forward_batch_size": 0}, "local_rollout_forward_batch_size: .*got 0, wanted"),
        ({"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}, "got eval_loss, wanted one of"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "wanted min_lr or min_lr_rate"),
        ({"stop_token": None, "stop_token_id": 99}, "the tokenizer has no token 99"),
        ({"stop_token": None, "stop_token_id": -1}, "the tokenizer has no token -1"),
        ({"total_episodes": None, "num_train_epochs": 0.1}, "num_train_epochs: got 0.1, which is less .* 6 prompts"),
        ({"total_episodes": None, "num_train_epochs": 0}, "num_train_epochs: got 0, .* or set total_episodes"),
        ({"response_length": 126}, "needs 131 positions, but model has 128"),
    ],
)
def test_mistakes_are_found_at_construction(tmp_path, changes, message):
    args = arguments(tmp_path, **{name: value for name, value in changes.items() if value not in WRONG})
    for name in changes.keys() & {"stop_token", "kl_estimator"}:
        setattr(args, name, changes[name])
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, args=args, eval_dataset=[{"input_ids": [7, 20]}])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("total_episodes", "16", "a whole number"),
        ("total_episodes", 1e5, "a whole number"),
        ("num_mini_batches", 2.0, "a whole number"),
        ("stop_token_id", [2, 3], "a whole number"),
        ("response_length", True, "a whole number"),
        ("missing_eos_penalty", "1", "a number"),
        ("learning_rate", "1e-5", "a number"),
        ("whiten_rewards", "no", "True or False"),
        ("gradient_checkpointing", 2, "True or False"),
        ("gradient_checkpointing", 1.0, "True or False"),
        ("response_length", np.True_, "a whole number"),
        ("num_mini_batches", np.float64(2), "a whole number"),
    ],
)
def test_arguments_of_another_type_are_told(tmp_path, name, value, wanted):
    """At construction, and where a script sets them later. In tests, jaxtyping checks arguments before we do."""
    message = rf"PPOConfig\.{name}: got {re.escape(repr(value))}, wanted {wanted}$"
    args = arguments(tmp_path)
    setattr(args, name, value)
    for use in (args.__post_init__, lambda: trainer(tmp_path, args=args)):
        with pytest.raises(ConfigError, match=message):
            use()


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("num_mini_batches", np.int64(1), 1),
        ("learning_rate", np.float64(1e-5), 1e-5),
        ("kl_coef", np.float32(0.5), 0.5),
        ("save_steps", np.int32(5), 5),
        ("gradient_checkpointing", 1, True),
        ("whiten_rewards", np.False_, False),
        ("whiten_rewards", np.int64(0), False),
    ],
)
def test_numbers_of_other_packages_become_plain_ones(tmp_path, name, value, plain):
    """At construction, and where a script sets them later; JSON takes no number of NumPy."""
    args = arguments(tmp_path)
    for use in (args.__post_init__, lambda: trainer(tmp_path, args=args)):
        setattr(args, name, value)
        use()
        assert getattr(args, name) == plain
        assert type(getattr(args, name)) is type(plain)
        assert json.loads(args.to_json_string())[name] == plain


def test_evaluations_without_their_data_are_told_in_the_words_of_the_script(tmp_path, caplog):
    trainer(tmp_path, args=arguments(tmp_path, eval_strategy="steps", eval_steps=1))
    told = "PPOConfig.eval_strategy: got steps, but nothing is evaluated without an eval_dataset"
    assert [r.message for r in caplog.records if "eval_strategy" in r.message] == [told]
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_scores")
    with pytest.raises(ConfigError, match=r"^PPOConfig.metric_for_best_model: got eval_scores, .* no eval_dataset\."):
        trainer(tmp_path, args=args)
    args = arguments(tmp_path, metric_for_best_model="eval_scores")
    with pytest.raises(ConfigError, match="eval_strategy is no and there is an eval_dataset"):
        trainer(tmp_path, args=args, eval_dataset=[{"input_ids": [7, 20]}])


def test_torch_compile_compiles_the_layers(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("tether.compat.trl.config.check_compile", lambda *given: asked.append(given[0]))
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: lambda *x, **more: forward(*x, **more))
    for given in ({"torch_compile": True}, {"torch_compile_backend": "inductor"}, {}):
        made = trainer(tmp_path, args=arguments(tmp_path, **given))
        assert made._config.train.compile is made.args.torch_compile is bool(given)
        for model in (made.policy_model, made.ref_model, made.value_model):
            assert [layer in _COMPILED for layer in transformer_layers(model)] == [bool(given)] * 2
    assert asked == ["PPOConfig.torch_compile"] * 2
    assert not any(name.startswith("ACCELERATE_DYNAMO") for name in os.environ)


def test_inert_arguments_that_are_set_are_named_once(tmp_path, caplog):
    trainer(tmp_path, args=arguments(tmp_path, logging_steps=1, dataloader_num_workers=2))
    assert [r.message for r in caplog.records if "no effect" in r.message] == [
        "PPOConfig: these arguments have no effect here, whatever they are set to: dataloader_num_workers, "
        "logging_steps. docs/from_trl.md says why"
    ]


def test_batch_sizes_and_updates_by_hand(tmp_path):
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "num_mini_batches": 2}
    args = arguments(tmp_path, **changes, total_episodes=100)
    derive(args, 10)
    assert (args.batch_size, args.local_batch_size, args.micro_batch_size, args.world_size) == (24, 24, 4, 1)
    assert (args.mini_batch_size, args.local_mini_batch_size, args.num_total_batches) == (12, 12, 5)
    args = arguments(tmp_path, **changes, total_episodes=None, num_train_epochs=2.5)
    derive(args, 10)
    assert (args.total_episodes, args.num_total_batches) == (25, 2)
    args = arguments(tmp_path, **changes, total_episodes=None, max_steps=7)
    derive(args, 10)
    assert args.num_total_batches == 7


@pytest.mark.parametrize(
    ("launcher", "given", "wanted"),
    [("no", {"bf16": None, "fp16": True}, (False, True)), ("fp16", {"bf16": None}, (False, True)),
     ("no", {"bf16": True}, (True, False)), ("bf16", {"bf16": None}, (True, False))],
)  # fmt: skip
def test_half_precision_is_what_arguments_and_launcher_say(tmp_path, monkeypatch, launcher, given, wanted):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    train = config_of(arguments(tmp_path, **given)).train
    assert (train.bf16, train.fp16) == wanted


@pytest.mark.parametrize("emulates", [True, False])
def test_bfloat16_that_a_gpu_emulates_is_not_turned_on_by_itself(tmp_path, monkeypatch, emulates):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ability = dict.fromkeys((True, False), not emulates) | {True: True}  # by including_emulation
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: ability[including_emulation])
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # looks for the device itself
    assert arguments(tmp_path, bf16=None, use_cpu=False).bf16 == (not emulates)


def test_a_launcher_of_the_other_half_precision_is_refused_in_our_words(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    told = r"train\.bf16: got true, but accelerate launch uses mixed_precision fp16"
    with pytest.raises(ConfigError, match=told):
        check_precision(config_of(arguments(tmp_path, bf16=True)))


def test_arguments_become_a_run(tmp_path):
    args = arguments(
        tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=3, num_mini_batches=2, total_episodes=480,
        lam=0.9, kl_coef=0.1, missing_eos_penalty=2.0, adam_epsilon=1e-7, max_grad_norm=0, warmup_steps=5,
        eval_strategy="steps", eval_steps=0.25, save_strategy="epoch", metric_for_best_model="scores",
        lr_scheduler_type="cosine", lr_scheduler_kwargs='{"num_cycles": 0.3}', local_rollout_forward_batch_size=7,
    )  # fmt: skip
    config = config_of(args)
    train, ppo, sampling = config.train, config.ppo, config.sampling
    assert (train.rollout_batch_size, train.micro_batch_size, config.mini_batch_size) == (24, 4, 12)
    assert (train.total_episodes, config.num_updates(100), train.eval_steps, train.save_steps) == (480, 20, 5, 4)
    assert (ppo.lam, ppo.kl_coef, ppo.missing_eos_penalty, ppo.num_mini_batches) == (0.9, 0.1, 2.0, 2)
    assert (train.adam_epsilon, train.max_grad_norm, train.warmup_steps, train.warmup_ratio) == (1e-7, None, 5, 0)
    assert (train.lr_scheduler_type, train.lr_scheduler_kwargs) == ("cosine", {"num_cycles": 0.3})
    assert (sampling.temperature, sampling.response_length, sampling.batch_size) == (0.7, 6, 7)
    assert (train.metric_for_best_model, train.greater_is_better, train.bf16) == ("eval_scores", True, False)
    assert config.value_kind == "model"
    assert config.model.path == "policy"


def test_a_small_warm_up_is_a_share_and_no_evaluation_has_no_steps(tmp_path):
    config = config_of(arguments(tmp_path, warmup_steps=0.1, save_strategy="no"), evaluates=False)
    assert (config.train.warmup_ratio, config.train.warmup_steps) == (0.1, None)
    assert (config.train.eval_steps, config.train.save_steps) == (None, None)


def test_batch_sizes_that_are_worked_out_are_told_where_they_were_set_otherwise(tmp_path, caplog):
    trainer(tmp_path, args=arguments(tmp_path, batch_size=128, mini_batch_size=8))
    told = [record.message for record in caplog.records if "but it is derived" in record.message]
    (told,) = told
    assert told.startswith("PPOConfig.batch_size: got 128, but it is derived, as in TRL 1.12, and is 8 here")
    assert "per_device_train_batch_size 4, gradient_accumulation_steps 2" in told


def test_arguments_of_older_releases_are_told_what_they_are_called(tmp_path):
    with pytest.raises(ConfigError, match=r"PPOConfig .*: ppo_epochs → num_ppo_epochs; log_with → report_to\."):
        PPOConfig(output_dir=str(tmp_path), ppo_epochs=4, log_with="wandb")
    with pytest.raises(ConfigError, match=r"PPOTrainer .*: tokenizer → processing_class"):
        PPOTrainer(arguments(tmp_path), tokenizer=None, model=None)
    with pytest.raises(TypeError, match="no_such"):
        PPOConfig(output_dir=str(tmp_path), no_such=4)
    names = {field.name for field in dataclasses.fields(PPOConfig)}
    assert not names & OF_CONFIG.keys() and not inspect.signature(PPOTrainer).parameters.keys() & OF_TRAINER.keys()


OF_TRL_0_11 = """
    exp_name seed log_with task_name model_name query_dataset reward_model remove_unused_columns tracker_kwargs
    accelerator_kwargs project_kwargs tracker_project_name push_to_hub_if_best_kwargs steps learning_rate
    adap_kl_ctrl init_kl_coef kl_penalty target horizon gamma lam cliprange cliprange_value vf_coef batch_size
    forward_batch_size mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm
    optimize_cuda_cache optimize_device_cache early_stopping target_kl compare_steps ratio_threshold
    use_score_scaling use_score_norm score_clip whiten_rewards gradient_checkpointing is_encoder_decoder
    is_peft_model backward_batch_size global_backward_batch_size global_batch_size dataset_num_proc
"""
"""Every field of its PPOConfig."""
OF_TRANSFORMERS_4 = """
    evaluation_strategy overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir
    save_safetensors no_cuda use_mps_device use_ipex jit_mode_eval fp16_opt_level fp16_backend half_precision_backend
    tpu_num_cores tpu_metrics_debug past_index fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor
    group_by_length use_legacy_prediction_loop include_inputs_for_metrics include_tokens_per_second
    push_to_hub_model_id push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope split_batches
    dispatch_batches
"""
"""Fields of its TrainingArguments that are gone."""


@pytest.mark.parametrize("name", [*OF_TRL_0_11.split(), *OF_TRANSFORMERS_4.split()])
def test_every_argument_of_the_old_loop_is_one_or_is_told_what_stands_in_its_place(tmp_path, name):
    if name in {field.name for field in dataclasses.fields(PPOConfig)}:
        assert name not in OF_CONFIG
        return
    told = rf"^PPOConfig takes the arguments of TRL 1\.12: {name} → \w.*docs/from_trl\.md"
    with pytest.raises(ConfigError, match=told):
        PPOConfig(output_dir=str(tmp_path), **{name: 1})


def test_a_limit_of_the_ratio_and_a_project_are_sent_to_their_own_places():
    assert OF_CONFIG["ratio_threshold"].startswith("ppo.max_ratio ")
    assert OF_CONFIG["tracker_project_name"].startswith("project,")


@pytest.mark.parametrize("name", ["step", "generate", "log_stats", "save_pretrained", "dataloader"])
def test_what_the_old_loop_calls_is_sent_to_its_section(name):
    told = rf"^PPOTrainer has no {name}, which TRL ≤ 0\.11 had: .*; see docs/from_trl\.md, (.*)$"
    with pytest.raises(AttributeError, match=told) as raised:
        getattr(PPOTrainer.__new__(PPOTrainer), name)
    section = re.match(told, str(raised.value))[1]
    page = Path(__file__).parents[2] / "docs" / "from_trl.md"
    assert f"## {section}" in page.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_names_of_older_releases_are_told_what_they_are_called(name):
    with pytest.raises(ImportError, match=f"tether.compat.trl has no {name}: "):
        exec(f"from tether.compat.trl import {name}")
    assert not hasattr(tether.compat.trl, "NoSuchName")
