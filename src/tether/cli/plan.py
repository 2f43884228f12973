"""How ``tether plan`` looks."""

from __future__ import annotations

from tether.train.display import Display
from tether.train.plan import Plan


def show_plan(plan: Plan, display: Display) -> None:
    """Shows the resolved configuration, the arithmetic of batches, the roles and the estimated memory."""
    display.message(plan.config)
    display.table("batches", ["what", "how many"], plan.arithmetic)
    header = ["role", "source", "parameters", "trainable", "dtype", "sharing", "weights"]
    display.table("roles", header, [
        [role.role, role.source, f"{role.parameters:,}", f"{role.trainable:,}", role.dtype, role.sharing,
         _gibibytes(role.weight_bytes)]
        for role in plan.roles
    ])  # fmt: skip
    display.table("peak memory, estimated", ["phase", "memory"], [[k, _gibibytes(v)] for k, v in plan.memory.items()])


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
