"""Experiment trackers (TensorBoard, Weights & Biases, Trackio, …) through Accelerate's tracker classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from tether.config.schema import RunConfig
from tether.config.secrets import without_keys
from tether.config.stage import StageConfig
from tether.errors import ConfigError

logger = logging.getLogger(__name__)

KEY = "train.report_to"
LOGS = "logs"
"""The folder in a run's folder for trackers that write files."""
DEFAULT_PROJECT = "tether"
RUN_NAME_ARGUMENTS = {"wandb": "name", "trackio": "name", "swanlab": "experiment_name", "mlflow": "run_name"}
"""Trackers whose first argument is a project, with their argument for the run's name, which others take first."""
COMET, CLEARML = "comet_ml", "clearml"
"""Trackers that also have projects, and would otherwise create one for every run."""
PROJECT_VARIABLES = {COMET: "COMET_PROJECT_NAME"}
"""Environment variables that name the project, if not NAME_PROJECT."""

Tracker = str | GeneralTracker
"""A tracker by name, or one created by the caller."""


class Trackers:
    """Sends metrics to the trackers that ``report_to`` names. With ``none`` every call does nothing.

    A tracker that cannot start fails the run; one that fails later warns once, and training continues. Only the main
    process may create an instance with trackers.

    Args:
        report_to: ``none``, ``all`` (every installed one), a name or a list of names; a list may hold tracker objects.
        run_name: name of the run. For trackers with projects, the project is the environment's ``WANDB_PROJECT``,
            ``TRACKIO_PROJECT``, ``SWANLAB_PROJECT``, ``CLEARML_PROJECT`` or ``COMET_PROJECT_NAME``, else ``tether``.
        logging_dir: folder for trackers that write files.
        config: the run's configuration, stored under dotted names.

    Raises:
        ConfigError: as in ``check_report_to``, or a tracker did not start.
    """

    def __init__(
        self, report_to: Tracker | Sequence[Tracker], run_name: str, logging_dir: Path, config: Mapping[str, Any]
    ) -> None:
        self._trackers: list[GeneralTracker] = []
        self._failed: set[str] = set()
        check_report_to(report_to)
        for tracker in _chosen(report_to):
            try:
                self._start(tracker, run_name, logging_dir, _flat(config))
            except Exception as error:  # whatever a tracking library raises
                self.close()
                name = tracker if isinstance(tracker, str) else tracker.name
                raise ConfigError(
                    f"{KEY}: {name} did not start ({type(error).__name__}: {error}); fix that, remove {name} from "
                    f"{KEY}, or set it to none"
                ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of one update."""
        for tracker in self._trackers:
            self._attempt(tracker, lambda tracker=tracker: tracker.log(dict(metrics), step=step))

    def close(self) -> None:
        """Lets every tracker send its pending data. May be called twice."""
        while self._trackers:
            tracker = self._trackers.pop()
            self._attempt(tracker, tracker.finish)

    def _start(self, tracker: Tracker, run_name: str, logging_dir: Path, config: dict[str, Any]) -> None:
        started = _made(tracker, run_name, logging_dir) if isinstance(tracker, str) else tracker
        started.start()
        self._trackers.append(started)
        if tracker == COMET:  # Accelerate's class takes only the project
            started.tracker.set_name(run_name)
        started.store_init_configuration(config)

    def _attempt(self, tracker: GeneralTracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker raises must not end a run that trains well
            if tracker.name not in self._failed:
                self._failed.add(tracker.name)
                logger.warning(
                    "%s failed (%s: %s); training continues, metrics.jsonl has every update, and further failures of "
                    "%s are not reported", tracker.name, type(error).__name__, error, tracker.name
                )  # fmt: skip


def trackers_of(config: RunConfig | StageConfig, *, is_main: bool) -> Trackers:
    """The trackers that a run's configuration names; none in any but the main process."""
    folder, train = config.output_dir, config.train
    return Trackers(
        train.report_to if is_main else "none",
        run_name=train.run_name or folder.name,
        logging_dir=folder / LOGS,
        config=without_keys(config.model_dump(mode="json")),
    )


def check_report_to(report_to: Tracker | Sequence[Tracker]) -> None:
    """Raises ``ConfigError`` if a tracker is unknown or not installed; cheap enough to run before any model is
    loaded."""
    names = _names(report_to)
    installed = [str(name) for name in get_available_trackers()]
    known = [name for name in LoggerType.list() if name != "all"]
    for special in ("none", "all"):
        if special in names and len(names) > 1:
            raise ConfigError(f"{KEY}: {special} cannot be combined with others, got {', '.join(map(str, names))}")
    if "all" in names and not installed:
        raise ConfigError(f"{KEY}: all, but no tracker is installed: pip install tensorboard, for example, or set none")
    for name in names:
        if not isinstance(name, str) or name in ("none", "all"):
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"{KEY}: unknown tracker {name!r}; choose among none, all, {', '.join(known)}")
        if name in known and name not in installed:
            raise ConfigError(f"{KEY}: {name} is not installed: pip install {name.replace('_', '-')}, or set none")


def _names(report_to: Tracker | Sequence[Tracker]) -> list[Tracker]:
    return [report_to] if isinstance(report_to, str | GeneralTracker) else list(report_to)


def _chosen(report_to: Tracker | Sequence[Tracker]) -> list[Tracker]:
    """The trackers to start, each once."""
    names = list(dict.fromkeys(_names(report_to)))
    if names == ["all"]:
        return [str(name) for name in get_available_trackers()]
    return [name for name in names if name != "none"]


def _made(name: str, run_name: str, logging_dir: Path) -> GeneralTracker:
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    project = os.environ.get(PROJECT_VARIABLES.get(name, f"{name.upper()}_PROJECT")) or DEFAULT_PROJECT
    if name == COMET:
        return tracker_class(project)
    if name == CLEARML:
        return tracker_class(run_name, project_name=project)
    if name in RUN_NAME_ARGUMENTS:
        return tracker_class(project, **{RUN_NAME_ARGUMENTS[name]: run_name})
    if tracker_class.requires_logging_directory:
        # The name becomes a folder in logging_dir: a run named after its output path must not lead out of it.
        return tracker_class(Path(run_name).name, str(logging_dir))
    return tracker_class(run_name)


def _flat(config: Any, name: str = "") -> dict[str, bool | int | float | str]:
    """Nested mappings and lists under dotted names; values other than numbers and text become text, None is dropped."""
    if isinstance(config, Mapping | list | tuple):
        items = config.items() if isinstance(config, Mapping) else enumerate(config)
        parts = [_flat(value, f"{name}.{key}" if name else str(key)) for key, value in items]
        return {key: value for part in parts for key, value in part.items()}
    if config is None:
        return {}
    return {name: config if isinstance(config, bool | int | float | str) else str(config)}
