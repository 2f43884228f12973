"""The output of ``tether plan``."""

from __future__ import annotations

from tether.report.text import byte_size
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
    rows = [[r.role, r.parameters, r.trainable, r.dtype, byte_size(r.weight_bytes)] for r in plan.roles]
    display.table("parameters that each role adds and trains", ["role", "adds", "trains", "dtype", "memory"], rows)
    if plan.engines:
        _show_engines(plan, display)
    else:
        memory = [[phase, byte_size(most)] for phase, most in plan.memory.items()]
        display.table("peak memory, estimated", ["phase", "memory"], memory)
    for note in plan.notes:
        display.message(f"warning: {note}")
    if not plan.notes:
        display.message("nothing was found that would stop the run")


def _show_engines(plan: Plan, display: Display) -> None:
    rows = []
    for engine, memory in {"one process": plan.memory, **plan.engines}.items():
        loading = byte_size(plan.loading[engine]) if engine in plan.loading else ""
        rows.append([engine, *map(byte_size, memory.values()), loading])
    header = ["engine", *plan.memory, "host memory while loading"]
    display.table("peak memory of each process, estimated, by engine and phase", header, rows)
