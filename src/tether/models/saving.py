"""Saves roles as folders that load without Tether, each written completely or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from tether.config.places import why_not_there
from tether.errors import CheckpointError, ConfigError, ModelError
from tether.models.adapters import (
    DEFAULT,
    MODULE_PREFIX,
    adapter_parameters,
    changed_config,
    place_adapter,
    read_adapter,
)
from tether.models.build import pad_as
from tether.models.classifiers import classifier_on, load_merged_classifier
from tether.models.heads import BESIDE_ADAPTER, VALUE_HEAD_FILES, value_head_file
from tether.models.loading import load_causal_lm
from tether.models.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_model_path, is_adapter, model_errors
from tether.models.preprocessing import read_processor, write_processor
from tether.models.roles import POLICY, VALUE, ModelRoles
from tether.models.tokenizer import load_generation_config, load_tokenizer

MANIFEST = "manifest.json"
FINAL, TRIAL = "final.tmp", "save-trial.tmp"
"""Folder whose files are then moved to the run's own folder, and folder written to test whether saving works."""
DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Error numbers of a disk that cannot be written to any more."""


@contextmanager
def may_run_out(folder: Path, way_on: Callable[[], str]) -> Iterator[None]:
    """Within this context, errors of a disk that is full or broken become a message.

    Args:
        folder: where files are written.
        way_on: returns a sentence on how to go on.

    Raises:
        CheckpointError: the disk cannot be written to any more.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_of_disk(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{folder} can no longer be written to: {reason}. {way_on()}") from error


def _is_of_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in DISK_TROUBLE
    return isinstance(error, SafetensorError) or "inline_container" in str(error)  # the writer of torch.save


def policy_weights(roles: ModelRoles) -> dict[str, Tensor]:
    """The tensors that ``save_policy`` writes, by their names in the live policy."""
    policy = roles.policy
    if isinstance(policy, PeftModel):
        return adapter_tensors(policy, roles.policy_adapter)
    return policy.state_dict(keep_vars=True)


def base_weights(roles: ModelRoles) -> dict[str, Tensor]:
    """The live policy's weights without any adapter, under the names that they have in a saved model; a tensor with
    several names under the first."""
    model, adapted = roles.role(POLICY).model, roles.policy
    seen: set[int] = set()
    if isinstance(adapted, PeftModel):
        seen = {id(p) for name in adapted.peft_config for p in adapter_parameters(adapted, name).values()}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[name.replace(".base_layer.", ".")] = tensor.detach()
            seen.add(id(tensor))
    return revert_weight_conversion(model, tensors)


def save_adapter(roles: ModelRoles, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes the policy's adapter as PEFT does, at the root of ``folder``.

    Args:
        weights: as for ``save_policy``.
    """
    folder, given = Path(folder), {} if weights is None else {"state_dict": dict(weights)}
    # "auto" would query the hub for the base's vocabulary size, which never changes here.
    roles.policy.save_pretrained(
        folder, selected_adapters=[roles.policy_adapter], save_embedding_layers=False, **given
    )
    if roles.policy_adapter != DEFAULT:  # PEFT saves it in a subfolder with the adapter's name
        for file in (folder / roles.policy_adapter).iterdir():
            file.replace(folder / file.name)
        (folder / roles.policy_adapter).rmdir()


def save_policy(
    roles: ModelRoles,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the policy as a plain transformers folder, or as a PEFT adapter if it is one, without any value head.

    Also writes the tokenizer with its chat template, the generation config, and for a full multimodal model the files
    of its processor. Does not use the network.

    Args:
        weights: values of ``policy_weights`` if an engine has sharded them; those of the live model otherwise.

    Raises:
        ConfigError: ``folder`` is a file, or cannot be made.
    """
    check_can_be_made(Path(folder), "output folder")
    folder, policy = Path(folder), roles.policy
    if isinstance(policy, PeftModel):
        save_adapter(roles, folder, weights)
        policy.generation_config.save_pretrained(folder)
    else:
        policy.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
    tokenizer.save_pretrained(folder)
    write_processor(roles.processor, folder)


def load_policy(roles: ModelRoles, folder: Path | str, *, trust_remote_code: bool = False) -> None:
    """Loads weights into the policy that ``save_policy`` wrote to ``folder`` with the same configuration.

    Args:
        trust_remote_code: whether to run code that comes with the policy.

    Raises:
        ModelError: the folder holds another kind of policy, or weights that do not fit.
    """
    policy, path = roles.policy, str(folder)
    if isinstance(policy, PeftModel):
        if not is_adapter(path):
            raise ModelError(f"{folder}: got a full model; the run that it belongs to trains an adapter")
        place_adapter(policy, DEFAULT, read_adapter(path))
    elif is_adapter(path):
        raise ModelError(f"{folder}: got an adapter; the run that it belongs to trains a full model")
    else:
        saved = load_causal_lm(path, dtype=policy.dtype, trust_remote_code=trust_remote_code)
        with model_errors(path):
            policy.load_state_dict(saved.state_dict())


def critic_weights(roles: ModelRoles) -> dict[str, Tensor]:
    """The tensors that ``save_critic`` writes, by their names in the live model; the head's are under ``score``."""
    critic = roles.role(VALUE)
    head = {f"score.{name}": tensor for name, tensor in critic.head.state_dict(keep_vars=True).items()}
    if critic.adapter is not None:
        return adapter_tensors(roles.policy, critic.adapter) | head
    of_model, trunk = critic.model.state_dict(keep_vars=True), f"{critic.model.base_model_prefix}."
    return {name: tensor for name, tensor in of_model.items() if name.startswith(trunk)} | head


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Parameters of one adapter, and all buffers, as some may belong to it."""
    own, tensors = adapter_parameters(model, adapter), model.state_dict(keep_vars=True)
    return {name: x for name, x in tensors.items() if name in own or not isinstance(x, nn.Parameter)}


def save_critic(roles: ModelRoles, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes the critic so that it can initialize another run's critic, or score answers as a reward model.

    A critic with an adapter, its own or the policy's, is saved as a PEFT adapter of a sequence classifier on the
    policy's base. Any other is saved as a sequence classifier, with the policy's trunk if it is a head on the policy.

    Args:
        weights: values of ``critic_weights`` if an engine has sharded them; those of the live model otherwise.

    Raises:
        ConfigError: ``folder`` is a file, or cannot be made.
    """
    check_can_be_made(Path(folder), "output folder")
    folder, given = Path(folder), {} if weights is None else {"state_dict": dict(weights)}
    folder.mkdir(parents=True, exist_ok=True)
    critic = roles.role(VALUE)
    if critic.adapter is not None:
        _save_reward_adapter(roles, folder, **given)
    elif critic.model is roles.role(POLICY).model:
        classifier = classifier_on(critic.model)
        classifier.score = critic.head
        pad_as(classifier, roles.tokenizer)
        classifier.save_pretrained(folder, **given)
    else:
        critic.model.save_pretrained(folder, **given)
    roles.tokenizer.save_pretrained(folder)


def _save_reward_adapter(roles: ModelRoles, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Writes the critic's adapter and head as PEFT saves the adapter of a sequence classifier."""
    critic, adapted = roles.role(VALUE), roles.policy
    tensors = get_peft_model_state_dict(adapted, state_dict, adapter_name=critic.adapter, save_embedding_layers=False)
    head = {f"score.{name}": tensor for name, tensor in critic.head.state_dict().items()}
    if state_dict is not None:
        head = {name: state_dict[name] for name in head}
    tensors |= {f"{MODULE_PREFIX}{name}": tensor for name, tensor in head.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS[0],
        metadata={"format": "pt"},
    )
    settings = adapted.peft_config[critic.adapter]
    changed_config(
        settings,
        task_type="SEQ_CLS",
        modules_to_save=[*(getattr(settings, "modules_to_save", None) or ()), "score"],
        base_model_name_or_path=roles.base_source,
        inference_mode=True,
    ).save_pretrained(folder)


def merge_adapter(
    path: str | Path,
    folder: Path | str,
    *,
    trust_remote_code: bool = False,
    also: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Merges the adapter in ``path`` into its base and writes the model, in the base's type, with the tokenizer.

    An adapter of a sequence classifier, of any family, becomes a classifier with the same labels. A value head in a
    file beside the adapter is written to a file beside the model.

    Args:
        trust_remote_code: whether to run code that comes with the base.
        also: writes further files into the folder, such as a model card.

    Raises:
        CheckpointError: the disk has no room for it.
        ConfigError: ``folder`` cannot be made, or exists and is not empty.
        ModelError: ``path`` is not an adapter, or does not fit its base.
    """
    path, folder = str(path), Path(folder)
    check_can_be_made(folder, "output folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"output folder: {folder} already exists; name a folder that is new or empty")
    if not is_adapter(path):
        whole = ". It is a whole model, which needs no merging" if (Path(path) / "config.json").exists() else ""
        raise ModelError(f"{path}: got no {ADAPTER_CONFIG}; wanted the folder of a PEFT adapter{whole}")
    check_model_path(path, "adapter")
    code = {"trust_remote_code": trust_remote_code}
    tokenizer, adapter = load_tokenizer(path, **code), read_adapter(path)
    if adapter.head or adapter.config.task_type == "SEQ_CLS":
        model = load_merged_classifier(path, **code)
        pad_as(model, tokenizer)
    else:
        model = load_causal_lm(path, dtype=None, **code)
        model.generation_config = load_generation_config(path) or model.generation_config  # the end tokens of training
    processor = read_processor(path, model.config)
    again = "Nothing of it was kept: make room there, or name another folder"
    with may_run_out(folder, lambda: again), atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_processor(processor, partial)
        if (head := value_head_file(path)) is not None:  # LLaMA-Factory and TRL save one beside their adapters
            shutil.copy2(head, partial / (VALUE_HEAD_FILES[1] if head.name == BESIDE_ADAPTER else head.name))
        also(partial)


def check_can_be_made(folder: Path, key: str) -> None:
    """Raises ``ConfigError`` if the folder that ``key`` names is a file, or cannot be created or written to."""
    if (why := why_not_there(str(folder))) is not None:
        raise ConfigError(f"{key}: {why}; name another folder")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{key}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"{key}: {nearest} is not writable")


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A new folder to write into. On exit it becomes ``path``, complete and with a manifest; on error it is removed.

    Until then ``path`` does not exist, or is the previous folder, which is then replaced. Unfinished folders of killed
    processes are removed by the next call for the same path.
    """
    path = Path(path).absolute()
    partial, replaced = path.with_name(f".{path.name}.partial"), _replaced(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    put_back(path)
    for leftover in (partial, replaced):
        _remove(leftover)
    partial.mkdir()
    try:
        yield partial
        _write_manifest(partial)
    except BaseException:
        shutil.rmtree(partial)
        raise
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    _remove(replaced)


def put_back(path: Path) -> None:
    """Restores the previous folder at ``path`` if a process was killed while replacing it."""
    replaced = _replaced(path)
    if replaced.is_dir() and not replaced.is_symlink() and not path.exists():
        replaced.rename(path)


def remove_unfinished(folder: Path, is_own: Callable[[str], bool]) -> None:
    """Removes unfinished folders that killed processes left in ``folder``; of links, only the links. A folder that was
    to be replaced, and was not, is restored.

    Args:
        is_own: whether a folder with this name is one that is written there.
    """
    for path in list(folder.glob(".*")):
        name = path.name.removeprefix(".").removesuffix(".partial").removesuffix(".replaced")
        if name == path.name[1:] or not is_own(name):
            continue
        put_back(folder / name)
        _remove(path)
    for name in (FINAL, TRIAL):
        _remove(folder / name)


def _replaced(path: Path) -> Path:
    """Where a replaced folder is kept until its replacement is in place."""
    return path.with_name(f".{path.name}.replaced")


def _remove(path: Path) -> None:
    """Removes a file or folder if it exists; of a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def written_into(folder: Path) -> Iterator[Path]:
    """A new folder to write into, whose files are moved to ``folder`` on exit, each completely or not at all."""
    written = folder / FINAL
    with atomic_folder(written) as temporary:
        yield temporary
    files = [path.relative_to(written) for path in written.rglob("*") if path.is_file()]
    for name in sorted(files, key=lambda name: (name.name == MANIFEST, name)):  # the manifest last
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (written / name).replace(folder / name)
    shutil.rmtree(written)


def verify_manifest(folder: Path | str, *, contents: bool = True) -> None:
    """Checks every file that the folder's manifest lists.

    Args:
        contents: compares the hash of every file, which takes minutes for a large model; otherwise only its size.

    Raises:
        CheckpointError: the manifest or a file is missing, or a file is not as it was written.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing, so the folder was not written completely")
    for name, wanted in _listed(folder).items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != wanted["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, but its manifest says {wanted['bytes']}")
        if contents and _sha256(file) != wanted["sha256"]:
            raise CheckpointError(f"{file} is damaged: its content is not what was written (SHA-256 differs)")


def is_whole(folder: Path | str) -> bool:
    """Whether a folder has a manifest, and every file listed there is as it was written."""
    try:
        verify_manifest(folder)
    except CheckpointError:
        return False
    return True


def files_written(folder: Path | str) -> list[str]:
    """Names of the files that the folder's manifest lists, and the manifest's own; none without a manifest.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    folder = Path(folder)
    return [*_listed(folder), MANIFEST] if (folder / MANIFEST).is_file() else []


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file by name, from the folder's manifest."""
    try:
        files = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
        listed = {name: {"bytes": int(each["bytes"]), "sha256": str(each["sha256"])} for name, each in files.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error}") from error
    for name in listed:  # these files are removed when a run is replaced
        if name.startswith(("/", "\\")) or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / MANIFEST}: lists {name!r}, which is not in the folder")
    return listed


def _write_manifest(folder: Path) -> None:
    """Writes the manifest and flushes every file, so that after the rename each file is certain to be on disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    listed = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": listed}, indent=1) + "\n", encoding="utf-8")
    for file in files:  # safetensors makes its files readable only by their owner, whatever the umask
        file.chmod(manifest.stat().st_mode)
    folders = [folder, *(child for child in folder.rglob("*") if child.is_dir())]
    for entry in [*files, manifest, *folders]:
        _sync(entry)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flushes a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
