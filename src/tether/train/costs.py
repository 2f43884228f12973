"""Costs of an update: seconds and peak memory of its phases, and its arithmetic compared to the machine's peak."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from tether.metrics.reduce import Metrics, wide
from tether.models.bitsandbytes import num_weights
from tether.models.products import product_of_many
from tether.models.roles import POLICY, ModelRoles, Pass
from tether.types import MicroBatch

GIB = 2**30
SAMPLING_SECONDS = 0.01
"""Interval between two readings of this process's resident memory."""
RATE_SECONDS = 0.05
"""Duration of the benchmark of matrix products."""
PHASES = ("rollout", "reward", "logprobs", "values", "reference", "update")


@contextmanager
def timed(metrics: Metrics, name: str, device: torch.device) -> Iterator[None]:
    """Adds the seconds spent in this context, also by the device, to ``time/NAME_s``."""
    start = _now(device)
    yield
    metrics.slowest(f"time/{name}_s", _now(device) - start)


def _now(device: torch.device) -> float:
    """The time in seconds at which the device has done everything that it was asked to do by now."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def phase(metrics: Metrics, name: str, device: torch.device) -> Iterator[None]:
    """``timed``; also records the peak memory as ``memory/NAME`` in GiB: allocated memory on a GPU, resident memory
    otherwise; absent if the system does not report it."""
    with timed(metrics, name, device), Peak(device) as peak:
        yield
    if peak.bytes:
        metrics.max(f"memory/{name}", peak.bytes / GIB)


class Peak:
    """``with Peak(device) as peak:`` stores the peak memory use within it in ``peak.bytes``; 0 if unknown.

    Resident memory is read every hundredth of a second. The system's own peak counter is not used, as resetting it
    would disturb measurements of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._over = device, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if device.type == "cpu" else None
        self.bytes = 0

    def __enter__(self) -> Peak:
        if self._thread is not None:
            self._look()
            self._thread.start()
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._look()
        elif self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)

    def _watch(self) -> None:
        while not self._over.wait(SAMPLING_SECONDS):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PassCosts:
    """Counts the tokens read and the operations computed by the passes of an update.

        floating-point operations = Σ over matrices (2 + 2 + 2 · is trained) · parameters · tokens

    for the forward, the gradient of the activations and that of the weights. The head of the policy counts only for
    response tokens. Attention between tokens, recomputed activations, and experts in one tensor are not counted.

    Args:
        roles: the roles that are updated.
    """

    def __init__(self, roles: ModelRoles) -> None:
        self._per_token = {pass_.name: _operations(roles, pass_) for pass_ in roles.passes}

    def count(self, metrics: Metrics, pass_: Pass, batch: MicroBatch) -> None:
        """Adds a forward and backward of ``pass_`` to ``tokens/update`` and ``flops/update``, the latter in 10¹². An
        idle micro-batch adds 0, so that both metrics exist in a process that has no other."""
        of_trunk, of_head = self._per_token[pass_.name]
        read: Tensor = num_read(batch)
        metrics.sum("tokens/update", read)
        metrics.sum("flops/update", (of_trunk * wide(read) + of_head * wide(batch.response_mask.sum())) / 1e12)


def num_read(batch: MicroBatch) -> Tensor:
    """Number of tokens that a pass over a micro-batch reads, without padding; 0 if it is idle."""
    return batch.attention_mask.sum() * (not batch.is_idle)


def _operations(roles: ModelRoles, pass_: Pass) -> tuple[int, int]:
    """Operations of a forward and backward per token, in the trunk and in the policy's head."""
    model = roles.role(pass_.name).model
    trained = {id(parameter) for parameter in pass_.parameters()}
    embeddings = model.get_input_embeddings().weight
    trunk = [
        parameter
        for name, parameter in model.base_model.named_parameters()
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 2  # the shape before ZeRO-3 sharded it
        and parameter is not embeddings
        and (id(parameter) in trained or "lora_" not in name)
    ]
    of_head = [model.get_output_embeddings().weight] if POLICY in pass_.trains else []
    of_trunk, of_head = (sum(num_weights(p) * (6 if id(p) in trained else 4) for p in ps) for ps in (trunk, of_head))
    return of_trunk, of_head


def product_rate(roles: ModelRoles) -> float:
    """``matrix_rate`` on the device of the roles, in the dtype of the policy's matrix products."""
    weight = roles.policy.get_output_embeddings().weight
    return matrix_rate(roles.device, roles.autocast_dtype or weight.dtype)


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second in the product of two square matrices of this dtype, the best of a few, by
    the same routine as in a model."""
    multiply = product_of_many(dtype) if device.type == "cpu" else torch.matmul
    n = 512 if device.type == "cpu" else 4096
    matrix, best, begun = torch.ones(n, n, dtype=dtype, device=device), float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begun < RATE_SECONDS:
        start = time.perf_counter()
        multiply(matrix, matrix)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def with_rates(values: dict[str, float], rate: float) -> dict[str, float]:
    """An update's metrics with those derived from its costs: seconds outside of all phases if those of the whole update
    are known, tokens per second, and the share of ``rate`` that is used.

    Args:
        rate: of matrix products, in operations per second.
    """
    seconds = {name: values[f"time/{name}_s"] for name in PHASES if f"time/{name}_s" in values}
    if "time/step_s" in values:
        values = values | {"time/rest_s": values["time/step_s"] - sum(seconds.values())}
    for name in ("rollout", "update"):
        if f"tokens/{name}" in values and seconds.get(name):
            values[f"speed/{name}"] = values[f"tokens/{name}"] / seconds[name]
    if "flops/update" in values and seconds.get("update"):
        values["speed/mfu"] = values["flops/update"] * 1e12 / seconds["update"] / rate
    return values
