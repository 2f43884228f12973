"""A reward model from preference pairs, on TRL's RewardTrainer.

    loss = −log σ(r(prompt, chosen) − r(prompt, rejected)) + center_rewards_coefficient · (r_chosen + r_rejected)²

Each answer is read at its last token, the end token, as reward sources read it in PPO.

Source: Bradley & Terry 1952; Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; the centring term
Eisenstein et al. 2023, eq. 2, https://arxiv.org/abs/2312.09244
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub import constants as hub_constants
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    SchedulerType,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from tether.config.load import dump_config
from tether.config.reward_stage import RewardModelConfig, RewardStageConfig
from tether.data.pairs import Pair, load_pairs, split_pairs
from tether.data.sources import check_source
from tether.errors import ConfigError, ModelError, TrainingError
from tether.metrics.writers import JsonlWriter
from tether.models.adapters import changed_config, peft_lora_config, with_adapter
from tether.models.forward import last_token_scores
from tether.models.loading import (
    bf16_supported,
    classifier_on,
    load_causal_lm,
    load_classifier,
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
)
from tether.models.paths import absolute_source, check_model_path, is_adapter
from tether.models.saving import atomic_folder
from tether.rewards.base import checked, score_sequences

CONFIG_FILE, METRICS_FILE, EVAL_FILE = "config.yaml", "metrics.jsonl", "reward_eval.json"
LENGTH_GROUPS = 4

OnProgress = Callable[[int, int, Mapping[str, float]], None]
"""Told of every optimizer step: its number from 1, the number of steps, and what TRL logged (loss, accuracy, …)."""


@dataclass(frozen=True)
class RewardStageResult:
    """What ``train_reward_model`` made."""

    path: Path
    """Folder of the reward model."""
    metrics: dict[str, float]
    """Numbers of pairs, the training loss of the last step, seconds, and ``eval_…`` where pairs were held out."""


def train_reward_model(config: RewardStageConfig, *, on_progress: OnProgress | None = None) -> RewardStageResult:
    """Trains a reward model and saves it to ``config.output_dir``.

    The folder holds a sequence classifier with one label, or with ``model.lora`` a PEFT adapter of one with its head;
    the tokenizer with its chat template; ``config.yaml``; ``metrics.jsonl`` with one line a step; and
    ``reward_eval.json`` with the rewards of the held-out pairs.

    Args:
        on_progress: told of every optimizer step.

    Raises:
        ConfigError, DataError, ModelError: a mistake that the user can mend; before a model is loaded wherever it can
            be seen by then.
        TrainingError: the loss is not finite; nothing is saved.
    """
    check(config)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    bf16 = bf16_supported(device) if config.train.bf16 is None else config.train.bf16
    tokenizer = load_tokenizer(config.model.path, **_origin(config.model))
    data = load_data(config, tokenizer)
    set_seed(config.train.seed)
    model = start_model(config.model, bf16=bf16)
    tokenizer.pad_token = spare_token(tokenizer, data.token_ids, model.config.get_text_config().vocab_size)
    if config.model.lora is not None:
        model = adapted(model, config.model)
    start = time.perf_counter()
    log = fit(model, tokenizer, data.train, config, bf16=bf16, on_progress=on_progress)
    metrics = {**data.counts, "train_loss": log[-1]["loss"], "time/train_s": time.perf_counter() - start}
    evaluation = evaluate(model, data.held_out, batch_size=2 * config.train.micro_batch_size, device=device, bf16=bf16)
    with atomic_folder(config.output_dir) as folder:
        save(model, tokenizer, folder)
        (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        (folder / EVAL_FILE).write_text(json.dumps(evaluation, indent=1), encoding="utf-8")
        JsonlWriter(folder / METRICS_FILE).write_all(log)
    return RewardStageResult(config.output_dir, metrics | {f"eval_{k}": v for k, v in evaluation["metrics"].items()})


# Before a model is loaded


def check(config: RewardStageConfig) -> None:
    """Raises for every mistake that shows without loading a tokenizer or a model."""
    if find_spec("trl") is None:
        raise ConfigError("tether reward trains with TRL, which is not installed: pip install 'tether[trl]'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"tether reward runs in one process, got WORLD_SIZE {os.environ['WORLD_SIZE']}")
    check_model_path(config.model.path, "model.path")
    if is_adapter(config.model.path, config.model.revision):
        raise ConfigError(
            f"model.path: {config.model.path} is a PEFT adapter; wanted a full model. Merge it first: "
            f"tether merge {config.model.path} -o FOLDER"
        )
    check_source(config.data.pairs, "data.pairs")
    if config.data.eval_pairs is not None:
        check_source(config.data.eval_pairs, "data.eval_pairs")
    schedules = [schedule.value for schedule in SchedulerType]
    if config.train.lr_scheduler_type not in schedules:
        raise ConfigError(
            f"train.lr_scheduler_type: got {config.train.lr_scheduler_type}, wanted one of {', '.join(schedules)}"
        )
    folder = config.output_dir
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir: {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} is not empty. Name another, or add --overwrite_output_dir=true to replace it"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / EVAL_FILE).is_file():
        raise ConfigError(f"output_dir: {folder} holds something else than a reward model of ours; name another")
    if Path(config.model.path).resolve() == folder.resolve():
        raise ConfigError(f"output_dir: this run would write over {folder}, which model.path names; choose another")


@dataclass(frozen=True)
class _Data:
    """The pairs of a run."""

    train: list[Pair]
    held_out: list[Pair]
    num_too_long: int
    num_equal: int

    @property
    def counts(self) -> dict[str, float]:
        return {
            "pairs/train": float(len(self.train)),
            "pairs/eval": float(len(self.held_out)),
            "pairs/too_long": float(self.num_too_long),
            "pairs/equal": float(self.num_equal),
        }

    @property
    def token_ids(self) -> set[int]:
        """Every token that a pair holds."""
        return {
            t for pair in (*self.train, *self.held_out) for ids in (pair.chosen_ids, pair.rejected_ids) for t in ids
        }


def load_data(config: RewardStageConfig, tokenizer: PreTrainedTokenizerBase) -> _Data:
    """Pairs to train on and held-out pairs, as token ids."""
    data = config.data
    generation = load_generation_config(config.model.path, revision=config.model.revision)
    same = {
        "max_length": data.max_length,
        "chat_template": data.chat_template,
        "system_prompt": data.system_prompt,
        "end_ids": stop_token_ids(tokenizer, generation, "eos"),
    }
    pairs = load_pairs(data.pairs, tokenizer, split=data.split, key="data.pairs", **same)
    train, held_out = split_pairs(pairs.pairs, data.held_out_fraction, config.train.seed)
    if data.eval_pairs is None:
        return _Data(train, held_out, pairs.num_too_long, pairs.num_equal)
    others = load_pairs(data.eval_pairs, tokenizer, split=data.eval_split, key="data.eval_pairs", **same)
    return _Data(train, others.pairs, pairs.num_too_long + others.num_too_long, pairs.num_equal + others.num_equal)


def _origin(model: RewardModelConfig) -> dict[str, Any]:
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


# The model


def start_model(config: RewardModelConfig, *, bf16: bool) -> PreTrainedModel:
    """The sequence classifier that training starts from.

    A language model gets a head drawn from N(0, 1/(d + 1)), so that rewards of a trunk with states of unit scale start
    at unit scale.

    Source: Ziegler et al. 2019; details in Huang et al. 2024, https://arxiv.org/abs/2403.17031

    Raises:
        ModelError: it cannot be loaded, or has no classifier of its kind.
    """
    frozen_in_bf16 = config.lora is not None and bf16
    auto = torch.bfloat16 if frozen_in_bf16 else torch.float32
    options = {
        "dtype": auto if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
        **_origin(config),
    }
    kinds = load_config(config.path, **_origin(config)).architectures or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return load_classifier(config.path, **options)
    model = classifier_on(load_causal_lm(config.path, **options))
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    return model


def adapted(model: PreTrainedModel, config: RewardModelConfig) -> PeftModel:
    """``model`` with a fresh LoRA adapter, which brings a copy of the head.

    Raises:
        ConfigError: ``target_modules`` does not fit the model.
    """
    settings = changed_config(
        peft_lora_config(config.lora, model),
        task_type="SEQ_CLS",
        modules_to_save=["score"],
        base_model_name_or_path=absolute_source(config.path),
        revision=config.revision,
    )
    try:
        return with_adapter(model, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: got {config.lora.target_modules}: {error}") from error


def spare_token(tokenizer: PreTrainedTokenizerBase, used: set[int], vocab_size: int) -> str:
    """A token that no answer can end with, to pad with.

    transformers reads a classifier at the last token that is not the pad token: padding with the end token, as many
    tokenizers do, would skip the end of every answer. Special tokens are taken first.

    Args:
        used: tokens of the data.
        vocab_size: embeddings that the model has.

    Raises:
        ModelError: every token is used.
    """
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.added_tokens_decoder]
    ordinary = sorted(vocabulary, reverse=True)
    taken = used | {tokenizer.bos_token_id, tokenizer.eos_token_id}
    for token_id in (*special, *ordinary):
        if token_id is not None and token_id < vocab_size and token_id not in taken:
            return vocabulary[token_id]
    raise ModelError("model.path: the data uses every token of the vocabulary, none is left to pad with")


# Training


def fit(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    config: RewardStageConfig,
    *,
    bf16: bool,
    on_progress: OnProgress | None,
) -> list[dict[str, float]]:
    """Trains the model in place; returns what was logged, a record an optimizer step."""
    from trl import RewardTrainer

    watch = _Watch(on_progress)
    with tempfile.TemporaryDirectory() as scratch, _no_telemetry():
        trainer = RewardTrainer(
            model=model,
            args=_trainer_arguments(config, len(pairs), bf16=bf16, output_dir=scratch),
            train_dataset=Dataset.from_dict(
                {"chosen_ids": [p.chosen_ids for p in pairs], "rejected_ids": [p.rejected_ids for p in pairs]}
            ),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    return watch.log


def _trainer_arguments(config: RewardStageConfig, num_pairs: int, *, bf16: bool, output_dir: str) -> TrainingArguments:
    from trl import RewardConfig

    train = config.train
    accumulation = train.batch_size // train.micro_batch_size
    steps_an_epoch = math.ceil(math.ceil(num_pairs / train.micro_batch_size) / accumulation)
    num_steps = math.ceil(train.num_train_epochs * steps_an_epoch)
    has_accelerator = torch.accelerator.is_available()
    names = {argument.name for argument in fields(RewardConfig)}  # transformers is renaming this one
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return RewardConfig(
        output_dir=output_dir,
        max_steps=num_steps,
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=config.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=round(train.warmup_ratio * num_steps),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or 0.0,
        center_rewards_coefficient=train.center_rewards_coefficient or None,
        bf16=bf16,
        **{checkpointing: train.gradient_checkpointing},
        seed=train.seed,
        max_length=None,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not has_accelerator,
        dataloader_pin_memory=has_accelerator,
    )


@dataclass
class _Watch(TrainerCallback):
    """Keeps TRL's log, passes it on, and stops a run whose loss is not finite."""

    on_progress: OnProgress | None
    log: list[dict[str, float]] = field(default_factory=list)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise TrainingError(
                f"step {state.global_step}: the loss is {logs['loss']}; lower train.learning_rate, or set "
                "train.bf16 to false"
            )
        numbers = {name: float(value) for name, value in logs.items()}
        self.log.append({"step": state.global_step, **numbers})
        if self.on_progress is not None:
            self.on_progress(state.global_step, state.max_steps, numbers)


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Keeps TRL from reporting its use over the network."""
    before = hub_constants.HF_HUB_DISABLE_TELEMETRY
    hub_constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        hub_constants.HF_HUB_DISABLE_TELEMETRY = before


# Evaluation and saving


def evaluate(
    model: PreTrainedModel | PeftModel, pairs: Sequence[Pair], *, batch_size: int, device: torch.device, bf16: bool
) -> dict[str, Any]:
    """Rewards of held-out pairs, scored as reward sources score in PPO, and how often the better answer wins.

        accuracy = share of pairs with r(chosen) > r(rejected)
        margin   = mean of r(chosen) − r(rejected)

    Accuracy is also given for pairs in groups of like length, and apart for pairs whose better answer is the longer
    and the shorter one: a judge of length alone is perfect in one of these and useless in the other.
    """
    classifier = model.get_base_model() if isinstance(model, PeftModel) else model

    @torch.no_grad()
    def score_batch(ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            return last_token_scores(classifier.base_model, classifier.score, ids, mask, position_ids)

    answers = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = score_sequences(answers, score_batch, batch_size=batch_size, device=device)
    scores = checked(scores, len(answers), "the trained reward model")
    rows = [
        {
            "row": pair.row,
            "chosen": chosen,
            "rejected": rejected,
            "chosen_tokens": len(pair.chosen_ids) - pair.query_length,
            "rejected_tokens": len(pair.rejected_ids) - pair.query_length,
        }
        for pair, (chosen, rejected) in zip(pairs, zip(scores[::2], scores[1::2], strict=True), strict=True)
    ]
    return {"metrics": pair_metrics(rows), "accuracy_by_length": accuracy_by_length(rows), "pairs": rows}


def pair_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not rows:
        return {}
    rewards = [row[side] for row in rows for side in ("chosen", "rejected")]
    metrics = {
        "accuracy": _accuracy(rows),
        "margin": fmean(row["chosen"] - row["rejected"] for row in rows),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
    }
    longer = [row for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    groups = {"accuracy_chosen_longer": longer, "accuracy_chosen_shorter": shorter}
    return metrics | {name: _accuracy(group) for name, group in groups.items() if group}


def accuracy_by_length(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy in groups of equal size, by the tokens of the pair's longer answer."""

    def length(row: Mapping[str, Any]) -> int:
        return max(row["chosen_tokens"], row["rejected_tokens"])

    ordered = sorted(rows, key=length)
    bounds = [round(i * len(ordered) / LENGTH_GROUPS) for i in range(LENGTH_GROUPS + 1)]
    groups = [ordered[a:b] for a, b in pairwise(bounds) if a < b]
    return [
        {"tokens": [length(group[0]), length(group[-1])], "pairs": len(group), "accuracy": _accuracy(group)}
        for group in groups
    ]


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> float:
    return fmean(row["chosen"] > row["rejected"] for row in rows)


def save(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the reward model and its tokenizer, to be loaded by transformers or PEFT."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
