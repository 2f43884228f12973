"""The output of ``tether plan``."""

from __future__ import annotations

from tether.train.display import Display
from tether.train.plan import Plan


def show_plan(plan: Plan, display: Display) -> None:
    """Shows the resolved configuration, the arithmetic of batches, the roles and the estimated memory."""
    for line in plan.config.splitlines():
        display.message(line)
    display.table("batches", ["what", "how many"], plan.arithmetic)
    header = ["role", "source", "adds", "trains", "dtype", "memory", "sharing"]
    rows = []
    for role in plan.roles:
        numbers = [f"{role.parameters:,}", f"{role.trainable:,}", role.dtype, size(role.weight_bytes)]
        rows.append([role.role, role.source, *numbers, role.sharing])
    display.table("roles, and the parameters that each adds and trains", header, rows)
    if not plan.engines:
        display.table("peak memory, estimated", ["phase", "memory"], [[k, size(v)] for k, v in plan.memory.items()])
        return
    header = ["phase", "one process", *plan.engines]
    rows = [[k, size(v), *[size(each[k]) for each in plan.engines.values()]] for k, v in plan.memory.items()]
    loading = [size(plan.loading[name]) if name in plan.loading else "" for name in plan.engines]
    rows.append(["host memory while loading", "", *loading])
    display.table("peak memory of each process, estimated, by engine", header, rows)


def size(num_bytes: int) -> str:
    """A number of bytes in readable form: ``512 MiB``."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    number = num_bytes / 1024**power
    return f"{number:{'.0f' if number >= 1000 else '.3g'}} {units[power]}" if power else f"{num_bytes} bytes"
