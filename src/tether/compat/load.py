"""Loads a configuration file in either format: ours, or LLaMA-Factory's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tether.compat import llamafactory
from tether.compat.llamafactory_keys import KNOWN
from tether.compat.translation import Translation
from tether.config import pipeline, text
from tether.config.base import Section
from tether.config.load import at_home, load_config, override_pairs, read_file
from tether.errors import ConfigError

S = TypeVar("S", bound=Section)


def load_any(
    path: str | Path, overrides: Sequence[str], section: type[S], command: str
) -> tuple[S, Translation | None]:
    """The configuration of a file, and its translation if it is not in our format.

    Args:
        overrides: command-line arguments, ``--key=value`` or ``--key value``, in the file's keys or in ours.
        section: class of the whole file.
        command: the command that needs it, such as ``ppo``.

    Raises:
        ConfigError: names every problem at once; or the file is for another command.
    """
    if Path(path).suffix in (".sh", ".bash") and Path(path).is_file():
        raise ConfigError(
            f"{path} is a script, wanted a YAML file: `tether convert {path} --to tether -o run.yaml` reads launches "
            "of other systems"
        )
    document = _document(path)
    if document is not None and pipeline.recognised(document.data):
        raise ConfigError(
            f"{path} describes the stages of a pipeline; wanted only the keys of `tether {command}`: "
            f"`tether pipeline {path}` runs it, and each stage then has a config.yaml of its own in its folder"
        )
    if document is None or not llamafactory.recognised(document.data):
        return load_config(path, overrides, section), None
    given = dict(document.data)
    origins = {key: f"line {document.lines[(key,)]}" for key in given}
    ours = []
    for name, value in override_pairs(overrides):
        if name in KNOWN or ("." not in name and name not in section.model_fields):
            given[name], origins[name] = _value(name, value), f"--{name}"
        else:
            ours.append(f"--{name}={value}")
    wanted, translation = llamafactory.translated(str(path), at_home(given), origins)
    if wanted != command:
        raise ConfigError(f"{path}: stage {given.get('stage', 'sft')} is run by `tether {wanted} {path}`")
    return translation.checked(section, ours), translation


def check_pipeline(path: str | Path) -> None:
    """Raises ``ConfigError`` if the file is LLaMA-Factory's, which describes a single stage."""
    document = _document(path)
    if document is not None and llamafactory.recognised(document.data):
        command = llamafactory.STAGES.get(str(document.data.get("stage")), "sft")
        raise ConfigError(
            f"{path} describes one stage, in LLaMA-Factory's keys: `tether {command} {path}` runs it, and `tether "
            f"convert {path} --to tether -o OUT.yaml` writes it as YAML that can be a section of a pipeline"
        )


def _document(path: str | Path) -> text.Document | None:
    """The file's content; None if it is not valid YAML, which ``load_config`` then reports."""
    try:
        return text.parse(read_file(path))
    except text.TextError:
        return None


def _value(name: str, value: str) -> Any:
    try:
        return text.parse(value).data
    except text.TextError as error:
        raise ConfigError(f"--{name}: {value!r} is not a YAML value: {error}") from error
