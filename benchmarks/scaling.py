"""Cost of an episode by the size of the rollout batch and by length: python benchmarks/scaling.py [-o FOLDER]

A random Qwen2 of two layers, as wide as a small language model's, on one core, answers of a fixed length, one epoch, a
separate critic, the second update of each run. Prints CPU seconds per episode for rollout batches of 64 to 4,096
answers of 16 tokens, and for answers of 16 to 1,024 tokens in batches of 64; draws scaling.png; and exits with 1 if

    an episode in the largest batch costs more than 1.25 times one in the smallest
    the cost grows by more than the length to the power of 1.25 between two lengths
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from benchmarks.gpu.speed import save_random  # noqa: E402
from benchmarks.whole import whole_run  # noqa: E402
from tether.config.schema import RunConfig  # noqa: E402

BATCHES, LENGTHS = (64, 256, 1024, 4096), (16, 64, 256, 1024)
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
MOST_MORE, MOST_POWER = 1.25, 1.25


def main() -> int:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-scaling"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.output.mkdir(parents=True, exist_ok=True)
    model = save_random(given.output / "model", SHAPE, 2048)
    by_batch = {batch: episode_cost(model, batch, 16) for batch in given.batches}
    table("rollouts per update, 16 tokens", by_batch)
    by_length = {length: episode_cost(model, 64, length) for length in given.lengths}
    table("tokens per answer, 64 rollouts", by_length)
    plot({"rollouts per update": by_batch, "tokens per answer": by_length}, given.output / "scaling.png")
    faults = broken(by_batch, by_length)
    for fault in faults:
        print(f"broken: {fault}", file=sys.stderr)
    return 1 if faults else 0


def broken(by_batch: Mapping[int, float], by_length: Mapping[int, float]) -> list[str]:
    """The promises that are broken."""
    sizes, lengths = sorted(by_batch), sorted(by_length)
    more = by_batch[sizes[-1]] / by_batch[sizes[0]]
    faults = [f"an episode of {sizes[-1]} costs {more:.2f} times one of {sizes[0]}"] if more > MOST_MORE else []
    for less, length in pairwise(lengths):
        power = math.log(by_length[length] / by_length[less]) / math.log(length / less)
        if power > MOST_POWER:
            faults.append(f"from {less} to {length} tokens the cost grows as the length to the power of {power:.2f}")
    return faults


class Seconds(TrainerCallback):
    """CPU seconds of each update."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The first update begins."""
        self.stamps.append(time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """An update is over."""
        self.stamps.append(time.process_time())


def length_score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(completion) % 7) for completion in completions]


def episode_cost(model: Path, batch: int, tokens: int) -> float:
    """CPU seconds per episode in the second update."""
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        rows = [{"prompt": "Tell me of number " + str(i % 1000).zfill(4)} for i in range(batch)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sections = {
            "model": {"path": str(model.resolve()), "dtype": "float32"},
            "value": {"kind": "model"},
            "rewards": [{"type": "function", "path": "benchmarks.scaling", "name": "length_score"}],
            "data": {"prompts": str(prompts), "chat_template": "none"},
            "sampling": {"response_length": tokens, "stop_token": None},
            "ppo": {"num_ppo_epochs": 1},
            "train": {"max_steps": 2, "rollout_batch_size": batch, "micro_batch_size": 16, "bf16": False},
            "output_dir": str(Path(folder) / "run"),
        }
        whole_run(RunConfig.model_validate(sections), callbacks=[seconds])
    return (seconds.stamps[2] - seconds.stamps[1]) / batch


def table(title: str, costs: Mapping[int, float]) -> None:
    """Prints costs, and how they compare with the first."""
    least = next(iter(costs.values()))
    print(f"\n{title:>32} {'ms per episode':>14} {'of the first':>13}")
    for size, cost in costs.items():
        print(f"{size:>32,} {1e3 * cost:>14.2f} {cost / least:>12.2f}x", flush=True)


def plot(series: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draws each series in its own panel, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(series), figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, (name, costs) in zip(panels, series.items(), strict=True):
        panel.loglog(list(costs), [1e3 * cost for cost in costs.values()], marker="o")
        panel.set(xlabel=name, xticks=list(costs), xticklabels=[f"{size:,}" for size in costs])
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel="processor ms per episode")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"\n{path}")


if __name__ == "__main__":
    sys.exit(main())
