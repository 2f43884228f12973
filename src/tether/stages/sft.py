"""Trains a policy on demonstrations, with TRL's SFTTrainer.

    loss = −(1/N) Σ log π(token)        over the N tokens of all answers of an optimizer step, end tokens included

Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from tether.config.load import check_kind
from tether.config.sft_stage import SftModelConfig, SftStageConfig
from tether.data.bad_rows import UNUSABLE, Limit
from tether.data.demonstrations import Demonstration, load_demonstrations
from tether.data.held_out import split_off
from tether.data.joined import check_named
from tether.data.queries import QueryFormat
from tether.errors import DataError, ModelError
from tether.machine.distributed import lost_told
from tether.models.adapters import DEFAULT, place_adapter
from tether.models.loading import load_causal_lm
from tether.models.saving import written_into
from tether.models.tokenizer import end_at
from tether.stages import training
from tether.stages.begin import begin, check_stage
from tether.stages.run import OnProgress, Stop, Tell
from tether.stages.same_run import Rows, check_same_data, fingerprints
from tether.stages.start import (
    base_of,
    check_fit,
    load_templated,
    loading_options,
    processor_of,
    start_adapter,
    with_lora,
)
from tether.stages.watch import Watch

IGNORED = -100
"""Label of tokens that are not trained on."""


@dataclass(frozen=True)
class SftResult:
    """Result of ``train_sft``."""

    path: Path
    """Folder of the policy."""
    metrics: dict[str, float]
    """Numbers of demonstrations, the last training loss, seconds, and ``eval_…`` if some were held out; empty for a run
    that was already finished."""
    interrupted: str | None = None
    """Why the run stopped early, with its state saved, or None."""


def train_sft(
    config: SftStageConfig,
    *,
    on_progress: OnProgress | None = None,
    tell: Tell = lambda text: None,
    stop: Stop | None = None,
) -> SftResult:
    """Fine-tunes a language model on demonstrations and saves it to ``config.output_dir``.

    The folder holds a plain model, or with ``model.lora`` a PEFT adapter; the tokenizer with its chat template; the
    generation config, which ends answers where the chat template does; ``config.yaml``; ``fingerprints.json``, by which
    ``resume`` recognizes rows and model; and ``metrics.jsonl`` with one line per step and one per evaluation.

    Several launched processes share the rows of each optimizer step (DDP), and under ZeRO also weights, gradients or
    optimizer states; only the first writes files and messages.

    Args:
        on_progress: called after every optimizer step.
        tell: called with messages for the user.
        stop: called after every step; if it returns a reason, the run ends with a checkpoint, in all processes.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: a mistake that the user can fix, found before a model is
            loaded wherever possible.
        TrainingError: the loss is not finite; no model is saved.
    """
    check_kind(config, SftStageConfig, "train_sft", "load_config(path, section=SftStageConfig)")
    run = begin(config, "sft", check, read_now, tell)
    if run.is_finished:
        return SftResult(config.output_dir, {})
    config, dist, tell, precision = run.config, run.dist, run.tell, run.precision
    data = dist.main_first(lambda: load_data(config))
    for line in data.notes:
        tell(line)
    read = dist.each(lambda: fingerprints(config, data.rows))
    dist.each(lambda: check_same_data(run.checkpoint, read))
    set_seed(config.train.seed)
    model = dist.each(lambda: start_model(config.model, precision=precision, device=dist.device))
    processor = dist.each(lambda: processor_of(config.model, model))
    with training.watched(run, read, on_progress, stop) as watch:
        start = time.perf_counter()
        with _settings_kept(model), lost_told(dist.num_processes):
            trainer = training.train(lambda: _trainer(model, data, watch), run)
            if watch.interrupted is None and data.held_out and not _is_evaluated(trainer):
                trainer.evaluate()
            kept = trainer.state.global_step if watch.interrupted else training.keep_best(run, trainer, model)
        if watch.interrupted is not None:
            return SftResult(config.output_dir, data.counts, watch.interrupted)
        evaluation = _evaluation(trainer, kept)
        metrics = {
            **data.counts,
            "train_loss": dist.by_main(lambda: training.last_loss(config)),
            "time/train_s": time.perf_counter() - start,
            **evaluation,
        }
        end_at(model, data.end_ids)
        full = run.engine.full(model)

        def write() -> None:
            with written_into(config.output_dir) as folder:
                training.save(model, data.tokenizer, folder, full, processor)
                if isinstance(model, PeftModel):  # a full model's is saved with it
                    model.generation_config.save_pretrained(folder)
                last = trainer.state.global_step
                training.write_end(folder, config.output_dir, last=last, kept=kept, evaluation=evaluation)

        dist.by_main(write)
        return SftResult(config.output_dir, metrics)


# Before a model is loaded


def read_now(config: SftStageConfig) -> dict[str, str]:
    """``fingerprints`` of what the run would read now."""
    return fingerprints(config, load_data(config).rows)


def check(config: SftStageConfig) -> None:
    """Raises for every mistake that can be found without loading a tokenizer or a model."""
    check_stage(config, "sft")
    check_named(config.data, "demonstrations", "eval_demonstrations")


@dataclass(frozen=True)
class SftData:
    """The demonstrations of a run."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    """Tokens that end an answer."""
    train: list[Demonstration]
    held_out: list[Demonstration]
    num_too_long: int
    num_unanswered: int
    num_bad: int

    @property
    def counts(self) -> dict[str, float]:
        return {
            "demonstrations/train": float(len(self.train)),
            "demonstrations/eval": float(len(self.held_out)),
            "demonstrations/too_long": float(self.num_too_long),
            "demonstrations/unanswered": float(self.num_unanswered),
            "demonstrations/unusable": float(self.num_bad),
        }

    @property
    def rows(self) -> dict[str, Rows]:
        """The training rows and the held-out rows."""
        both = {"data.demonstrations": self.train, "held-out demonstrations": self.held_out}
        return {name: [(d.row, (d.query_ids, d.response_ids), {}) for d in each] for name, each in both.items()}

    @property
    def notes(self) -> list[str]:
        """Messages at the start of a run: the numbers of demonstrations, and the first one with special tokens."""
        first = self.train[0]
        query, response = self.tokenizer.decode(first.query_ids), self.tokenizer.decode(first.response_ids)
        without = f", {self.num_unanswered} without an answer" if self.num_unanswered else ""
        without += f", {self.num_bad} left out as {UNUSABLE}" if self.num_bad else ""
        return [
            f"demonstrations: {len(self.train)} to train on, {len(self.held_out)} held out, "
            f"{self.num_too_long} dropped as too long{without}",
            f"the first prompt: {query!r}, and what is trained on: {response!r}",
        ]


def load_data(config: SftStageConfig) -> SftData:
    """Loads the tokenizer, and training and held-out demonstrations as token ids, checked to fit the model.

    Raises:
        ConfigError, ModelError: as ``check_fit``.
        DataError: demonstrations should be held out, but none can be.
    """
    data = _loaded(config)
    texts = [(each.row, each.query_ids + each.response_ids) for each in (*data.train, *data.held_out)]
    check_fit(config, data.tokenizer, texts, "demonstration", takes_classifier=False)
    return data


def _loaded(config: SftStageConfig) -> SftData:
    data = config.data
    tokenizer, end_ids = load_templated(config)
    form, limit = QueryFormat(tokenizer, **data.chat), Limit(data.max_length, "data.max_length")
    answers = {"end_ids": end_ids, "every_turn": data.turns == "all", "ends_text": True}
    names = [name for name in ("demonstrations", "eval_demonstrations") if getattr(data, name) is not None]
    read = [load_demonstrations(data.source(name), form, limit, **answers) for name in names]
    train, held_out = read[0].demonstrations, read[-1].demonstrations
    if data.eval_demonstrations is None:
        # a row's turns, and rows with equal prompts, begin alike and so are never on both sides
        first = {each.row: each.query_ids for each in reversed(train)}
        train, held_out = split_off(
            train, data.held_out_fraction, config.train.seed, lambda each: _same(first[each.row], each.row)
        )
        if data.held_out_fraction > 0 and not held_out:
            raise DataError("data.eval_fraction: all demonstrations have the same prompt, so none can be held out")
    dropped = [(each.num_too_long, each.num_unanswered, each.num_bad) for each in read]
    return SftData(tokenizer, end_ids, train, held_out, *map(sum, zip(*dropped, strict=True)))


def _same(query: tuple[int, ...], row: int) -> tuple[int, ...] | int:
    """A key that demonstrations of one prompt share; plain texts have no prompt other than their first token."""
    return query if len(query) > 1 else row


# The model


def start_model(
    config: SftModelConfig, *, precision: torch.dtype | None, device: torch.device
) -> PreTrainedModel | PeftModel:
    """The language model that training starts from; with lora, with a fresh adapter or the one that is trained further.

    Raises:
        ConfigError: ``lora`` does not fit the model, or the adapter that is trained further.
        ModelError: it cannot be loaded, or is not a language model.
    """
    before = start_adapter(config)
    if before is not None and before.head:
        raise ModelError(f"model.path: {config.path} is a reward adapter (it has a head); wanted a language model's")
    path, of = base_of(config, before)
    model = load_causal_lm(path, **loading_options(config, precision=precision, device=device), **of)
    if config.lora is None:
        return model.requires_grad_(True)  # also if an adapter was merged into it
    adapted = with_lora(model, config, before, task_type="CAUSAL_LM")
    if before is not None:
        place_adapter(adapted, DEFAULT, before)
    return adapted


@contextmanager
def _settings_kept(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Restores config and generation config on exit: the trainer aligns both with the tokenizer."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    settings, generation = copy.deepcopy(base.config), copy.deepcopy(base.generation_config)
    try:
        yield
    finally:
        base.config, base.generation_config = settings, generation


# Training


def _trainer(model: PreTrainedModel | PeftModel, data: SftData, watch: Watch) -> Trainer:
    """TRL's trainer, which trains the model in place."""
    from trl import SFTTrainer

    from tether.stages.trl import SftArguments

    evaluates = bool(data.held_out)
    arguments = training.trainer_arguments(watch.run, len(data.train), evaluates=evaluates, kind=SftArguments)
    return SFTTrainer(
        model=model,
        args=watch.run.engine.configured(SftArguments(**arguments), model),
        train_dataset=_dataset(data.train),
        eval_dataset=_dataset(data.held_out) if evaluates else None,
        processing_class=copy.deepcopy(data.tokenizer),  # TRL adds a pad token if it has none
        callbacks=[watch],
    )


def _dataset(demonstrations: Sequence[Demonstration]) -> Dataset:
    """Token ids, and as labels those that are trained on."""
    return Dataset.from_dict(
        {
            "input_ids": [[*each.query_ids, *each.response_ids] for each in demonstrations],
            "labels": [[IGNORED] * len(each.query_ids) + list(each.response_ids) for each in demonstrations],
        }
    )


def _is_evaluated(trainer: Trainer) -> bool:
    """Whether the last step was evaluated."""
    return any("eval_loss" in row and row["step"] == trainer.state.global_step for row in trainer.state.log_history)


def _evaluation(trainer: Trainer, step: int) -> Mapping[str, float]:
    """Loss and token accuracy of the evaluation after a step, if there was one."""
    rows = (row for row in reversed(trainer.state.log_history) if "eval_loss" in row and row["step"] == step)
    row = next(rows, {})
    return {name: row[name] for name in ("eval_loss", "eval_mean_token_accuracy") if name in row}
