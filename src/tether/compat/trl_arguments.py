"""Translates command lines of TRL's PPO scripts to our keys. The scripts themselves run with ``tether.compat.trl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.compat.table import ADAMW, ADAMW_8BIT, COLUMN, NAME, Key
from tether.compat.translation import OF_ONE_PROCESS, Translation, Translator

SYSTEM = "TRL"
PLAIN, WITH_TEST_SPLIT = "ppo.py", "ppo_tldr.py"
"""TRL's scripts: the first holds out the last rows to show answers to them, the second reads the test split."""
KEYS = (
    Key("model.revision", "model_revision"),
    Key("model.dtype", "dtype"),
    Key("model.attn_implementation", "attn_implementation"),
    Key("model.trust_remote_code", "trust_remote_code"),
    Key("data.prompts", "dataset_name"),
    Key("data.columns.prompt", "dataset_text_field", "prompt", COLUMN),
    Key("data.subset", "dataset_config"),
    Key("data.split", "dataset_train_split", "train"),
    Key("ppo.kl_coef", "kl_coef", 0.05),
    Key("ppo.kl_estimator", "kl_estimator", "k1"),
    Key("ppo.cliprange", "cliprange", 0.2),
    Key("ppo.cliprange_value", "cliprange_value", 0.2),
    Key("ppo.vf_coef", "vf_coef", 0.1),
    Key("ppo.gamma", "gamma", 1.0),
    Key("ppo.lam", "lam", 0.95),
    Key("ppo.num_ppo_epochs", "num_ppo_epochs", 4),
    Key("ppo.num_mini_batches", "num_mini_batches", 1),
    Key("ppo.whiten_rewards", "whiten_rewards", False),
    Key("ppo.missing_eos_penalty", "missing_eos_penalty"),
    Key("sampling.response_length", "response_length", 53),
    Key("sampling.temperature", "temperature", 0.7),
    Key("train.learning_rate", "learning_rate", 3e-6),
    Key("train.lr_scheduler_type", "lr_scheduler_type", "linear"),
    Key("train.weight_decay", "weight_decay", 0.0),
    Key("train.adam_beta1", "adam_beta1"),
    Key("train.adam_beta2", "adam_beta2"),
    Key("train.adam_epsilon", "adam_epsilon", 1e-8),
    Key("train.max_grad_norm", "max_grad_norm", 1.0),
    Key("train.bf16", "bf16"),
    Key("train.fp16", "fp16"),
    Key("train.gradient_checkpointing", "gradient_checkpointing", True),
    Key("train.seed", "seed", 42),
    Key("train.logging_steps", "logging_steps"),
    Key("train.save_total_limit", "save_total_limit"),
    Key("train.report_to", "report_to"),
    Key("train.run_name", "run_name", form=NAME),
    Key("train.push_to_hub", "push_to_hub"),
    Key("train.hub_model_id", "hub_model_id"),
    Key("train.hub_private_repo", "hub_private_repo"),
    Key("output_dir", "output_dir", "trainer_output"),
)


MODEL = "EleutherAI/pythia-160m"
"""Their default of sft_model_path and reward_model_path."""


def translated(source: str, options: Mapping[str, Any], script: str, processes: int | None) -> Translation:
    """A launch of ``ppo.py`` or ``ppo_tldr.py``, translated to our keys.

    Args:
        options: the arguments without their dashes.
        script: the file that is launched, as far as known; it decides how prompts are treated.
        processes: number of launched processes; None if unknown.

    Raises:
        ConfigError: it has no dataset.
    """
    keys = Translator(source, SYSTEM, options, {})
    keys.put_table(KEYS)
    keys.need("dataset_name", "the prompts")
    policy = next((key for key in ("sft_model_path", "model_name_or_path") if keys.gives(key)), "sft_model_path")
    keys.put("model.path", keys.take(policy, MODEL), policy)
    keys.covered("model_name_or_path", by="the model of sft_model_path")
    keys.put("rewards", [{"type": "model", "path": keys.take("reward_model_path", MODEL)}], "reward_model_path")
    if keys.flag("use_peft"):
        keys.put("model.lora.r", keys.take("lora_r", 16), "lora_r")
        keys.put("model.lora.alpha", keys.take("lora_alpha", 32), "lora_alpha")
        if keys.gives("lora_dropout"):
            keys.put("model.lora.dropout", keys.take("lora_dropout"), "lora_dropout")
        for key, bits in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
            if keys.flag(key):
                keys.put("model.quantization", bits, key)
        _lora_targets(keys, keys.take(policy))
    keys.covered("use_peft", by="model.lora")
    keys.put("value.kind", "model")
    if keys.take("stop_token", "eos") != "eos":
        keys.refuse("stop_token", "wanted eos, or no stop_token")
    ends = keys.take("stop_token") == "eos" or keys.gives("missing_eos_penalty")
    keys.put("sampling.stop_token", "eos" if ends else None, "stop_token")
    if ends and not keys.gives("stop_token"):
        keys.note("Answers end at the end token; without stop_token TRL continues after it.")
    if keys.gives("stop_token_id"):
        keys.refuse("stop_token_id", "set sampling.stop_token to the token's text, or stop_token to eos")
    _batches(keys, processes)
    _steps(keys, processes or 1)
    if keys.gives("optim"):
        ours = keys.choice("optim", "adamw_torch_fused", ADAMW | ADAMW_8BIT, "adamw_torch_fused")
        keys.put("train.optim", ours, "optim")
    _prompts(keys, Path(script).name, processes or 1)
    keys.ignore("data is read and tokenized anew, in this process", "dataset_num_proc")
    keys.ignore("the last evaluation is on data.eval_prompts", "dataset_test_split", "eval_strategy", "eval_steps",
                "num_sample_generations")  # fmt: skip
    keys.ignore("forward passes have train.micro_batch_size rows", "local_rollout_forward_batch_size")
    keys.drop_rest("it has no counterpart here")
    return keys.finish(())


def _lora_targets(keys: Translator, policy: Any) -> None:
    """The modules that get an adapter. Default: PEFT's choice."""
    if keys.gives("lora_target_modules"):
        keys.put("model.lora.target_modules", keys.take("lora_target_modules"), "lora_target_modules")
    elif (chosen := _choice_of_peft(str(policy))) is not None:
        keys.put("model.lora.target_modules", chosen, "lora_target_modules", note="PEFT's choice for this model")
    else:
        keys.note(
            "All linear layers get an adapter; without lora_target_modules PEFT chooses by model type, q_proj and "
            "v_proj for Llama and Qwen2: set model.lora.target_modules to these for the same run."
        )


def _choice_of_peft(path: str) -> list[str] | None:
    """The modules of the model in a folder that PEFT adapts by default; None if unknown."""
    try:
        kind = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError):
        return None
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    chosen = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    return None if chosen is None else list(chosen)


def _prompts(keys: Translator, script: str, processes: int) -> None:
    """How prompts become queries, and which are held out."""
    if script in (PLAIN, WITH_TEST_SPLIT):
        keys.put("data.chat_template", "none", note=f"{script} tokenizes the column prompt as it is")
    else:
        keys.note("Prompts go through the tokenizer's chat template: if the script does not use it, set "
                  "data.chat_template: none.")  # fmt: skip
    if script == PLAIN:
        keys.note(f"{script} trains on all rows but the last 100, of any length. Here these train too, unless "
                  "data.eval_fraction is set, and prompts over data.max_prompt_length are dropped.")  # fmt: skip
    if script == WITH_TEST_SPLIT:
        keys.note(f"In older releases {script} puts the first of messages through the chat template: then remove "
                  "data.chat_template, and let the column prompt hold only that message.")  # fmt: skip
    reads_test = script == WITH_TEST_SPLIT or (script != PLAIN and keys.gives("dataset_test_split"))
    strategy = keys.take("eval_strategy", "no")
    if not reads_test or strategy == "no":
        return
    keys.put("data.eval_prompts", keys.take("dataset_name"), "dataset_name")
    keys.put("data.eval_split", keys.take("dataset_test_split", "test"), "dataset_test_split")
    if keys.gives("dataset_config"):
        keys.put("data.eval_subset", keys.take("dataset_config"), "dataset_config")
    if strategy == "steps":
        every = "eval_steps" if keys.gives("eval_steps") else "logging_steps"
        steps = keys.steps(every, 10, _updates(keys, processes), length="total_episodes")
        keys.put("train.eval_steps", steps, "eval_strategy", "eval_steps")
    keys.covered("eval_strategy", "eval_steps", by="before the first update and after the last")


def _steps(keys: Translator, processes: int) -> None:
    """Settings that count updates: warm-up and checkpoints."""
    updates = _updates(keys, processes)
    keys.warmup()
    strategy = keys.take("save_strategy", "steps")
    if strategy == "steps":
        keys.put("train.save_steps", keys.steps("save_steps", 500, updates, length="total_episodes"), "save_steps")
    elif strategy != "no":
        keys.drop("checkpoints are saved by updates here: set train.save_steps", "save_strategy")
    keys.covered("save_strategy", "save_steps", by="when checkpoints are saved")


def _updates(keys: Translator, processes: int) -> int:
    """Number of updates in the run; 0 if its length is given in epochs over the prompts and not in answers."""
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    return math.ceil(keys.number("total_episodes", 0) / max(rows * forwards * processes, 1))


def _batches(keys: Translator, processes: int | None) -> None:
    """Their rollout batch is rows × forwards per device."""
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    minis, each = keys.number("num_mini_batches", 1), rows * forwards
    if minis < 1:
        keys.refuse("num_mini_batches", "wanted a whole number above 0")
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps")
    note = f"{rows} × {forwards}" + (f" × {processes}" if processes else ", of one process")
    keys.put("train.rollout_batch_size", each * (processes or 1), *theirs, note=note)
    if processes is None:
        keys.note(OF_ONE_PROCESS)
    keys.put("train.micro_batch_size", min(rows, each // max(minis, 1)), "per_device_train_batch_size")
    if keys.gives("total_episodes"):
        keys.put("train.total_episodes", keys.take("total_episodes"), "total_episodes")
        keys.ignore("total_episodes takes precedence", "num_train_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("num_train_epochs", 3.0), "num_train_epochs")
