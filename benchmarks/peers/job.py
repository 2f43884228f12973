"""One PPO job for both systems, and a side's result; uses only the standard library."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What is trained; equal on both sides."""

    model: str
    """Folder of the start policy, also the reference."""
    judge: str
    """Folder of a classifier with one label: the reward model, and the critic's start."""
    judge_adapter: str
    """The same judge as an adapter on the policy's base."""
    prompts: str
    """JSONL with ``prompt``."""
    folder: str
    """Folder for a side's files."""
    episodes: int = 16
    """Number of answers per update."""
    micro: int = 8
    """Number of answers per forward of the update."""
    decoded: int = 16
    """Number of answers decoded side by side."""
    tokens: int = 48
    """Maximum number of tokens in an answer."""
    ends: bool = False
    """Whether an answer ends at its end token."""
    epochs: int = 1
    """Number of optimizer steps per rollout batch, each on all of it."""
    updates: int = 3
    """Number of updates; the first one warms up and is not counted."""
    lora: bool = False
    """Whether the policy is a LoRA of rank 16."""
    critic: str = "reward"
    """How Tether's critic starts: ``reward`` as the judge, like TRL's; ``head`` as a zero head on the policy itself."""
    bfloat16: bool = False
    """Whether weights are pure bfloat16 instead of float32."""
    cache: str = "dynamic"
    """Kind of Tether's decoding cache."""
    threads: int = 2
    """Number of torch's threads."""
    seed: int = 1


@dataclass
class Outcome:
    """What a side measured."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each update, between two log entries."""
    scores: list[float] = field(default_factory=list)
    """Mean score of each update."""
    lengths: list[float] = field(default_factory=list)
    """Mean answer length of each update, if the side reports it."""
    peak_gib: float = 0.0
    """Peak memory: resident on a CPU, allocated on a GPU."""
    details: dict[str, float] = field(default_factory=dict)
    """Metrics of the last update."""

    def episodes_per_second(self, job: Job) -> float:
        """Answers per second, without the first update."""
        counted = self.seconds[1:]
        return job.episodes * len(counted) / sum(counted)


class SideFailed(SystemExit):
    """A side ended with an error, or took too long; ends the program with its message unless another is to run."""


SETTINGS = {"learning_rate": 3e-6, "kl_coef": 0.05, "temperature": 0.7, "lam": 0.95, "rank": 16, "alpha": 32}
"""The same on both sides."""


def read_job() -> tuple[Job, Path]:
    """The job and the file for the outcome, from the command line."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2])


def write_job(job: Job, path: Path) -> None:
    """Writes a job for a side to read."""
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def resident_peak() -> float:
    """Peak resident memory of this process in GiB, imports included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
