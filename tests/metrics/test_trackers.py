"""Trackers: what is sent, what is refused before a run, and what a failure may do."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from tether.errors import ConfigError
from tether.metrics import trackers as module
from tether.metrics.trackers import Trackers, check_report_to

CONFIG = {"ppo": {"kl_coef": 0.05, "kl_target": None}, "rewards": [{"type": "model"}], "output_dir": Path("runs/first")}


class FakeTracker(GeneralTracker):
    name = "fake"
    requires_logging_directory = False

    def __init__(self, *args, fails_at: str = "", **kwargs):
        super().__init__()
        self.made_with, self.fails_at, self.calls = (args, kwargs), fails_at, []

    @property
    def tracker(self):
        return SimpleNamespace(set_name=lambda name: self.record("name", name))

    def record(self, what, *values):
        self.calls.append((what, *values))
        if what == self.fails_at:
            raise RuntimeError("connection lost")

    def start(self):
        self.record("start")

    def store_init_configuration(self, values):
        self.record("config", values)

    def log(self, values, step=None, **kwargs):
        self.record("log", values, step)

    def finish(self):
        self.record("finish")


class OtherTracker(FakeTracker):
    name = "other"


@pytest.fixture
def installed(monkeypatch):
    """Makes built-in trackers look installed, each a fake; returns those that were made."""
    made = []

    def install(*names):
        for name in names:
            needs_directory = tracking.LOGGER_TYPE_TO_CLASS[name].requires_logging_directory

            class Fake(FakeTracker):
                requires_logging_directory = needs_directory

                def __init__(self, *args, **kwargs):
                    super().__init__(*args, **kwargs)
                    made.append(self)

            Fake.name = name
            monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, Fake)
        monkeypatch.setattr(module, "get_available_trackers", lambda: list(names))
        return made

    return install


def trackers(report_to, tmp_path, config=CONFIG):
    return Trackers(report_to, "runs/first", tmp_path, config)


def test_a_tracker_gets_configuration_metrics_and_an_end(tmp_path):
    fake = FakeTracker()
    both = trackers([fake], tmp_path)
    both.log({"objective/kl": 0.5}, 3)
    both.close()
    both.close()
    assert fake.calls == [
        ("start",),
        ("config", {"ppo.kl_coef": 0.05, "rewards.0.type": "model", "output_dir": "runs/first"}),
        ("log", {"objective/kl": 0.5}, 3),
        ("finish",),
    ]


@pytest.mark.parametrize("report_to", ["none", [], ["none"]])
def test_none_starts_nothing_whatever_is_installed(report_to, tmp_path, installed):
    made = installed("tensorboard", "wandb")
    nothing = trackers(report_to, tmp_path)
    nothing.log({"x": 1.0}, 1)
    nothing.close()
    assert made == [] and list(tmp_path.iterdir()) == []


def test_all_starts_everything_installed(tmp_path, installed):
    made = installed("tensorboard", "wandb")
    trackers("all", tmp_path)
    assert [tracker.name for tracker in made] == ["tensorboard", "wandb"]


def test_a_tracker_named_twice_starts_once(tmp_path, installed):
    made = installed("wandb")
    trackers(["wandb", "wandb"], tmp_path)
    assert len(made) == 1


def test_names_and_folders_that_trackers_are_made_with(tmp_path, installed, monkeypatch):
    for variable in ("WANDB_PROJECT", "TRACKIO_PROJECT", "COMET_PROJECT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SWANLAB_PROJECT", "mine")
    monkeypatch.setenv("CLEARML_PROJECT", "ours")
    made = installed("tensorboard", "wandb", "trackio", "swanlab", "mlflow", "clearml", "comet_ml")
    trackers("all", tmp_path)
    assert {tracker.name: tracker.made_with for tracker in made} == {
        "tensorboard": (("first", str(tmp_path)), {}),
        "wandb": (("tether",), {"name": "runs/first"}),
        "trackio": (("tether",), {"name": "runs/first"}),
        "swanlab": (("mine",), {"experiment_name": "runs/first"}),
        "mlflow": (("tether",), {"run_name": "runs/first"}),
        "clearml": (("runs/first",), {"project_name": "ours"}),
        "comet_ml": (("tether",), {}),
    }
    assert made[-1].calls[1] == ("name", "runs/first")


def test_comet_s_project_comes_from_the_environment_and_its_run_has_the_run_s_name(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("COMET_PROJECT_NAME", "ours")
    made = installed("comet_ml")
    trackers("comet_ml", tmp_path)
    (comet,) = made
    assert comet.made_with == (("ours",), {})
    assert [what for what, *_ in comet.calls] == ["start", "name", "config"]


def test_the_classes_of_accelerate_take_what_they_are_made_with(tmp_path):
    for name in tracking.LOGGER_TYPE_TO_CLASS:
        assert module._made(name, "runs/first", tmp_path).name == name


@pytest.mark.parametrize(
    ("report_to", "present", "message"),
    [
        ("tensorboard", (), "train.report_to: tensorboard is not installed: pip install tensorboard, or set none"),
        (["wandb", "comet_ml"], ("wandb",), "comet_ml is not installed: pip install comet-ml"),
        ("all", (), "no tracker is installed: pip install tensorboard"),
        ("tensorbord", (), "unknown tracker 'tensorbord'; choose among none, all, .*tensorboard"),
        (["none", "wandb"], ("wandb",), "none cannot be combined with others, got none, wandb"),
        (["wandb", "all"], ("wandb",), "all cannot be combined"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_starts(report_to, present, message, tmp_path, installed):
    made = installed(*present)
    with pytest.raises(ConfigError, match=message):
        check_report_to(report_to)
    with pytest.raises(ConfigError, match=message):
        trackers(report_to, tmp_path)
    assert made == []


@pytest.mark.parametrize("moment", ["start", "config"])
def test_a_tracker_that_does_not_start_fails_the_run_and_ends_the_others(moment, tmp_path):
    first, second = FakeTracker(), OtherTracker(fails_at=moment)
    with pytest.raises(ConfigError, match=r"train\.report_to: other did not start \(RuntimeError: connection lost\)"):
        trackers([first, second], tmp_path)
    assert first.calls[-1] == ("finish",)


def test_a_tracker_that_fails_later_warns_once_and_the_others_go_on(tmp_path, caplog):
    bad, good = FakeTracker(fails_at="log"), OtherTracker()
    both = trackers([bad, good], tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            both.log({"x": 1.0}, step)
        both.close()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["fake failed"]
    assert [call[2] for call in good.calls if call[0] == "log"] == [1, 2, 3]
    assert [call[2] for call in bad.calls if call[0] == "log"] == [1, 2, 3]  # it may recover
    assert bad.calls[-1] == good.calls[-1] == ("finish",)


def test_a_failure_at_the_end_warns_and_is_not_raised(tmp_path, caplog):
    bad = FakeTracker(fails_at="finish")
    with caplog.at_level(logging.WARNING):
        trackers([bad], tmp_path).close()
    assert "connection lost" in caplog.text


def test_a_tracker_cannot_change_the_metrics_of_the_run(tmp_path):
    class Greedy(FakeTracker):
        def log(self, values, step=None, **kwargs):
            values.clear()

    metrics = {"x": 1.0}
    trackers([Greedy()], tmp_path).log(metrics, 1)
    assert metrics == {"x": 1.0}
