"""Memory that does not grow: python benchmarks/flat.py [--updates N] [--tokens N …] [--vocabulary N …]

    log-probabilities   peak memory of a pass over growing numbers of tokens and growing vocabularies, forward and
                        backward, in the product's chunks and with whole logits; hidden size 64, float32
    updates             resident memory of a run of thousands of updates on the smallest possible model, a table

Exits with 1 if the pass over 2,048 tokens takes more than one over 512 does, or if the run grows by more than its
history of metrics: a kilobyte per update, once ``state.log_history`` is full.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from benchmarks.toys.language import toy  # noqa: E402
from benchmarks.toys.run import table_trainer, toy_config  # noqa: E402
from benchmarks.whole import end_if_interrupted  # noqa: E402
from tether.algo import LinearHead, linear_logprobs, logits_at_once, logprobs_from_logits  # noqa: E402
from tether.machine.distributed import Dist  # noqa: E402
from tether.train.callbacks import KEPT_LINES  # noqa: E402
from tether.train.costs import Peak, resident_bytes  # noqa: E402

MIB = 2**20
WIDTH = 64
MOST_MORE = 1.25
"""Maximum ratio of the peak over 2,048 tokens to that over 512: noise, and one more hidden state per token."""
MOST_GROWTH, NOISE = 1024, MIB
"""Maximum number of bytes by which a run may grow per update, and in total."""


def main() -> int:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[50_000, 150_000])
    given = parser.parse_args()
    torch.set_num_threads(1)
    faults = []
    print(f"{'vocabulary':>10} {'tokens':>7} {'chunks, forward':>16} {'and backward':>13} {'whole logits':>13}   MiB")
    for vocabulary in given.vocabulary:
        peaks = {tokens: pass_peaks(vocabulary, tokens) for tokens in given.tokens}
        for tokens, (forward, backward, whole) in peaks.items():
            print(f"{vocabulary:>10,} {tokens:>7,} {forward:>16,.0f} {backward:>13,.0f} {whole:>13,.0f}", flush=True)
        few, many = min(peaks), max(peaks)
        if any(more > MOST_MORE * less for less, more in zip(peaks[few][:2], peaks[many][:2], strict=True)):
            faults.append(f"vocabulary {vocabulary}: {many} tokens take more memory than {few}")
    print(f"\n{'updates':>10} {'resident MiB':>13}")
    sizes = run_sizes(given.updates)
    for updates, size in sizes.items():
        print(f"{updates:>10,} {size / MIB:>13.1f}", flush=True)
    faults += grown(sizes)
    for fault in faults:
        print(f"broken: {fault}", file=sys.stderr)
    return 1 if faults else 0


def grown(sizes: Mapping[int, int]) -> list[str]:
    """The promises that a run breaks.

    Args:
        sizes: resident bytes by number of updates.
    """
    first, last = min(update for update in sizes if update >= min(KEPT_LINES, max(sizes))), max(sizes)
    more = sizes[last] - sizes[first]
    if more <= NOISE + MOST_GROWTH * (last - first):
        return []
    return [f"from {first} to {last} updates a run grew by {more / MIB:.1f} MiB"]


def pass_peaks(vocabulary: int, tokens: int) -> tuple[float, float, float]:
    """Additional MiB for log-probabilities and entropy of ``tokens`` tokens: in chunks without and with gradients, and
    with whole logits and gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    head = nn.Linear(WIDTH, vocabulary, bias=False)

    def chunks(states: torch.Tensor) -> torch.Tensor:
        how = {"chunk_size": logits_at_once(hidden.device) // vocabulary, "with_entropy": True}
        logprobs, entropy = linear_logprobs(states, LinearHead(head.weight), targets, temperature=1.0, **how)
        return logprobs.sum() + entropy.sum()

    def whole(states: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = logprobs_from_logits(head(states), targets, temperature=1.0, with_entropy=True)
        return logprobs.sum() + entropy.sum()

    def forward() -> None:
        with torch.no_grad():
            chunks(hidden)

    def backward(loss: Any) -> None:
        loss(hidden.clone().requires_grad_()).backward()
        head.zero_grad(set_to_none=True)  # memory in use before the next pass is not part of it

    return tuple(more_memory(action) for action in (forward, lambda: backward(chunks), lambda: backward(whole)))


def more_memory(action: Callable[[], None]) -> float:
    """Peak MiB of additional resident memory during an action: by the system's own peak mark, which misses nothing, or,
    if that cannot be reset, by sampling every few milliseconds."""
    gc.collect()
    Dist().trim_heap()
    before = resident_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        with Peak(torch.device("cpu")) as peak:
            action()
        return (peak.bytes - before) / MIB
    action()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024 - before / MIB


class Sizes(TrainerCallback):
    """Resident memory after each tenth of a run's updates."""

    def __init__(self, every: int) -> None:
        self._every, self.sizes = every, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records it."""
        if state.global_step % self._every == 0:
            gc.collect()
            self.sizes[state.global_step] = resident_bytes()


def run_sizes(updates: int) -> dict[int, int]:
    """Resident bytes of this process by number of updates of a run: a table, eight answers per update."""
    sizes = Sizes(max(1, updates // 10))
    with tempfile.TemporaryDirectory() as folder:
        changes = {"train.rollout_batch_size": 8, "train.micro_batch_size": 8, "ppo.num_ppo_epochs": 1}
        language = toy("A")
        config = toy_config(language, Path(folder), changes | {"train.max_steps": updates})
        end_if_interrupted(table_trainer(language, config, [sizes]).fit())
    return sizes.sizes


if __name__ == "__main__":
    sys.exit(main())
