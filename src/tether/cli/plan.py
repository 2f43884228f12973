"""The output of ``tether plan``."""

from __future__ import annotations

from tether.train.display import Display, tell_sources
from tether.train.plan import Plan


def show_plan(plan: Plan, display: Display, *, whole: bool = False) -> None:
    """Shows the settings, the arithmetic of batches, the roles, the estimated memory, and at last, where it is seen,
    what may go wrong.

    Args:
        whole: whether to show every key of the configuration, not only those that are not at their defaults.
    """
    if not whole:
        display.message("settings that are not defaults (--config shows every key):")
    for line in (plan.config if whole else plan.settings).splitlines():
        display.message(line if whole else f"  {line}")
    display.table("batches", ["what", "how many"], plan.arithmetic)
    tell_sources([(role.role, role.source, role.sharing) for role in plan.roles], display)
    rows = [[role.role, role.parameters, role.trainable, role.dtype, size(role.weight_bytes)] for role in plan.roles]
    display.table("parameters that each role adds and trains", ["role", "adds", "trains", "dtype", "memory"], rows)
    if plan.engines:
        _show_engines(plan, display)
    else:
        display.table("peak memory, estimated", ["phase", "memory"], [[k, size(v)] for k, v in plan.memory.items()])
    for note in plan.notes:
        display.message(f"warning: {note}")
    if not plan.notes:
        display.message("nothing was found that would stop the run")


def _show_engines(plan: Plan, display: Display) -> None:
    rows = []
    for engine, memory in {"one process": plan.memory, **plan.engines}.items():
        loading = size(plan.loading[engine]) if engine in plan.loading else ""
        rows.append([engine, *map(size, memory.values()), loading])
    header = ["engine", *plan.memory, "host memory while loading"]
    display.table("peak memory of each process, estimated, by engine and phase", header, rows)


def size(num_bytes: int) -> str:
    """A number of bytes in readable form: ``512 MiB``."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    number = num_bytes / 1024**power
    return f"{number:{'.0f' if number >= 1000 else '.3g'}} {units[power]}" if power else f"{num_bytes} bytes"
