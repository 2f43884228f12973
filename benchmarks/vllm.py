"""Generation by vLLM beside generation by transformers: python -m benchmarks.vllm [--model FOLDER] [--rows N] [--lora]

The same prompts are answered by both engines of a run, in turns, every answer of full length, on the device that a run
would use. Prints seconds, their ratio, how far the log-probabilities of vLLM are from the policy's own forward pass,
and how long the engine takes to start and to copy the weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # run as a file, this folder would be searched, and this file be taken for the package vllm

import torch  # noqa: E402

from benchmarks.decode import smollm2  # noqa: E402
from tether.config.schema import RunConfig  # noqa: E402
from tether.data.collate import collate  # noqa: E402
from tether.generation.build import build_generator  # noqa: E402
from tether.machine.distributed import Dist  # noqa: E402
from tether.models.build import build_roles  # noqa: E402
from tether.models.device import half_dtype  # noqa: E402
from tether.models.tokenizer import load_tokenizer  # noqa: E402
from tether.types import Completion, Generator, Request, Sampling  # noqa: E402


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M, from its package)")
    parser.add_argument("--rows", type=int, default=16, help="answers side by side")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=3, help="how often each engine answers; the fastest turn counts")
    parser.add_argument("--lora", action="store_true", help="with an adapter")
    parser.add_argument("--bf16", action="store_true", help="forward passes under bfloat16 autocast")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile and record graphs")
    parser.add_argument("--share", type=float, default=0.3, help="sampling.vllm.gpu_memory_utilization")
    given = parser.parse_args()
    device = Dist().device
    settings = {"enforce_eager": not given.compile, "gpu_memory_utilization": given.share}
    configs = [config_of(given, vllm) for vllm in (None, settings)]
    tokenizer = load_tokenizer(configs[0].model.path)
    roles = build_roles(configs[0], tokenizer, device=device, autocast_dtype=half_dtype(configs[0].train, device))
    transformers = build_generator(configs[0], roles)
    started, vllm = timed(lambda: build_generator(configs[1], roles), device)
    print(f"vLLM started in {started:.1f} s")
    sampling, asked = Sampling(given.tokens), requests(roles.policy_rows, given.rows)
    seconds: dict[str, list[float]] = {"transformers": [], "vLLM": []}
    for _ in range(given.turns):
        for name, generator in (("transformers", transformers), ("vLLM", vllm)):
            took, answers = timed(lambda generator=generator: answered(generator, asked, sampling), device)
            seconds[name].append(took)
    vllm.sync_weights(roles.policy)
    copied, _ = timed(lambda: answered(vllm, asked[:1], Sampling(1)), device)
    print(f"{given.rows} answers of {given.tokens} tokens, the fastest of {given.turns} turns:")
    best = {name: min(taken) for name, taken in seconds.items()}
    for name, took in best.items():
        print(f"  {name:14}{took:8.2f} s {given.rows * given.tokens / took:8.0f} tokens/s")
    print(f"ratio transformers / vLLM: {best['transformers'] / best['vLLM']:.2f}")
    print(f"copying the weights, and one token: {copied:.2f} s")
    print(f"mean gap of log-probabilities to the policy's own: {gap(roles, asked, answers, device):.2g}")
    vllm.close()


def config_of(given: argparse.Namespace, vllm: dict | None) -> RunConfig:
    """A run on this model; only what generation needs of it matters."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(given.model or smollm2()), "lora": {} if given.lora else None},
            "rewards": [{"type": "function", "path": "none.py", "name": "none"}],
            "data": {"prompts": "none.jsonl", "max_prompt_length": 10 + given.rows},
            "sampling": {"batch_size": given.rows, "response_length": given.tokens, "vllm": vllm},
            "ppo": {"kl_coef": 0.0, "advantage_estimator": "reinforce_pp"},
            "train": {"max_steps": 1, "bf16": given.bf16},
            "output_dir": "none",
        }
    )


def requests(num_words: int, rows: int) -> list[Request]:
    """Prompts of 10, 11, … random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [Request(torch.randint(num_words, (10 + i,), generator=generator).tolist(), i) for i in range(rows)]


def answered(generator: Generator, asked: list[Request], sampling: Sampling) -> list[Completion]:
    """All answers, in the order of the requests."""
    found = dict(generator.generate(asked, sampling))
    return [found[i] for i in range(len(asked))]


def timed(action: Callable, device: torch.device) -> tuple[float, object]:
    """Seconds that an action takes on the device, and its result."""
    start = time.perf_counter()
    result = action()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start, result


def gap(roles, asked: list[Request], answers: list[Completion], device: torch.device) -> float:
    """``rollout/logprob_gap`` of the answers."""
    batch = collate([request.token_ids for request in asked], [answer.token_ids for answer in answers])
    own = roles.score_pass(batch.to(device), temperature=1.0).logprobs.cpu()
    told = torch.tensor([answer.logprobs for answer in answers])
    return float((own - told).abs().mean())


if __name__ == "__main__":
    main()
