"""The output folder of a run: what a run may overwrite, how the folder is prepared, and what it contains at the end.

    output_dir/
      config.yaml, metrics.jsonl, samples.jsonl, bad_batches.jsonl, logs/     during training
      checkpoint-N/                                                           by train.save_steps
      base/                           the base model of an adapter, if it was a GGUF file
      report.html, score_norm.json, critic/, and the policy with its manifest.json at the end
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.config.base import differences
from tether.config.chat import with_now
from tether.config.load import dump_config, dump_run, parse_config
from tether.config.places import different, not_moved
from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.metrics.trackers import LOGS
from tether.metrics.writers import truncate_after, unfinished, write_whole
from tether.models.checkpoints import (
    METRICS,
    check_models_kept,
    checkpoint_step,
    holds_run,
    is_checkpoint_name,
    list_checkpoints,
)
from tether.models.paths import ADAPTER_CONFIG, BASE
from tether.models.roles import ModelRoles
from tether.models.saving import (
    FINAL,
    TRIAL,
    atomic_folder,
    check_can_be_made,
    files_written,
    is_whole,
    remove_unfinished,
    save_critic,
    save_policy,
    written_into,
)
from tether.report.card import CARD, write_card
from tether.report.html import REPORT
from tether.report.read import FINISHED
from tether.train.checkpoint import last_complete, read_state
from tether.train.gguf import is_from_gguf
from tether.train.guard import BAD_BATCHES
from tether.train.inputs import RunData, check, load_data, model_paths, place_digests, resolved
from tether.train.log import SAMPLES
from tether.train.norms import SCORE_NORM
from tether.train.same_run import OF_END, fingerprints, may_change

CONFIG, CRITIC = "config.yaml", "critic"
FOLDERS = (CRITIC, BASE)
"""Folders that a run writes besides its checkpoints."""
REPLACED = (METRICS, SAMPLES, BAD_BATCHES, SCORE_NORM, FINISHED)
"""Files that a run replaces as a whole after its start."""


def check_folder(config: RunConfig) -> None:
    """Raises ``ConfigError`` if ``output_dir`` cannot be written, or contains another run."""
    folder = config.output_dir
    try:
        is_taken = holds_run(folder)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be read: {error.strerror}") from error
    goes_on = config.resume in (True, "auto")
    goes_on = goes_on or (config.resume and goes_on_in(folder, Path(config.resume)))
    if is_taken and not goes_on and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} holds an earlier run. Add --resume to continue it, choose another output_dir, "
            "or add --overwrite to replace it"
        )
    if not is_taken and any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"output_dir: {folder} holds a model, which the trained policy would replace; name another")
    check_models_kept(folder, model_paths(config), also=FOLDERS)
    is_new = not is_taken and not config.overwrite_output_dir
    check_files(folder, is_new=is_new, way_out="add --overwrite to replace it")
    check_can_be_made(folder, "output_dir")


def is_finished(config: RunConfig) -> bool:
    """Whether a run with ``resume: auto`` has nothing left to train: ``output_dir`` contains a run that finished after
    the configured number of updates, complete and as this configuration would leave it.

    Raises:
        ConfigError, DataError: as in ``check``, if there is a finished run, and as in ``load_data``, if the number of
            updates depends on the number of prompts.
    """
    folder = config.output_dir
    if config.resume != "auto" or not all((folder / name).is_file() for name in (CONFIG, FINISHED)):
        return False
    check(config)
    saved = parse_config((folder / CONFIG).read_text(encoding="utf-8"), RunConfig, source=str(folder / CONFIG))
    config = with_now(resolved(config), saved.data.chat_template_now)
    changed = differences(saved, config)
    other = [key for key in changed if key not in OF_END and not may_change(key, is_finished=True)]
    folders = [folder, folder / CRITIC] if config.value.save else [folder]
    if not all(is_whole(each) for each in folders) or FINISHED not in files_written(folder):
        return False
    end = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
    data = cache(lambda: load_data(config))
    if other and other_contents(config, other, recorded(folder), data):
        return False
    depends_on_data = config.train.num_train_epochs is not None
    num_prompts = len(data().prompts.prompts) if depends_on_data else 0
    return end["step"] == config.num_updates(num_prompts)


def recorded(folder: Path) -> Mapping[str, str]:
    """``fingerprints`` of the run in a folder: of its end, else of the checkpoint that it would be resumed from; none
    without either."""
    if (folder / FINISHED).is_file():
        return json.loads((folder / FINISHED).read_text(encoding="utf-8"))["data"]
    checkpoint = last_complete(folder, contents=True)
    return read_state(checkpoint)["data"] if checkpoint is not None else {}


def other_contents(
    config: RunConfig, changed: Iterable[str], saved: Mapping[str, str], data: Callable[[], RunData]
) -> list[str]:
    """Keys that changed since an earlier run in more than the places of inputs, else datasets of other rows.

    Args:
        config: the configuration now.
        changed: keys that were different then.
        saved: ``fingerprints`` of the earlier run.
        data: loads the data; called if only places changed.
    """
    places = place_digests(config)
    if others := not_moved(changed, saved, places):
        return others
    own = data()
    return different(saved, fingerprints(own.prompts.prompts, own.held_out, own.demonstrations, places))


def begun_at(folder: Path) -> str | None:
    """``data.chat_template_now`` of the run in ``folder``; None if there is no run."""
    try:
        return parse_config((folder / CONFIG).read_text(encoding="utf-8"), RunConfig).data.chat_template_now
    except (OSError, ConfigError, UnicodeDecodeError):
        return None


def check_files(folder: Path, *, is_new: bool, way_out: str) -> None:
    """Raises ``ConfigError`` if a run that writes to ``folder`` would write elsewhere, or overwrite files that no run
    wrote.

    Args:
        is_new: whether no earlier run is resumed or replaced. One that ended before its first record is replaced.
        way_out: the alternative to naming another folder, for the message.
    """
    written, is_new = {CONFIG, *REPLACED}, is_new and not _was_begun(folder)
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.name in (LOGS, *FOLDERS) and path.is_file():
            raise ConfigError(f"output_dir: {path} is a file, but a run writes a folder of this name: remove it")
        if path.name.removeprefix(".").removesuffix(".tmp") in written and (path.is_symlink() or not path.is_file()):
            kind = "a link" if path.is_symlink() else "not a file"
            raise ConfigError(f"output_dir: {path} is {kind}, but a run writes only to its own files: remove it")
        if is_new and path.name in (SAMPLES, REPORT, CARD, CONFIG):
            raise ConfigError(
                f"output_dir: {folder} holds a {path.name}, which the run would overwrite; choose another folder, or "
                f"{way_out}"
            )


def _was_begun(folder: Path) -> bool:
    """Whether config.yaml in ``folder`` is exactly as a run writes it, which a hand-written file hardly ever is."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
        return dump_config(parse_config(text, RunConfig), continues=True) == text
    except (OSError, ConfigError, UnicodeDecodeError):
        return False


def goes_on_in(folder: Path, checkpoint: Path | None) -> bool:
    """Whether a run resumed from ``checkpoint`` continues the run in ``folder``."""
    return checkpoint is not None and checkpoint.resolve().parent == folder.resolve()


def prepare_folder(
    config: RunConfig, checkpoint: Path | None, *, continues: bool, tell: Callable[[str], None]
) -> None:
    """Prepares ``output_dir``: removes an earlier run, or cuts it back to the checkpoint that the run resumes from.

    Called after all models are loaded, so that a run which fails to start does not delete earlier checkpoints.

    Args:
        continues: whether the run continues an adapter; see ``dump_config``.
    """
    folder = config.output_dir
    remove_unfinished(folder, lambda name: is_checkpoint_name(name) or name in (*FOLDERS, FINAL, TRIAL))
    for path in (*(unfinished(folder / name) for name in REPLACED), *folder.glob(f".{REPORT}.*")):
        path.unlink(missing_ok=True)
    (folder / FINISHED).unlink(missing_ok=True)
    if goes_on_in(folder, checkpoint):
        state = read_state(checkpoint)
        for path in list_checkpoints(folder)[::-1]:
            if checkpoint_step(path) > state["step"]:  # its updates are repeated, and it is written again
                tell(f"removing {path}, as the run continues from {checkpoint}")
                shutil.rmtree(path)
        evaluated = -1 if state["evaluated_step"] is None else state["evaluated_step"]
        for name in (METRICS, SAMPLES, BAD_BATCHES):
            truncate_after(folder / name, state["step"], evaluated)
    elif config.overwrite_output_dir or _was_begun(folder):
        others = (CRITIC,) if is_from_gguf(config) else FOLDERS  # base/ already belongs to this run
        for path in (*list_checkpoints(folder), *(folder / name for name in others)):
            shutil.rmtree(path, ignore_errors=not path.exists())
        # the policy too: an adapter next to another run's full model would be loaded together with it
        for name in (*REPLACED, REPORT, *files_written(folder)):
            (folder / name).unlink(missing_ok=True)
    write_whole(folder / CONFIG, dump_run(config, continues=continues).encode())


def save_final(
    folder: Path, roles: ModelRoles, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor] | None
) -> None:
    """Writes the policy to the root of ``folder``, each file completely or not at all. Its manifest also lists
    finished.json, so that the policy is never taken for that of a later end of the run."""
    with written_into(folder) as temporary:
        save_policy(roles, tokenizer, temporary, weights)
        shutil.copyfile(folder / FINISHED, temporary / FINISHED)
        write_card(temporary, folder)


def save_final_critic(folder: Path, roles: ModelRoles, weights: Mapping[str, Tensor] | None) -> None:
    """Writes the critic to its own folder in ``folder``, completely or not at all."""
    with atomic_folder(folder / CRITIC) as temporary:
        save_critic(roles, temporary, weights)
        write_card(temporary, folder, role="critic")
