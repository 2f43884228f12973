"""A long run whose reward service fails at random in every way: no update lost or doubled, none on a wrong score."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.children import Failed, in_child
from tests.chaos.kills import check_end, end_of
from tests.rewards.services import Close, Flood, Hang, Reply, lengths, local_service
from tests.train.runs import tiny_run
from tether.config.schema import RunConfig
from tether.errors import ConfigError, RewardError
from tether.metrics.writers import read_jsonl
from tether.train.run import train_policy

ANSWERS = 8
FAULTS: tuple[Callable[[int], Any], ...] = (
    lambda n: Reply(b"overloaded", 503),
    lambda n: Reply({"scores": [9.0] * n}, 500),
    lambda n: Reply({"scores": [9.0] * n}, 422),
    lambda n: Reply(b"<html>", 404),
    lambda n: Reply({"scores": [9.0] * (n + 1)}),
    lambda n: Reply({"scores": [9.0] * (n - 1)}),
    lambda n: Reply(b'{"scores": [' + b", ".join([b"NaN"] * n) + b"]}"),
    lambda n: Reply({"scores": ["9"] * n}),
    lambda n: Reply({"scores": [[9.0, None]] * n}),
    lambda n: Reply({"scores": "9"}),
    lambda n: Reply(b'{"scores": [9.0'),
    lambda n: Close(),
    lambda n: Close(),
    lambda n: Hang(),
    lambda n: Flood(),
)


class Faulty:
    """Scores by length; some calls, after the first ones, get a fault in place of it."""

    def __init__(self, seed: int, share: float) -> None:
        self.draw, self.share, self.calls, self.faults = random.Random(seed), share, 0, 0

    def __call__(self, payload: Any) -> Any:
        self.calls += 1
        if self.draw.random() < self.share:
            self.faults += 1
            return self.draw.choice(FAULTS)(len(payload["responses"]))
        return lengths(payload)


def service_run(folder: Path, url: str, name: str, updates: int) -> RunConfig:
    """A run over a service that is asked for one answer at a time, one after the other."""
    service = {
        "type": "http", "url": url, "weight": 0.1, "batch_size": 2, "max_concurrency": 1, "retries": 2,
        "retry_delay": 0.001, "connect_timeout": 0.3, "read_timeout": 0.3,
    }  # fmt: skip
    return tiny_run(
        folder, rewards=[service], output_dir=str(folder / name), train__max_steps=updates,
        train__rollout_batch_size=ANSWERS, ppo__num_ppo_epochs=1, sampling__response_length=4,
        train__save_total_limit=2,
    )  # fmt: skip


def run_faults(folder: Path, calls: int, seed: int, tell: Callable[[str], None]) -> str:
    """Trains over a service that gets at least ``calls`` requests, with and without faults; says how many there were.

    Raises:
        Failed: the two ends differ, or a run did not end in a way that is known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    updates = max(2, calls // (ANSWERS // 2))

    def straight() -> None:
        with local_service(lengths) as local:
            train_policy(service_run(folder, local.url, "straight", updates))

    def faulty() -> tuple[int, int, int]:
        behaviour, stops = Faulty(seed, 0.15), 0
        with local_service(behaviour) as local:
            config = service_run(folder, local.url, "faulty", updates)
            while True:
                has_begun = any(config.output_dir.glob("checkpoint-*"))
                changes = {"resume": True} if has_begun else {"overwrite_output_dir": True}
                before = len(read_jsonl(config.output_dir / "metrics.jsonl")) if has_begun else 0
                try:
                    train_policy(config.model_copy(update=changes))
                    return behaviour.calls, behaviour.faults, stops
                except (RewardError, ConfigError):  # ConfigError: on the first try, before the models load
                    stops += 1
                if has_begun and len(read_jsonl(config.output_dir / "metrics.jsonl")) < before:
                    raise Failed("an update that was finished is gone")

    in_child(straight)
    tell(f"{updates} updates without faults done")
    asked, faults, stops = in_child(faulty)
    check_end(_without_checkpoints(folder / "faulty"), _without_checkpoints(folder / "straight"), "faults")
    if asked < calls:
        raise Failed(f"{asked} reward calls, wanted {calls}")
    return f"{asked} calls with {faults} faults, {stops} stops: {updates} updates as without"


def _without_checkpoints(folder: Path) -> dict[str, Any]:
    """The end of a run but for its checkpoints, which stops make."""
    end = end_of(folder)
    return end | {"models": {name: x for name, x in end["models"].items() if "checkpoint-" not in name}}
