"""Every key of ``tether pipeline``: what its stages share, and a section for each with the keys of its own command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from tether.config import text
from tether.config.base import OutputDir, Section, Seed
from tether.config.chat import DataKeys
from tether.config.load import checked_config, override_pairs, read_file
from tether.config.model import LoraConfig, ModelConfig
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError

STAGES: dict[str, type[Section]] = {"sft": SftStageConfig, "reward": RewardStageConfig, "ppo": RunConfig}
"""The stages in their order, with the keys of each."""
_OWN = ("output_dir", "overwrite_output_dir", "resume")


class PipelineConfig(Section):
    """Keys that the stages of a pipeline share."""

    model: ModelConfig
    """The model that the first stage starts from. A stage may change any of these keys in its own section; ``lora:
    null`` there trains all weights."""
    data: DataKeys = DataKeys()
    """How every stage reads its data. A stage may change any of these keys in its own section."""
    sft: dict[str, Any] | None = None
    """Keys of `tether sft`."""
    reward: dict[str, Any] | None = None
    """Keys of `tether reward`. Starts from the result of sft."""
    ppo: dict[str, Any] | None = None
    """Keys of `tether ppo`. Starts from the result of sft, and is judged by the result of reward unless it has
    ``rewards`` of its own."""
    seed: Seed = 42
    """``train.seed`` of every stage."""
    output_dir: OutputDir
    """Folder for the stages' folders: ``sft``, ``reward`` and ``ppo``."""
    overwrite_output_dir: bool = False
    """Run all stages again. If false, finished stages are skipped, and an unfinished one continues."""

    @property
    def stages(self) -> list[str]:
        """The stages that the file has, in their order."""
        return [name for name in STAGES if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _check_stages(self) -> PipelineConfig:
        if len(self.stages) < 2:
            got = self.stages[0] if self.stages else "none"
            raise ValueError(f"wanted at least two of the sections {', '.join(STAGES)}, got {got}")
        for name in self.stages:
            for key in _OWN:
                if key in getattr(self, name):
                    raise ValueError(f"{name}.{key}: the pipeline's own {key} applies to every stage; leave it out")
        return self


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, each stage with its whole configuration."""

    shared: PipelineConfig
    stages: Mapping[str, Section]
    """Configuration of each stage by name, in their order."""


def recognised(data: Any) -> bool:
    """Whether the data of a file are a pipeline's: sections of several stages, one of which no stage has itself."""
    return isinstance(data, dict) and len(STAGES.keys() & data.keys()) > 1 and bool({"sft", "reward"} & data.keys())


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline that a file describes; what a stage leaves out comes from the stages before it.

    Args:
        overrides: command-line arguments, as in ``load_config``: ``--ppo.train.max_steps=10``.

    Raises:
        ConfigError: names every problem of the shared keys, or else of the first stage that has some.
    """
    try:
        document = text.parse(read_file(path))
    except text.TextError as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from error
    lines = {key: f"line {line}" for key, line in document.lines.items()}
    own: dict[str, list[str]] = {name: [] for name in (*STAGES, "")}
    for name, value in override_pairs(overrides):
        if name == "resume":
            raise ConfigError("--resume: leave it out; a pipeline resumes by itself where it was stopped")
        stage, _, key = name.partition(".")
        is_own = stage in STAGES and key and key not in _OWN
        own[stage if is_own else ""].append(f"--{key if is_own else name}={value}")
    shared = checked_config(document.data, PipelineConfig, overrides=own[""], source=str(path), origins=lines)
    stages: dict[str, Section] = {}
    for name in shared.stages:
        origins = {key[1:]: line for key, line in lines.items() if key[0] == name and len(key) > 1}
        source = f"{path}, section {name}"

        def checked(
            data: dict[str, Any], name: str = name, source: str = source, origins: dict[text.Path, str] = origins
        ) -> Section:
            of_stage = {"overrides": own[name], "source": source, "origins": origins, "within": f"{name}."}
            return checked_config(data, STAGES[name], **of_stage)

        data = _composed(name, shared, stages)
        config = checked(data)
        if name == "ppo" and "reward" in stages and "rewards" not in shared.ppo and _shares_base(stages, config):
            config = checked(data | {"rewards": [{"type": "adapter", "path": data["rewards"][0]["path"]}]})
        _check_continued(name, config, stages)
        stages[name] = config
    return Pipeline(shared, stages)


def _composed(name: str, shared: PipelineConfig, before: Mapping[str, Section]) -> dict[str, Any]:
    """The section of a stage, with everything that it leaves out."""
    given = getattr(shared, name)
    model = shared.model.model_dump(mode="json", exclude_unset=True)
    start = str(before["sft"].output_dir) if "sft" in before else model["path"]
    own = given.get("model") or {}
    path = own.get("path", start) if isinstance(own, dict) else start
    if path != model["path"]:
        model.pop("revision", None)
    common = {
        "model": model | {"path": path},
        "data": shared.data.model_dump(mode="json", exclude_unset=True),
        "train": {"seed": shared.seed},
    }
    joined = {key: _joined(value, given[key]) if key in given else value for key, value in common.items()}
    judge = {"rewards": [_judge(before["reward"])]} if name == "ppo" and "reward" in before else {}
    return judge | given | joined | {"output_dir": str(shared.output_dir / name)}


def _judge(reward: Section) -> dict[str, Any]:
    """The result of reward as a reward source, with its code if that may run."""
    code = {"trust_remote_code": True} if reward.model.trust_remote_code else {}
    return {"type": "model", "path": str(reward.output_dir)} | code


def _joined(common: dict[str, Any], given: Any) -> Any:
    return common | given if isinstance(given, dict) else given


def _shares_base(stages: Mapping[str, Section], ppo: RunConfig) -> bool:
    """Whether the reward adapter sits on the policy's own base, as both started from one model with LoRA."""
    reward = stages["reward"].model
    return reward.lora is not None and ppo.model.lora is not None and reward.path == ppo.model.path


def _check_continued(name: str, config: Section, before: Mapping[str, Section]) -> None:
    """Raises ``ConfigError`` if a stage asks for a different adapter than that of sft, which it continues."""
    sft = before.get("sft")
    if sft is None or sft.model.lora is None or config.model.lora is None:
        return
    if config.model.path != str(sft.output_dir):
        return
    for key in LoraConfig.model_fields:
        wanted, got = getattr(config.model.lora, key), getattr(sft.model.lora, key)
        if key in config.model.lora.model_fields_set and wanted != got:
            raise ConfigError(
                f"{name}.model.lora.{key}: {wanted}, but {name} continues the adapter of sft, which has {got}; "
                "leave it out, or let sft train all weights (sft.model.lora: null)"
            )
