"""What a resumed run must keep, what it may change, and which results such changes affect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tether.config.base import differences
from tether.config.places import different, is_place, not_moved
from tether.config.schema import RunConfig
from tether.data.demonstrations import Demonstration
from tether.data.digest import rows_digest
from tether.errors import CheckpointError
from tether.machine.distributed import Dist
from tether.types import Prompt

OF_MEMORY = frozenset({
    "train.micro_batch_size", "train.max_tokens_per_micro_batch", "train.gradient_checkpointing", "sampling.batch_size",
    "train.offload_idle_roles", "sampling.vllm.gpu_memory_utilization", "sampling.vllm.enable_sleep_mode",
    "sampling.vllm.enforce_eager",
})
"""Keys to change if a run does not fit into memory. Changing them changes rounding."""
OF_END = frozenset({
    "train.total_episodes", "train.num_train_epochs", "train.max_steps", "value.save", "train.push_to_hub",
    "train.hub_model_id", "train.hub_private_repo",
})
"""Keys that may differ without repeating a finished run, if the number of updates is the same and the critic, if it is
to be saved, exists."""
OF_RESULT = OF_END | {
    "train.metric_for_best_model", "train.greater_is_better", "train.load_best_model_at_end",
}
"""Keys that decide what a run leaves behind. A resumed run may change them; a finished one counts as changed by them,
except by ``OF_END``."""
MAY_CHANGE = OF_MEMORY | OF_RESULT | {
    "resume", "overwrite_output_dir", "output_dir", "train.logging_steps", "train.log_samples", "train.eval_steps",
    "train.save_steps", "train.save_total_limit", "train.report_to", "train.run_name", "train.max_runtime",
    "train.max_bad_batches", "train.dry_step", "train.ddp_timeout", "train.ds3_gather_for_generation",
}
"""Keys that a resumed run may change."""
_REWARD = r"rewards\.\d+\.(members\.\d+\.)?"
SERVICE_MAY_CHANGE = re.compile(
    _REWARD + r"(url|base_url|api_key_env|connect_timeout|read_timeout|retries|retry_delay|max_concurrency)"
)
"""Also these: where and how a reward service is called. Services fail, and move."""
JUDGE_MAY_CHANGE = re.compile(_REWARD + r"(processes|offload|batch_size)")
"""And these: where a reward model is placed, and how much it reads at once. One engine may shard it and another may
not, and it may not fit into memory."""
ERROR_MAY_CHANGE = re.compile(_REWARD + r"(max_length|missing|attempts|max_tokens|temperature|extra_body(\..+)?)")
"""And these, which give a score to answers that had none, which ended the run: answers too long for the reward model,
not scored by the function, rejected by a service, or with a reply that contains no number."""
_ROUNDED = re.compile("|".join([*map(re.escape, sorted(OF_MEMORY)), _REWARD + "batch_size"]))


def told_of_move(saved: RunConfig, record: Mapping[str, Any], config: RunConfig, dist: Dist, engine: str) -> str | None:
    """Describes what is no longer bitwise equal in a run resumed with other processes than its checkpoint was written
    with, or with other sizes of what is computed at once; None if everything is.

    Args:
        saved: the configuration that the checkpoint was written with.
        record: ``read_state`` of the checkpoint.
        engine: the engine that distributes this run over its processes.
    """
    before, now = record["num_processes"], dist.num_processes
    keys = differences(saved, config)
    rounded = [key for key in keys if _ROUNDED.fullmatch(key)]
    if (before, record["engine"]) != (now, engine):
        told = (
            f"the checkpoint was written by {_processes(before, record['engine'])} and is resumed with "
            f"{_processes(now, engine)}"
        )
    elif rounded:
        told = f"the checkpoint was written with another {' and '.join(rounded)}"
    else:
        return None
    told += (
        ": prompts, their order and the sampling noise stay the same, but sums are added in a different order and "
        "rounded differently, so the results are not bitwise identical"
    )
    if now > before:
        told += f". Reward functions get the same random numbers in process 0 and in the processes from {before} on"
    if config.ppo.num_mini_batches == 1:
        return told
    at_once = (saved.answers_at_once(before), config.answers_at_once(now))
    budgets = (saved.train.max_tokens_per_micro_batch, config.train.max_tokens_per_micro_batch)
    if budgets != (None, None) and (before != now or budgets[0] != budgets[1]):
        told += (
            ". train.max_tokens_per_micro_batch counts the tokens of each process, so different answers than before "
            "are trained on at once, and mini-batches contain different ones"
        )
    elif at_once[0] != at_once[1]:
        told += (
            f". {at_once[0]} answers were trained on at once before, and {at_once[1]} now, so mini-batches contain "
            f"different ones; to avoid this, keep train.micro_batch_size times the number of processes at {at_once[0]}"
        )
    return told


def _processes(count: int, engine: str) -> str:
    return engine if count == 1 else f"{count} processes under {engine}"


def may_change(key: str, *, is_finished: bool = False) -> bool:
    """Whether a resumed run may change a key, in which rewards and their members are numbered.

    Args:
        is_finished: whether nothing is left to train, so that only keys without effect on the results may change.
    """
    if is_finished and (key in OF_RESULT or ERROR_MAY_CHANGE.fullmatch(key)):
        return False
    of_rewards = (SERVICE_MAY_CHANGE, JUDGE_MAY_CHANGE, ERROR_MAY_CHANGE)
    return key in MAY_CHANGE or any(pattern.fullmatch(key) for pattern in of_rewards)


def check_same_run(
    saved: RunConfig, config: RunConfig, path: Path, recorded: Mapping[str, str], read: Mapping[str, str]
) -> list[str]:
    """A line for every key that differs between a checkpoint's run and this one, and may differ. Keys that name places
    may differ if models and files are the same there; ``check_same_data`` compares rows.

    Args:
        recorded: ``fingerprints`` of the checkpoint's run.
        read: ``place_digests`` of this run, or its ``fingerprints``, which include them.

    Raises:
        CheckpointError: keys differ that may not; names them, and those that may.
    """
    lines = {key: f"{key}: was {old!r}, now {new!r}" for key, (old, new) in differences(saved, config).items()}
    if refused := not_moved((key for key in lines if not may_change(key)), recorded, read):
        differ = "".join(f"  {lines[key]}\n" for key in refused)
        moved = (
            " A model on the hub is known by its name and revision alone, one in a folder by its contents, which are "
            "not those that the run began with."
            if any(is_place(key) for key in refused)
            else ""
        )
        raise CheckpointError(
            f"resume: {path} was written with a different configuration:\n{differ}Restore these values, or start a new "
            f"run in another output_dir.{moved} What may change: {', '.join(sorted(MAY_CHANGE))}, where and how a "
            "reward service is called, which processes hold a reward model and how much it reads at a time, how an "
            "answer without a score gets one, and where unchanged models, datasets and files of rewards lie"
        )
    return [line for key, line in lines.items() if key not in ("resume", "overwrite_output_dir")]


def fingerprints(
    prompts: Iterable[Prompt],
    eval_prompts: Iterable[Prompt],
    demonstrations: Iterable[Demonstration],
    places: Mapping[str, str],
) -> dict[str, str]:
    """Hashes of what the run reads from each of its datasets, models and files, by the key that names it.

    Args:
        places: ``place_digests`` of the run.
    """
    return {
        **places,
        "data.prompts": rows_digest((each.row, (each.token_ids,), each.columns) for each in prompts),
        "held-out prompts": rows_digest((each.row, (each.token_ids,), each.columns) for each in eval_prompts),
        "data.ptx": rows_digest((each.row, (each.query_ids, each.response_ids), {}) for each in demonstrations),
    }


def check_same_data(saved: Mapping[str, str], data: Mapping[str, str], path: Path) -> None:
    """Checks that a run reads the same data as the checkpoint's run.

    Args:
        saved: ``fingerprints`` of the checkpoint's run.
        data: those of this run.
        path: the checkpoint.

    Raises:
        CheckpointError: a dataset or a model has changed, so the order of the prompts and what was trained on would not
            fit.
    """
    if changed := different(saved, data):
        of_models = [key for key in changed if key.endswith((".path", ".init"))]
        what = "weights or shape" if of_models == changed else "rows, their order, their other columns, the tokenizer"
        raise CheckpointError(
            f"resume: {' and '.join(changed)} changed since {path} was written: {what}"
            f"{'' if of_models else ' or its chat template'}. Restore them, or start a new run from the checkpoint: "
            f"model.path: {path}, in another output_dir"
        )

