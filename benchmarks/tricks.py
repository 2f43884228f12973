"""The gain of each trick: python benchmarks/tricks.py [--model FOLDER] [--only WORDS] [--repeats N] [--small]

Each row runs the same work in turn with a trick of Tether's and without it, on one core unless stated otherwise: CPU
seconds, the minimum of several repetitions, or MiB. SmolLM2-135M, float32, 8 answers of 48 tokens per pass, 16 side by
side while decoding. ``--small`` takes fewer and shorter answers, to test the script.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from benchmarks.decode import smollm2  # noqa: E402
from benchmarks.flat import more_memory  # noqa: E402
from tether.config.schema import RunConfig  # noqa: E402
from tether.data.collate import collate, plan_micro_batches  # noqa: E402
from tether.errors import ConfigError  # noqa: E402
from tether.generation import batch as decoding_batch  # noqa: E402
from tether.generation.batch import Decoding, drawn_tokens  # noqa: E402
from tether.generation.hf import HFGenerator  # noqa: E402
from tether.machine import heap  # noqa: E402
from tether.models import forward  # noqa: E402
from tether.models import products as quick  # noqa: E402
from tether.models.attention import wide_gradients  # noqa: E402
from tether.models.build import build_roles  # noqa: E402
from tether.models.compiled import check_compile, compile_layers  # noqa: E402
from tether.models.device import is_x86  # noqa: E402
from tether.models.forward import response_outputs  # noqa: E402
from tether.models.heads import ScalarHead  # noqa: E402
from tether.models.loading import load_causal_lm  # noqa: E402
from tether.models.products import QuickLinear  # noqa: E402
from tether.models.roles import POLICY, ModelRoles  # noqa: E402
from tether.models.rounding import frozen_copy  # noqa: E402
from tether.models.tokenizer import load_tokenizer  # noqa: E402
from tether.train.optim import are_finite, build_optimizer  # noqa: E402
from tether.types import MicroBatch, Request, Sampling  # noqa: E402

Row = tuple[str, str, float, float]
"""Name, unit, without the trick, with it."""
FOR_FLOAT32 = {"onednn_is_faster", "few_rows_are_slow"}
"""Functions of ``models/products.py`` that choose how float32 is multiplied."""


class Bench:
    """The model and the sizes of the work.

    Args:
        model: folder of the policy.
        repeats: number of repetitions of each measurement, whose minimum counts.
        small: whether answers are few and short.
    """

    def __init__(self, model: Path, repeats: int, *, small: bool) -> None:
        self.path, self.repeats = str(model), repeats
        self.rows, self.tokens, self.decoded = (2, 4, 4) if small else (8, 48, 16)
        self.model = load_causal_lm(self.path, dtype=torch.float32)
        self.vocabulary = self.model.config.vocab_size

    def ids(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(self.vocabulary, (length,), generator=generator).tolist() for length in lengths]

    def batch(self) -> MicroBatch:
        """A micro-batch of prompts of unequal length and answers of full length."""
        return collate(self.ids(*range(10, 10 + 3 * self.rows, 3)), self.ids(*[self.tokens] * self.rows, seed=1))

    def roles(self, **model: object) -> ModelRoles:
        """Roles of a run on the model."""
        sections = {
            "model": {"path": self.path, "dtype": "float32"} | model,
            "rewards": [{"type": "function", "path": "rewards.py", "name": "score"}],
            "data": {"prompts": "prompts.jsonl"},
            "train": {"max_steps": 1, "bf16": False},
            "output_dir": "out",
        }
        return build_roles(
            RunConfig.model_validate(sections), load_tokenizer(self.path), device="cpu", autocast_dtype=None
        )

    def seconds(
        self,
        without: Callable[[], None],
        with_trick: Callable[[], None],
        clock: Callable[[], float] = time.process_time,
    ) -> tuple[float, float]:
        """CPU time of both, or that of another clock, measured in turn."""
        best = [float("inf")] * 2
        for _ in range(1 + self.repeats):
            for i, action in enumerate((without, with_trick)):
                start = clock()
                action()
                best[i] = min(best[i], clock() - start)
        return best[0], best[1]

    def requests(self, count: int) -> list[Request]:
        """Prompts of twelve tokens."""
        return [Request(ids, i) for i, ids in enumerate(self.ids(*[12] * count))]

    def decoder(
        self,
        requests: list[Request],
        sampling: Sampling,
        *,
        scope: Callable[[], AbstractContextManager[nn.Module]] | None = None,
        **options: object,
    ) -> Callable[[], None]:
        """The answers by Tether's loop, of the policy or in another scope; a generator is made once, as in a run."""
        generator = HFGenerator(
            scope or (lambda: nullcontext(self.model)), batch_size=self.decoded, device="cpu", **options
        )

        def decode() -> None:
            for _ in generator.generate(requests, sampling):
                pass

        return decode


def products(bench: Bench) -> Iterator[Row]:
    """oneDNN against torch's BLAS."""
    if not torch.backends.mkldnn.is_available():
        print("float32 products by oneDNN: this torch has no oneDNN", file=sys.stderr)
        return
    for name, work in passes(bench.model, bench.batch()).items():
        pair = with_and_without(bench.model, "onednn_is_faster", work)
        yield f"float32 products by oneDNN: {name}", "s", *bench.seconds(*pair)


def few_rows(bench: Bench) -> Iterator[Row]:
    """A decoding step by W xᵀ and by x Wᵀ, on two cores."""
    torch.set_num_threads(2)
    for count in (bench.decoded // 4, bench.decoded):
        work = bench.decoder(bench.requests(count), Sampling(bench.tokens))
        yield f"products of {count} rows the other way round: decoding on two cores, by the clock", "s", *bench.seconds(
            *with_and_without(bench.model, "few_rows_are_slow", work), time.perf_counter
        )
    torch.set_num_threads(1)


def half(bench: Bench) -> Iterator[Row]:
    """Products of bfloat16 weights in float32 and in bfloat16."""
    model = copy.deepcopy(bench.model).bfloat16()
    decode = bench.decoder(bench.requests(bench.decoded), Sampling(bench.tokens), scope=lambda: nullcontext(model))
    for name, work in (passes(model, bench.batch()) | {"decoding": decode}).items():
        pair = with_and_without(model, "half_is_slow", work)
        yield f"products of bfloat16 in float32: {name}", "s", *bench.seconds(*pair)


def gradients(bench: Bench) -> Iterator[Row]:
    """The gradient of attention in float32 and in the type of its operands."""
    if not is_x86():
        print("gradient of attention in float32: only on x86 processors", file=sys.stderr)
        return
    batch, halved = bench.batch(), copy.deepcopy(bench.model).bfloat16()

    def passed(model: PreTrainedModel, is_wide: bool) -> None:
        scope = wide_gradients if is_wide else lambda backbone: nullcontext()
        is_autocast = model.dtype == torch.float32
        with mock.patch.object(forward, "wide_gradients", scope), torch.autocast("cpu", enabled=is_autocast):
            out = response_outputs(model, batch, temperature=1.0)
        out.logprobs.sum().backward()
        model.zero_grad(set_to_none=True)

    for name, model in {"bfloat16 autocast": bench.model, "bfloat16 weights": halved}.items():
        yield f"gradient of attention in float32: {name}, forward and backward", "s", *bench.seconds(
            lambda model=model: passed(model, False), lambda model=model: passed(model, True)
        )


def passes(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Callable[[], None]]:
    """A pass over the batch without and with gradients."""

    def passed(gradients: bool) -> None:
        with torch.set_grad_enabled(gradients):
            out = response_outputs(model, batch, temperature=1.0)
        if gradients:
            out.logprobs.sum().backward()
            model.zero_grad(set_to_none=True)

    return {"scoring": lambda: passed(False), "forward and backward": lambda: passed(True)}


def with_and_without(model: nn.Module, faster: str, work: Callable[[], None]) -> list[Callable[[], None]]:
    """The work without and with a way to multiply, as if on processors on which it is not and is the faster one. Of the
    two ways for float32 there is only this one, whatever is faster on this processor.

    Args:
        faster: name of the function of ``models/products.py`` that says so.
    """
    others = FOR_FLOAT32 - {faster} if faster in FOR_FLOAT32 else ()

    def of(is_faster: bool) -> Callable[[], None]:
        decisions = {faster: lambda *dtype: is_faster} | dict.fromkeys(others, lambda: False)

        def action() -> None:
            kinds = {layer: type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)}
            with mock.patch.multiple(quick, **decisions):
                for layer in kinds:
                    layer.__class__ = QuickLinear
                work()
            for layer, kind in kinds.items():
                layer.__class__ = kind

        return action

    return [of(False), of(True)]


def logits(bench: Bench) -> Iterator[Row]:
    """Logits of response tokens in chunks against those of all tokens at once."""
    batch = bench.batch()

    def whole() -> None:
        scores = bench.model(input_ids=batch.token_ids, use_cache=False).logits
        scores = scores.flatten(0, 1)[batch.response_index - 1]  # each token is predicted one column before its own
        targets = batch.token_ids.flatten()[batch.response_index]
        scores.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
        bench.model.zero_grad(set_to_none=True)

    def chunks() -> None:
        response_outputs(bench.model, batch, temperature=1.0).logprobs.sum().backward()
        bench.model.zero_grad(set_to_none=True)

    yield "logits of response tokens in chunks: forward and backward", "s", *bench.seconds(whole, chunks)
    yield "the same, peak memory", "MiB", *(more_memory(action) for action in (whole, chunks))

    def called() -> None:  # for a head that is more than a matrix product
        handle = bench.model.get_output_embeddings().register_forward_hook(lambda *call: None)
        chunks()
        handle.remove()

    yield "gradients of the head in one place: forward and backward", "s", *bench.seconds(called, chunks)
    yield "gradients of the head in one place: peak memory", "MiB", *(more_memory(act) for act in (called, chunks))


def lengths(bench: Bench) -> Iterator[Row]:
    """Micro-batches sorted by length, of answers from 1 to 128 tokens, against their original order."""
    generator, longest = torch.Generator().manual_seed(2), 4 if bench.rows < 8 else 128
    spans = torch.randint(1, longest + 1, (4 * bench.rows,), generator=generator)
    queries, responses = bench.ids(*[12] * len(spans)), bench.ids(*spans.tolist(), seed=1)
    as_they_came = [range(i, i + bench.rows) for i in range(0, len(spans), bench.rows)]
    by_length = plan_micro_batches((spans + 12).tolist(), bench.rows)

    def scored(groups) -> None:
        with torch.no_grad():
            for rows in groups:
                batch = collate([queries[i] for i in rows], [responses[i] for i in rows])
                response_outputs(bench.model, batch, temperature=1.0)

    yield "micro-batches of similar length: scoring", "s", *bench.seconds(
        lambda: scored(as_they_came), lambda: scored(by_length)
    )


def rows(bench: Bench) -> Iterator[Row]:
    """Finished rows dropped, and prompts of several answers read once, against neither."""
    stops = frozenset(range(0, bench.vocabulary, 25))  # an answer ends after 25 tokens or so
    sampling = Sampling(2 * bench.tokens, temperature=100.0, stop_token_ids=stops)
    prompts = bench.ids(*[8 * bench.tokens] * (bench.decoded // 4))
    shared = [Request(prompts[i // 4], i) for i in range(bench.decoded)]

    def pair(work: Callable[[], None]) -> list[Callable[[], None]]:
        def action(drops: bool) -> None:
            with mock.patch.object(Decoding, "may_drop", drops):
                work()

        return [lambda: action(False), lambda: action(True)]

    works = {
        "finished rows leave the batch: decoding": bench.decoder(bench.requests(bench.decoded), sampling),
        "prompts of four answers read once: first token": bench.decoder(shared, Sampling(1)),
    }
    for name, work in works.items():
        yield name, "s", *bench.seconds(*pair(work))


def cache(bench: Bench) -> Iterator[Row]:
    """Keys and values with spare room against copying everything for every token."""
    with_room = bench.decoder(bench.requests(bench.decoded), Sampling(2 * bench.tokens))

    def without() -> None:
        with mock.patch.object(decoding_batch, "give_room", lambda cache: None):
            with_room()

    yield "keys and values with room: decoding", "s", *bench.seconds(without, with_room)


def draws(bench: Bench) -> Iterator[Row]:
    """Gumbel-max with keyed noise against a multinomial, and against noise from ``exponential_``."""
    scores = torch.randn(bench.decoded, bench.vocabulary, generator=torch.Generator().manual_seed(0))
    generators = [torch.Generator().manual_seed(i) for i in range(bench.decoded)]

    def gumbel() -> None:
        for _ in range(10):
            drawn_tokens(scores, generators, Sampling(1, 0.7))

    def multinomial() -> None:
        for _ in range(10):
            logprobs = (scores / 0.7).log_softmax(-1)
            logprobs.gather(1, torch.multinomial(logprobs.exp(), 1))

    def exponential() -> None:
        for _ in range(10):
            scaled, noise = scores / 0.7, torch.empty_like(scores)
            for row, generator in zip(noise, generators, strict=True):
                row.exponential_(generator=generator)
            tokens = (scaled - noise.log_()).argmax(-1, keepdim=True)
            scaled.gather(1, tokens)[:, 0] - scaled.logsumexp(-1)

    yield "Gumbel-max against a multinomial: ten tokens", "s", *bench.seconds(multinomial, gumbel)
    yield "noise from whole numbers against exponential_: ten tokens", "s", *bench.seconds(exponential, gumbel)


def optimizer(bench: Bench) -> Iterator[Row]:
    """AdamW in one kernel against one tensor at a time, and detecting non-finite gradients from their sums."""
    sections = {
        "model": {"path": bench.path},
        "rewards": [{"type": "function", "path": "rewards.py", "name": "score"}],
        "data": {"prompts": "prompts.jsonl"},
        "output_dir": "out",
    }
    parameters = list(bench.model.parameters())
    made = {}
    for name in ("adamw_torch", "adamw_torch_fused"):
        config = RunConfig.model_validate(sections | {"train": {"max_steps": 1, "optim": name, "learning_rate": 1e-9}})
        made[name] = build_optimizer(config, "policy", parameters, 1e-9, 1)

    def step(name: str) -> Callable[[], None]:
        def action() -> None:
            for p in parameters:
                p.grad = p.detach()
            made[name].optimizer.step()

        return action

    yield "AdamW in one kernel", "s", *bench.seconds(step("adamw_torch"), step("adamw_torch_fused"))

    def each() -> None:
        assert all(bool(torch.isfinite(p.grad).all()) for p in parameters)

    def sums() -> None:
        assert are_finite([p.grad for p in parameters])

    yield "finite gradients seen from their sums", "s", *bench.seconds(each, sums)
    bench.model.zero_grad(set_to_none=True)


def roles(bench: Bench) -> Iterator[Row]:
    """Three roles on one base, by the table shown at the start; a head in the policy's pass."""
    three, one = bench.roles(), bench.roles(lora={"r": 16})
    held = [sum(row.bytes for row in made.table()) / 2**20 for made in (three, one)]
    yield "policy, reference and critic on one base: weights", "MiB", *held
    batch = bench.batch()

    def critic() -> None:
        for pass_ in three.passes:
            with torch.no_grad(), pass_(batch, temperature=1.0):
                pass

    head = ScalarHead(bench.model.config.hidden_size)

    def riding() -> None:
        with torch.no_grad(), three.use(POLICY) as model:
            response_outputs(model, batch, temperature=1.0, head=head)

    yield "a head in the policy's pass, not a critic of its own: scoring", "s", *bench.seconds(critic, riding)


def merged(bench: Bench) -> Iterator[Row]:
    """Generation with the policy's adapter merged into its base."""
    roles = bench.roles(lora={"r": 16})
    asked = bench.requests(bench.decoded), Sampling(bench.tokens)
    pair = (bench.decoder(*asked, scope=roles.decoding, **more) for more in ({}, {"phase": roles.ready_to_decode}))
    yield "LoRA adapter merged while decoding", "s", *bench.seconds(*pair)


def autocast(bench: Bench) -> Iterator[Row]:
    """bfloat16 autocast against float32."""
    batch = bench.batch()

    def passed(is_bf16: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            out = response_outputs(bench.model, batch, temperature=1.0)
        out.logprobs.sum().backward()
        bench.model.zero_grad(set_to_none=True)

    yield "bfloat16 autocast: forward and backward", "s", *bench.seconds(lambda: passed(False), lambda: passed(True))


def rounded(bench: Bench) -> Iterator[Row]:
    """A reference whose weights are rounded once against one that autocast rounds for every pass."""
    batch, plain = bench.batch(), copy.deepcopy(bench.model).requires_grad_(False)
    once = frozen_copy(plain, torch.bfloat16)

    def scored(model: PreTrainedModel) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            response_outputs(model, batch, temperature=1.0)

    pair = (lambda: scored(plain)), (lambda: scored(once))
    yield "weights of the reference rounded once: its pass under bfloat16 autocast", "s", *bench.seconds(*pair)
    sizes = (sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20 for model in (plain, once))
    yield "the same, weights", "MiB", *sizes


def compiled(bench: Bench) -> Iterator[Row]:
    """Layers through torch.compile: the first pass, which waits for the compiler, and those after it; in float32 and
    under bfloat16 autocast."""
    batch = bench.batch()
    try:
        check_compile("compiled", "cpu")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return
    both = (bench.model, copy.deepcopy(bench.model))
    compile_layers(both[1])

    def passed(model: PreTrainedModel, is_bf16: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            out = response_outputs(model, batch, temperature=1.0)
        out.logprobs.sum().backward()
        model.zero_grad(set_to_none=True)

    for name, is_bf16 in {"float32": False, "bfloat16 autocast": True}.items():
        actions = [lambda model=model, is_bf16=is_bf16: passed(model, is_bf16) for model in both]
        actions[0]()  # the memory of the first pass is got from the system
        first = []
        for action in actions:
            start = time.perf_counter()
            action()
            first.append(time.perf_counter() - start)
        yield f"layers through torch.compile, {name}: the first forward and backward, by the clock", "s", *first
        yield f"the same, {name}, once compiled", "s", *bench.seconds(*actions)


TRICKS = (
    products, few_rows, half, gradients, logits, lengths, rows, cache, draws, optimizer, roles, merged, autocast,
    rounded, compiled,
)  # fmt: skip


def main() -> int:
    """Runs the rows and prints each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M, from its package)")
    parser.add_argument("--only", nargs="+", choices=[trick.__name__ for trick in TRICKS])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep()  # as in a run
    bench = Bench(given.model or smollm2(), given.repeats, small=given.small)
    print("| trick | without | with | |\n|---|---|---|---|")
    for trick in TRICKS:
        if given.only is None or trick.__name__ in given.only:
            for name, unit, without, with_trick in trick(bench):
                digits = 0 if unit == "MiB" else 3
                cells = f"{without:,.{digits}f} {unit} | {with_trick:,.{digits}f} {unit}"
                ratio = f"{without / with_trick:.2f}" if with_trick else "–"  # memory that was already in use
                print(f"| {name} | {cells} | {ratio} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
