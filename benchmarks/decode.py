"""Where a step of decoding spends its time: python benchmarks/decode.py [--model FOLDER] [--dtype bfloat16] [--rows N]

The answers of one batch, by Tether's loop and by transformers' ``generate`` on the same model with the same prompts, on
one core. Prints milliseconds per token of

    products     matrix products
    attention
    drawing      drawing tokens: noise, argmax, log-probability
    cache        appending new keys and values
    all else     norms, rotations, activations, Python

The sum is measured without the profiler, whose own time would otherwise count as all else. What happens once in a run,
such as the check of the cache, is not counted. Needs a quiet core. Exits with 1 if products and attention make up less
than three quarters of Tether's time in float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402
from transformers import GenerationConfig, PreTrainedModel  # noqa: E402

from tether.data.collate import pad_left  # noqa: E402
from tether.generation import batch  # noqa: E402
from tether.generation.caches import RoomyLayer  # noqa: E402
from tether.generation.hf import HFGenerator  # noqa: E402
from tether.machine import heap  # noqa: E402
from tether.models.loading import load_causal_lm  # noqa: E402
from tether.types import Request, Sampling  # noqa: E402

PROMISE = 0.75
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise", "aten::mkldnn_linear")
ATTENTION = "aten::_scaled_dot_product"
DRAWING, CACHE = "drawing", "cache"


def main() -> int:
    """Profiles both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M, from its package)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep()  # as in a run
    model = load_causal_lm(str(given.model or smollm2()), dtype=getattr(torch, given.dtype))
    parts = {
        "Tether": profiled(by_tether(model, given.rows, given.tokens)),
        "generate": profiled(by_transformers(model, given.rows, given.tokens)),
    }
    print(f"{given.rows} rows, {given.tokens} tokens, {given.dtype}: ms per token and share, on one core")
    print(f"{'':12}" + "".join(f"{side:>20}" for side in parts))
    for name in ("products", "attention", DRAWING, CACHE, "all else", "sum"):
        cells = [f"{1e3 * p[name] / given.tokens:>11.2f} {p[name] / p['sum']:>7.1%} " for p in parts.values()]
        print(f"{name:12}" + "".join(cells))
    share = (parts["Tether"]["products"] + parts["Tether"]["attention"]) / parts["Tether"]["sum"]
    print(f"products and attention: {share:.1%}")
    return 1 if given.dtype == "float32" and share < PROMISE else 0


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, made from its package."""
    from tether.demo.model import prepare_model
    from tether.demo.run import cache_folder

    return prepare_model(cache_folder())


def requests(model: PreTrainedModel, rows: int) -> list[Request]:
    """Prompts of 10, 11, … random tokens."""
    generator, size = torch.Generator().manual_seed(0), model.config.vocab_size
    return [Request(torch.randint(size, (10 + i,), generator=generator).tolist(), i) for i in range(rows)]


def by_tether(model: PreTrainedModel, rows: int, tokens: int) -> Callable[[], None]:
    """One batch by Tether's loop, every answer of full length; a generator is made once in a run."""

    @contextmanager
    def scope() -> Iterator[PreTrainedModel]:
        yield model

    generator = HFGenerator(scope, batch_size=rows, device="cpu")

    def decode() -> None:
        assert len(list(generator.generate(requests(model, rows), Sampling(tokens, 0.7)))) == rows

    return decode


def by_transformers(model: PreTrainedModel, rows: int, tokens: int) -> Callable[[], None]:
    """The same with transformers."""
    ids, mask, _ = pad_left([request.token_ids for request in requests(model, rows)])
    config = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=0, pad_token_id=0
    )
    return lambda: model.generate(input_ids=ids, attention_mask=mask, generation_config=config)


def profiled(action: Callable[[], None]) -> dict[str, float]:
    """Seconds of the parts of an action, and their sum, which is measured without the profiler."""
    action()
    begun = time.perf_counter()
    action()
    whole = time.perf_counter() - begun
    with labelled(), profile(activities=[ProfilerActivity.CPU]) as seen:
        action()
    times = {event.key: (event.self_cpu_time_total / 1e6, event.cpu_time_total / 1e6) for event in seen.key_averages()}
    parts = {
        "products": sum(own for name, (own, _) in times.items() if name in PRODUCTS),
        "attention": sum(own for name, (own, _) in times.items() if name.startswith(ATTENTION)),
        DRAWING: times.get(DRAWING, (0.0, 0.0))[1],
        CACHE: times.get(CACHE, (0.0, 0.0))[1],
    }
    return parts | {"all else": whole - sum(parts.values()), "sum": whole}


@contextmanager
def labelled() -> Iterator[None]:
    """A context in which the profile knows which operations draw tokens and which fill Tether's cache."""
    draw, update = batch.drawn_tokens, RoomyLayer.update

    def within(label: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            with record_function(label):
                return function(*args, **kwargs)

        return call

    batch.drawn_tokens, RoomyLayer.update = within(DRAWING, draw), within(CACHE, update)
    try:
        yield
    finally:
        batch.drawn_tokens, RoomyLayer.update = draw, update


if __name__ == "__main__":
    sys.exit(main())
