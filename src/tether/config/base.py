"""The base of every configuration section, and what several of them check."""

import fractions
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from tether.config.places import PLACES, why_no_name, why_not_there

Quantization = Literal["4bit", "8bit"]
"""How many bits the weights of linear layers are held in."""
LARGEST_DEFAULT = 8
"""The most rows in one forward and backward pass of a process if ``train.micro_batch_size`` is left out."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number from 0 to 1."""
HeldOut = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A share that leaves something to train on."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""What the generators of Python, NumPy and torch alike can begin with."""


def _named(path: Any) -> Any:
    if path == "":
        raise ValueError("got '', which would be the current folder; wanted the name of a folder, or . for this one")
    return path


OutputDir = Annotated[Path, BeforeValidator(_named)]
"""A folder to write to. What is left of a shell's variable that is not set is none."""


def check_precision(bf16: bool | None, fp16: bool) -> None:
    """Raises ``ValueError`` if autocast of two types is requested."""
    if bf16 and fp16:
        raise ValueError("bf16 and fp16 are both true: set one of them, preferably bf16 if the hardware supports it")


def check_warmup(ratio: float, steps: int | None) -> None:
    """Raises ``ValueError`` if the warm-up has two lengths."""
    if ratio and steps is not None:
        raise ValueError(f"warmup_ratio ({ratio:g}) and warmup_steps ({steps}) are both set: remove one of them")


def passes_over(count: int, num_epochs: float) -> fractions.Fraction:
    """The exact product of ``num_epochs`` and ``count``: 1.1 is eleven tenths, not a float."""
    return fractions.Fraction(str(num_epochs)) * count


def divisors(count: int, *, most: int) -> list[int]:
    """The divisors of ``count`` that are at most ``most``, the largest first."""
    return [size for size in range(most, 0, -1) if count % size == 0]


class Section(BaseModel):
    """A frozen group of keys that refuses unknown ones; a string under each field documents it everywhere."""

    REFUSED: ClassVar[tuple[str, ...]] = ()
    """Keys that it has from sections shared with others, and refuses; no page and no help names them."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _can_be_read_again(cls, value: Any, info: Any) -> Any:
        if _has_nul(value):
            raise ValueError(f"got {value!r}; wanted text without NUL, which the run's config.yaml could not hold")
        if info.field_name in PLACES:
            # what else a run has read may be gone by now, and its config.yaml is still read
            reason = why_not_there if info.field_name == "resume" else why_no_name
            for place in value if isinstance(value, list) else [value]:
                if isinstance(place, str | Path) and (why := reason(str(place))) is not None:
                    raise ValueError(why)
        return value


def _has_nul(value: Any) -> bool:
    """Whether any text in a value of a key holds a NUL; sections in it have been checked themselves."""
    if isinstance(value, str | Path):
        return "\0" in str(value)
    if isinstance(value, dict):
        return any(_has_nul(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_nul, value))


def differences(saved: Section, config: Section) -> dict[str, tuple[Any, Any]]:
    """The old and new value of each key that differs between two configurations, None where a key is absent, {} where
    there is a group of keys."""
    before, now = (_leaves(each.model_dump(mode="json")) for each in (saved, config))
    both = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    return {key: (old, new) for key, (old, new) in both.items() if old != new}


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {prefix: value}
    leaves = {prefix: {}} if prefix and isinstance(value, dict) else {}
    for key, child in items:
        leaves |= _leaves(child, f"{prefix}.{key}" if prefix else str(key))
    return leaves
