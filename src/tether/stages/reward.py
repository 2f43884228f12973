"""Trains a reward model on preference pairs, with TRL's RewardTrainer.

    loss = −log σ(r(prompt, chosen) − r(prompt, rejected)) + center_rewards_coefficient · (r_chosen + r_rejected)²

Each answer is scored at its last token, the end token, as reward sources in PPO score an answer that ended with it.

Source: Bradley & Terry 1952; Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; the centering term:
Eisenstein et al. 2023, eq. 2, https://arxiv.org/abs/2312.09244
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from tether.config.load import check_kind
from tether.config.reward_stage import RewardModelConfig, RewardStageConfig
from tether.data.answers import closing_token
from tether.data.bad_rows import UNUSABLE, Limit
from tether.data.joined import check_named
from tether.data.pairs import Pair, load_pairs, pair_accuracy, split_pairs
from tether.data.queries import QueryFormat
from tether.errors import ModelError
from tether.machine.distributed import lost_told
from tether.models.adapters import DEFAULT, MODULE_PREFIX, Adapter, place_adapter
from tether.models.classifiers import classifier_on, load_classifier
from tether.models.fit import is_classifier
from tether.models.forward import is_causal, last_token_scores
from tether.models.loading import load_causal_lm, load_config
from tether.models.saving import written_into
from tether.report.read import REWARD_EVALUATION
from tether.rewards.base import checked, score_sequences
from tether.rewards.reading import READS_TO
from tether.stages import training
from tether.stages.begin import begin, check_stage
from tether.stages.run import OnProgress, StageRun, Stop, Tell
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

LENGTH_GROUPS = 4


@dataclass(frozen=True)
class RewardStageResult:
    """Result of ``train_reward_model``."""

    path: Path
    """Folder of the reward model."""
    metrics: dict[str, float]
    """Numbers of pairs, the training loss of the last step, seconds, and ``eval_…`` if pairs were held out; empty for a
    run that was already finished."""
    accuracy_by_length: list[dict[str, Any]] = field(default_factory=list)
    """Accuracy on held-out pairs in groups of similar length, shortest first."""
    interrupted: str | None = None
    """Why the run stopped early, with its state saved, or None."""


def train_reward_model(
    config: RewardStageConfig,
    *,
    on_progress: OnProgress | None = None,
    tell: Tell = lambda text: None,
    stop: Stop | None = None,
) -> RewardStageResult:
    """Trains a reward model and saves it to ``config.output_dir``.

    The folder holds a sequence classifier with one label, or with ``model.lora`` a PEFT adapter of one with its head;
    the tokenizer with its chat template and the token at which answers are scored (``READS_TO``); ``config.yaml``;
    ``fingerprints.json``, by which ``resume`` recognizes rows and model; ``metrics.jsonl`` with one line per step and
    one per evaluation during training; and ``reward_eval.json`` with the rewards of the held-out pairs.

    Several launched processes share the pairs of each optimizer step (DDP), and under ZeRO also weights, gradients or
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
    check_kind(config, RewardStageConfig, "train_reward_model", "load_config(path, section=RewardStageConfig)")
    run = begin(config, "reward", check, read_now, tell)
    if run.is_finished:
        return RewardStageResult(config.output_dir, {})
    config, dist, tell = run.config, run.dist, run.tell
    tokenizer, data = dist.main_first(lambda: load_data(config))
    tell(f"pairs: {data.note}")
    tell(f"the first query and its better answer: {tokenizer.decode(data.train[0].chosen_ids)!r}")
    read = dist.each(lambda: fingerprints(config, data.rows))
    dist.each(lambda: check_same_data(run.checkpoint, read))
    set_seed(config.train.seed)
    before = dist.each(lambda: start_adapter(config.model))
    model = dist.each(lambda: start_model(config.model, before, precision=run.precision, device=dist.device))
    processor = dist.each(lambda: processor_of(config.model, model))
    vocab_size = model.config.get_text_config().vocab_size
    tokenizer.pad_token = dist.each(lambda: spare_token(tokenizer, data.token_ids, vocab_size))
    if config.model.lora is not None:
        model = dist.each(lambda: adapted(model, config.model, before))
    before = None  # frees its weights, which may include full embeddings
    with training.watched(run, read, on_progress, stop) as watch:
        settings = model.config.get_text_config()
        uses_cache = settings.use_cache
        start = time.perf_counter()
        evaluations: dict[int, dict[str, Any]] = {}

        def evaluation(step: int) -> dict[str, Any]:
            if step not in evaluations:
                made = evaluate(model, data.held_out, run)
                evaluations.clear()
                evaluations[step] = made
            return evaluations[step]

        with lost_told(dist.num_processes):
            trainer = training.train(lambda: _trainer(model, tokenizer, data, evaluation, watch), run)
        if watch.interrupted is not None:
            return RewardStageResult(config.output_dir, data.counts, interrupted=watch.interrupted)
        kept = training.keep_best(run, trainer, model)
        settings.use_cache = uses_cache  # TRL turns it off for training, which would be saved with the model
        model.eval()
        metrics = {
            **data.counts,
            "train_loss": dist.by_main(lambda: training.last_loss(config)),
            "time/train_s": time.perf_counter() - start,
        }
        last = trainer.state.global_step
        is_told, result = kept in evaluations or kept != last, evaluation(kept)
        full = run.engine.full(model)

        def write() -> None:
            with written_into(config.output_dir) as folder:
                training.save(model, tokenizer, folder, full, processor)
                (folder / REWARD_EVALUATION).write_text(json.dumps(result, indent=1), encoding="utf-8")
                training.write_end(folder, config.output_dir, last=last, kept=kept, evaluation=result["metrics"])

        dist.by_main(write)
        if not is_told:
            watch.trackers.log(_told(result), last)
        return RewardStageResult(config.output_dir, metrics | _told(result), result["accuracy_by_length"])


# Before a model is loaded


def read_now(config: RewardStageConfig) -> dict[str, str]:
    """``fingerprints`` of what the run would read now."""
    return fingerprints(config, load_data(config)[1].rows)


def check(config: RewardStageConfig) -> None:
    """Raises for every mistake that can be found without loading a tokenizer or a model."""
    check_stage(config, "reward")
    check_named(config.data, "pairs", "eval_pairs")


@dataclass(frozen=True)
class _Data:
    """The pairs of a run."""

    train: list[Pair]
    held_out: list[Pair]
    num_too_long: int
    num_equal: int
    num_bad: int

    @property
    def counts(self) -> dict[str, float]:
        return {
            "pairs/train": float(len(self.train)),
            "pairs/eval": float(len(self.held_out)),
            "pairs/too_long": float(self.num_too_long),
            "pairs/equal": float(self.num_equal),
            "pairs/unusable": float(self.num_bad),
        }

    @property
    def note(self) -> str:
        dropped = f"{self.num_too_long} dropped as too long, {self.num_equal} as equal"
        dropped += f", {self.num_bad} left out as {UNUSABLE}" if self.num_bad else ""
        return f"{len(self.train)} to train on, {len(self.held_out)} held out, {dropped}"

    @property
    def rows(self) -> dict[str, Rows]:
        """The training pairs and the held-out pairs."""
        both = {"data.pairs": self.train, "held-out pairs": self.held_out}
        return {name: [(p.row, (p.chosen_ids, p.rejected_ids), {}) for p in pairs] for name, pairs in both.items()}

    @property
    def token_ids(self) -> set[int]:
        """Every token that occurs in a pair."""
        return {
            t for pair in (*self.train, *self.held_out) for ids in (pair.chosen_ids, pair.rejected_ids) for t in ids
        }


def load_data(config: RewardStageConfig) -> tuple[PreTrainedTokenizerBase, _Data]:
    """Loads the tokenizer, and training and held-out pairs as token ids, checked to fit the model.

    Raises:
        ConfigError: as ``check_fit``.
    """
    tokenizer, pairs = _loaded(config)
    both = [(each.row, ids) for each in (*pairs.train, *pairs.held_out) for ids in (each.chosen_ids, each.rejected_ids)]
    check_fit(config, tokenizer, both, "pair", takes_classifier=True)
    return tokenizer, pairs


def _loaded(config: RewardStageConfig) -> tuple[PreTrainedTokenizerBase, _Data]:
    data = config.data
    tokenizer, end_ids = load_templated(config)
    tokenizer.init_kwargs[READS_TO] = tokenizer.convert_ids_to_tokens(closing_token(tokenizer, end_ids))
    form, limit = QueryFormat(tokenizer, **data.chat), Limit(data.max_length, "data.max_length")
    pairs = load_pairs(data.source("pairs"), form, limit, end_ids=end_ids)
    train, held_out = split_pairs(pairs.pairs, data.held_out_fraction, config.train.seed)
    if data.eval_pairs is None:
        return tokenizer, _Data(train, held_out, pairs.num_too_long, pairs.num_equal, pairs.num_bad)
    others = load_pairs(data.source("eval_pairs"), form, limit, end_ids=end_ids)
    too_long, equal = pairs.num_too_long + others.num_too_long, pairs.num_equal + others.num_equal
    return tokenizer, _Data(train, others.pairs, too_long, equal, pairs.num_bad + others.num_bad)


# The model


def start_model(
    config: RewardModelConfig, before: Adapter | None, *, precision: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    """The sequence classifier that training starts from; with lora, the base of the adapter.

    A language model gets a head drawn from N(0, 1/(d + 1)), so that rewards from hidden states of unit scale start at
    unit scale.

    Args:
        before: the adapter in ``model.path``, if there is one.

    Source: Ziegler et al. 2019; details in Huang et al. 2024, https://arxiv.org/abs/2403.17031

    Raises:
        ModelError: it cannot be loaded, or transformers has no classifier for its kind of model.
    """
    (path, of), options = base_of(config, before), loading_options(config, precision=precision, device=device)
    is_merged = before is not None and config.lora is None
    if before.head if is_merged else is_classifier(load_config(path, **of)):
        model = load_classifier(path, **options, **of)
    else:
        model = classifier_on(load_causal_lm(path, **options, **of))
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    # trained also if an adapter was merged into it; the base of an adapter stays frozen, and may be quantized
    return model if config.lora is not None else model.requires_grad_(True)


def adapted(model: PreTrainedModel, config: RewardModelConfig, before: Adapter | None) -> PeftModel:
    """Adds a LoRA adapter with a copy of the head to ``model``: a fresh one, or the one that is trained further.

    Args:
        before: as in ``start_model``.

    Raises:
        ConfigError: ``lora`` does not fit the model, or the adapter that is trained further.
        ModelError: the adapter that is trained further does not fit its base.
    """
    fresh = {f"score.{name}": tensor for name, tensor in model.score.state_dict().items()}
    adapter = with_lora(model, config, before, task_type="SEQ_CLS", kept="score")
    if before is not None:
        head = before.head or fresh
        weights = {f"{MODULE_PREFIX}{name}": tensor for name, tensor in head.items()}
        place_adapter(adapter, DEFAULT, replace(before, tensors={**before.tensors, **weights}))
    return adapter


def spare_token(tokenizer: PreTrainedTokenizerBase, used: set[int], vocab_size: int) -> str:
    """A padding token that no answer can end with.

    transformers scores the last token that is not the pad token. Padding with the end token, as many tokenizers do,
    would skip the end of every answer. Special tokens are preferred.

    Args:
        used: tokens of the data.
        vocab_size: number of the model's embeddings.

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
    raise ModelError("model.path: the data uses every token of the vocabulary, so none is left for padding")


# Training


def _trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: _Data,
    evaluation: Callable[[int], Mapping[str, Any]],
    watch: Watch,
) -> Trainer:
    """TRL's trainer, which trains the model in place.

    Args:
        evaluation: returns the result of ``evaluate`` at a step; used as the trainer's own metrics average batches
            regardless of their size.
    """
    from trl import RewardTrainer

    from tether.stages.trl import RewardArguments

    evaluates, coefficient = bool(data.held_out), watch.run.config.train.center_rewards_coefficient
    arguments = training.trainer_arguments(watch.run, len(data.train), evaluates=evaluates, kind=RewardArguments)
    trainer = RewardTrainer(
        model=model,
        args=watch.run.engine.configured(
            RewardArguments(**arguments, center_rewards_coefficient=coefficient or None), model
        ),
        train_dataset=_dataset(data.train),
        eval_dataset=_dataset(data.held_out) if evaluates else None,
        processing_class=tokenizer,
        callbacks=[watch],
    )

    def on_the_way(**_: Any) -> dict[str, float]:
        model.eval()
        metrics = _told(evaluation(trainer.state.global_step))
        trainer.log(metrics)
        model.train()
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics

    trainer.evaluate = on_the_way
    return trainer


def _told(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation under their names in logs."""
    return {f"eval_{name}": value for name, value in evaluation["metrics"].items()}


def _dataset(pairs: Sequence[Pair]) -> Dataset:
    """Token ids of both answers."""
    return Dataset.from_dict(
        {"chosen_ids": [p.chosen_ids for p in pairs], "rejected_ids": [p.rejected_ids for p in pairs]}
    )


# Evaluation


def evaluate(
    model: PreTrainedModel | PeftModel, pairs: Sequence[Pair], run: StageRun[RewardStageConfig]
) -> dict[str, Any]:
    """Rewards of held-out pairs, scored as by reward sources in PPO, and how often the better answer wins. Each process
    scores its share; if all take part in each forward pass, one with a smaller share scores an answer twice.

        loss     = mean of the training loss
        accuracy = share of pairs with r(chosen) > r(rejected)
        margin   = mean of r(chosen) − r(rejected)

    Accuracy is also computed for groups of pairs of similar length, and separately for pairs whose better answer is the
    longer or the shorter one: a judge of length alone is perfect on one of these and useless on the other.
    """
    classifier = model.get_base_model() if isinstance(model, PeftModel) else model
    causal, dist, train = is_causal(classifier.base_model), run.dist, run.config.train

    @torch.no_grad()
    def score_batch(ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        with nullcontext() if run.precision is None else torch.autocast(dist.device.type, run.precision):
            trunk, head = classifier.base_model, classifier.score
            return last_token_scores(trunk, head, ids, mask, position_ids, causal=causal)

    answers = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    mine, most = dist.share(len(answers)), math.ceil(len(answers) / dist.num_processes)
    own = [answers[i] for i in mine] + answers[: most - len(mine) if run.engine.in_step else 0]
    options = {"batch_size": 2 * train.micro_batch_size, "device": dist.device, "through": run.engine.host}
    shares = dist.together(lambda: score_sequences(own, score_batch, **options)[: len(mine)])
    scores = checked([score for share in shares for score in share], len(answers), "the trained reward model")
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
    metrics = pair_metrics(rows, train.center_rewards_coefficient)
    return {"metrics": metrics, "accuracy_by_length": accuracy_by_length(rows), "pairs": rows}


def pair_metrics(rows: Sequence[Mapping[str, Any]], center: float = 0.0) -> dict[str, float]:
    """The metrics of ``evaluate``; none without pairs."""
    if not rows:
        return {}
    rewards = [row[side] for row in rows for side in ("chosen", "rejected")]
    metrics = {
        "loss": fmean(
            _softplus(row["rejected"] - row["chosen"]) + center * (row["chosen"] + row["rejected"]) ** 2 for row in rows
        ),
        "accuracy": _accuracy(rows),
        "margin": fmean(row["chosen"] - row["rejected"] for row in rows),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
    }
    longer = [row for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    groups = {"accuracy_chosen_longer": longer, "accuracy_chosen_shorter": shorter}
    return metrics | {name: _accuracy(group) for name, group in groups.items() if group}


def _softplus(x: float) -> float:
    """log(1 + eˣ), which is −log σ(−x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def accuracy_by_length(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy in groups by the number of tokens of the longer answer of each pair: pairs of equal length are in one
    group, and the groups are otherwise of equal size."""

    def length(row: Mapping[str, Any]) -> int:
        return max(row["chosen_tokens"], row["rejected_tokens"])

    ordered = sorted(rows, key=length)
    ends = [round(i * len(ordered) / LENGTH_GROUPS) for i in range(1, LENGTH_GROUPS + 1)]
    bounds = {0} | {bisect_right(ordered, length(ordered[end - 1]), key=length) for end in ends if end}
    return [
        {"tokens": [length(group[0]), length(group[-1])], "pairs": len(group), "accuracy": _accuracy(group)}
        for group in (ordered[a:b] for a, b in pairwise(sorted(bounds)))
    ]


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> float:
    return pair_accuracy([row["chosen"] - row["rejected"] for row in rows])
