"""While tests run, a call within Tether with a wrong type or shape fails, whatever kind of function is called."""

import importlib.util
import inspect
import sys

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from tests.checked import Loader
from tether.algo.masking import masked_mean
from tether.types import Prompt

MODULE = """
from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from jaxtyping import Float
from torch import Tensor
if TYPE_CHECKING:
    from nowhere import Unknown

def doubled(x: int) -> int:
    return x * 2

def same(x: float) -> int:
    return x

def halves(x: Float[Tensor, "B R"], y: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    return x[:, 0] + y[0]

def outer(x: object) -> object:
    def inner(x: int) -> int:
        return x
    return inner(x)

@contextmanager
def opened(x: int) -> Iterator[int]:
    yield x

async def awaited(x: int) -> int:
    return x

@dataclass(frozen=True)
class Record:
    x: int
    later: Later | None = None

class Later:
    def __init__(self, x: int) -> None:
        self.x = x

    def copy(self, x: int) -> Later:
        return self

    @property
    def wrong(self) -> str:
        return self.x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def made(cls, x: int) -> Later:
        return cls(0)

def unknown(x: Unknown, y: int) -> int:
    return y
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "module.py"
    path.write_text(MODULE, encoding="utf-8")
    loader = Loader("module", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("module", loader))
    sys.modules["module"] = module  # where data classes look
    loader.exec_module(module)
    yield module
    del sys.modules["module"]


CALLS = {
    "argument": lambda module, x: module.doubled(x),
    "of a function within another": lambda module, x: module.outer(x),
    "of a context manager": lambda module, x: module.opened(x).__enter__(),
    "of a coroutine": lambda module, x: module.awaited(x).send(None),
    "of a data class": lambda module, x: module.Record(x),
    "of a class": lambda module, x: module.Later(x),
    "of a method": lambda module, x: module.Later(1).copy(x),
    "of a static method": lambda module, x: module.Later.static(x),
    "of a class method": lambda module, x: module.Later.made(x),
    "beside one that type checkers alone know": lambda module, x: module.unknown(None, x),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_type_fails(module, call):
    try:
        CALLS[call](module, 1)
    except StopIteration as ended:
        assert ended.value == 1
    with pytest.raises(BeartypeCallHintViolation):
        CALLS[call](module, "1")


def test_a_wrong_result_fails(module):
    assert module.same(2) == 2, "a whole number is a float"
    with pytest.raises(BeartypeCallHintViolation):
        module.same(0.5)
    with pytest.raises(BeartypeCallHintViolation):
        assert module.Later(1).wrong


@pytest.mark.parametrize("sizes", [((2, 3), (2,)), ((2, 3), (3,)), ((2,), (2,)), ((2, 3), (2, 3))])
def test_shapes_of_a_call_fit_each_other(module, sizes):
    x, y = map(torch.ones, sizes)
    if sizes == ((2, 3), (2,)):
        assert module.halves(x, y).shape == (2,)
    else:
        with pytest.raises(TypeCheckError):
            module.halves(x, y)
    with pytest.raises(TypeCheckError):
        module.halves(torch.ones(2, 3, dtype=torch.int64), torch.ones(2))


def test_what_is_known_of_a_function_stays(module):
    assert module.doubled.__name__ == "doubled" and module.doubled.__annotations__ == {"x": "int", "return": "int"}
    assert str(inspect.signature(module.halves)) == str(inspect.signature(inspect.unwrap(module.halves)))


def test_a_module_is_compiled_once(module, tmp_path):
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    before = compiled.stat().st_mtime_ns
    assert "checked" in compiled.name, "that of Python's own loader is another"
    Loader("module", str(tmp_path / "module.py")).get_code("module")
    assert compiled.stat().st_mtime_ns == before


def test_tether_itself_is_checked():
    with pytest.raises(TypeCheckError):
        masked_mean(torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(BeartypeCallHintViolation):
        Prompt("row", "the cat", "the cat", (7, 20))
