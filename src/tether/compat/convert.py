"""Converts a configuration or launch of one system to that of another: ``tether convert``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tether.compat import llamafactory, openrlhf, trl_arguments, verl
from tether.compat.launch import (
    CLI,
    Launch,
    as_unset,
    config_file,
    flat,
    launcher,
    launches,
    options,
    overrides,
    processes,
)
from tether.compat.translation import OF_ONE_PROCESS, Translation
from tether.config import text
from tether.config.launched import num_processes, planned
from tether.config.load import checked_config, read_file
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError

Target = Literal["tether", "openrlhf", "verl"]
SECTIONS = {"ppo": RunConfig, "reward": RewardStageConfig, "sft": SftStageConfig}


@dataclass(frozen=True)
class Converted:
    """The result of ``convert``."""

    text: str
    """The new file."""
    translation: Translation | None
    """How their settings became ours; None if the file was ours."""


def convert(path: str | Path, to: Target, output: str | Path) -> Converted:
    """The file, written for another system.

    Args:
        path: our YAML, LLaMA-Factory's or verl's, or a script or list of arguments that launches OpenRLHF, verl,
            LLaMA-Factory or TRL's PPO.
        output: path of the new file, for the command in its first line.

    Raises:
        ConfigError: it is none of these, or one of its settings has no counterpart in the other system.
    """
    command, translation = _read(path)
    if translation is None:
        config = checked_config(_data(path), source=str(path), origins={})
        if to == "tether":
            raise ConfigError(f"{path} is already Tether's; wanted a file of another system, or --to openrlhf or verl")
    else:
        config = translation.checked(SECTIONS[command])
        if to == "tether":
            return Converted(translation.yaml(f"tether {command} {output}", config), translation)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path}: {to} has no launch for {command}, only for PPO runs; use --to tether")
    writer = {"openrlhf": openrlhf, "verl": verl}[to]
    return Converted(writer.launch(config, source=str(path)), translation)


def _read(path: str | Path) -> tuple[str, Translation | None]:
    """Our command, and the translation; None for a file in our own format."""
    data, source = _data(path), str(path)
    if llamafactory.recognised(data):
        command, translation = llamafactory.translated(source, data, {}, to_file=True)
        return command, translation if num_processes() > 1 else translation.noting(OF_ONE_PROCESS)
    if isinstance(data, dict):
        settings = flat(data)
        if any(key.startswith("actor_rollout_ref.") for key in settings):
            return "ppo", verl.translated(source, settings)
        return "ppo", None
    others = []
    for launch in launches(read_file(path), source):
        command, translation = "ppo", None
        if _is_llamafactory(launch):
            command, translation = _of_llamafactory(launch, Path(path))
        else:
            translation = _launched(launch, Path(path))
        if translation is not None:
            return command, replace(translation, notes=[*translation.notes, *launch.notes])
        if any(word.startswith("--") for word in launch.words):
            others.append(f"line {launch.line} ({launch.program[:60]})")
    seen = f"; got {', '.join(others[:3])}" if others else ""
    raise ConfigError(
        f"{path}: wanted our YAML, LLaMA-Factory's or verl's, or a script that launches OpenRLHF, verl, LLaMA-Factory "
        f"or TRL's PPO{seen}"
    )


def _data(path: str | Path) -> Any:
    """The file as YAML; None if it is not YAML, such as a script."""
    try:
        return text.parse(read_file(path)).data
    except text.TextError as error:
        if Path(path).suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(f"{path}, line {error.line}: {error}") from error
        return None


def _is_llamafactory(launch: Launch) -> bool:
    """Whether a command line starts a training run of LLaMA-Factory, by its command or its script."""
    words = [*launch.program.split(), *launch.words]
    starts = any(Path(word).name in CLI for word in words) and "train" in words
    scripts = ("src/train.py", "src/train_bash.py", "llamafactory.launcher")
    has_stage = any(word.partition("=")[0] == "--stage" for word in launch.words)
    own = has_stage and any(Path(word).name in ("train.py", "train_bash.py") for word in words)
    return starts or own or any(word.endswith(scripts) for word in words)


def _of_llamafactory(launch: Launch, script: Path) -> tuple[str, Translation]:
    """Our command for a launch of LLaMA-Factory, from a YAML file and ``key=value``, or from options."""
    where = f"{script}, line {launch.line}"
    words = [*launch.program.split(), *launch.words]
    programs = ("train.py", "train_bash.py", "llamafactory.launcher")
    begin = next(i for i, word in enumerate(words) if word == "train" or word.endswith(programs))
    words = words[begin + 1 :]
    file = next((word for word in words[:1] if word.endswith((".yaml", ".yml", ".json"))), None)
    if file is None:
        given = options(words, where)
    else:
        given = _beside(file, script, where, "LLaMA-Factory", launch.files) | overrides(words[1:], where)
    count = _processes(launch, script)
    with planned(count or 1):
        command, translation = llamafactory.translated(where, given, {}, to_file=True)
    return command, translation if count is not None and count > 1 else translation.noting(OF_ONE_PROCESS)


def _processes(launch: Launch, script: Path) -> int | None:
    """As ``processes``, with the file that accelerate is given, if it is there."""
    file = config_file(launch)
    found = None if file is None else _place(file, script)
    settings = None if file is None else _written(launch.files, file) if found is None else _data(found)
    return processes(launch, settings if isinstance(settings, dict) else None)


def _place(file: str, script: Path) -> Path | None:
    """Where a file is that a script names: in the current folder or beside the script."""
    return next((place for place in (Path(file), script.parent / file) if place.is_file()), None)


def _written(files: Mapping[str, str], file: str) -> Any:
    """What a script itself has written to a file; None if it has not, or it is not YAML."""
    try:
        data = text.parse(files.get(file, "")).data
    except text.TextError:
        return None
    return {key: as_unset(value) for key, value in data.items()} if isinstance(data, dict) else None


def _beside(file: str, script: Path, where: str, system: str, files: Mapping[str, str]) -> dict[str, Any]:
    """The keys and values of a YAML file that a launch names.

    Args:
        where: place of the launch, for messages.
        system: whose file it is, for messages.
        files: what the script writes itself.
    """
    found, own = _place(file, script), _written(files, file)
    if isinstance(own, dict):
        return own
    if found is None:
        raise ConfigError(f"{where}: there is no file {file}, in the current folder or beside the script")
    given = _data(found)
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {found} holds no keys and values; wanted a file of {system}")
    return given


def _is_verl(launch: Launch) -> bool:
    """Whether a command line starts a PPO run of verl, by its module or by its keys."""
    modules = {launch.program.split()[i + 1] for i, word in enumerate(launch.program.split()[:-1]) if word == "-m"}
    return any(name.startswith("verl.") and "ppo" in name for name in modules) or any(
        word.lstrip("+~").startswith("actor_rollout_ref.") for word in launch.words
    )


def _launched(launch: Launch, path: Path) -> Translation | None:
    """The run that a command line of the script ``path`` starts, if its system is supported."""
    source = str(path)
    if _is_verl(launch):
        named = re.search(r"--config(?:-name)?[ =](?!ppo_trainer(?:\.yaml)?(?: |$))(\S+)", " ".join(launch.words))
        return verl.translated(source, overrides(launch.words, source), file=None if named is None else named[1])
    if not any(word.startswith("--") for word in launch.words):
        return None
    given = options(launch.words, source)
    module = re.search(r"openrlhf\.cli\.(\w+)", launch.program)
    if module is not None and not module[1].startswith("train_ppo"):
        return None
    if module is not None or {"actor.model_name_or_path", "pretrain"} & given.keys():
        return openrlhf.translated(source, given)
    script = re.split(r"[/ ]", launch.program)[-1]
    if script.startswith("ppo") or {"sft_model_path", "reward_model_path"} & given.keys():
        if isinstance(file := given.pop("config", None), str):  # of TrlParser; options take precedence
            given = _beside(file, path, f"{source}, line {launch.line}", "TRL", launch.files) | given
        words = [*launch.program.split(), *launch.words]  # a launcher's options may stand before the script
        script = next((word for word in words if word.endswith(".py")), "")
        translation = trl_arguments.translated(source, given, script, _processes(launch, path))
        how = launcher(launch)
        return translation if how is None else translation.noting(f"Started the same way: {how} -m tether ppo FILE")
    return None
