"""Types and shapes of all calls within Tether are checked while its tests run.

Each function is decorated as its module is imported: by jaxtyping where arrays with shapes are among its arguments or
its result, since the shapes of one call must fit each other, and by beartype alone where there are none. If jaxtyping
decorated all of them, which would check the same, the checks would take longer than the tests.
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

PACKAGE = "tether"
by_type = beartype(conf=BeartypeConf(is_pep484_tower=True))
by_type_and_shape = jaxtyping.jaxtyped(typechecker=by_type)


def check_calls() -> None:
    """From now on, functions of modules of Tether that are imported check what they are given and what they return."""
    assert PACKAGE not in sys.modules, "it was imported too early to be checked"
    sys.meta_path.insert(0, Finder())


def checked(made: Any) -> Any:
    """A function, or a data class, that checks its calls."""
    if inspect.isclass(made):
        if "__dataclass_fields__" in vars(made) and "__init__" in vars(made):
            made.__init__ = checked(made.__init__)
        return made
    hints = {name: _meant(written, made.__globals__) for name, written in made.__annotations__.items()}
    if any(map(_has_shape, hints.values())):
        return by_type_and_shape(made)
    written, made.__annotations__ = made.__annotations__, hints
    try:
        function = by_type(made)
    finally:
        made.__annotations__ = written
    function.__annotations__ = written
    return function


def _meant(written: Any, names: dict[str, Any]) -> Any:
    """An annotation as an object: anything, if it names what is not there yet or is there for type checkers only."""
    try:
        return typing.get_type_hints(SimpleNamespace(__annotations__={"it": written}), names, include_extras=True)["it"]
    except NameError:
        return Any


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


class Finder(MetaPathFinder):
    """Finds modules of Tether."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Decorates what a module defines, and keeps the compiled module beside that of Python's own loader."""

    SUFFIX = f".checked-{zlib.crc32(Path(__file__).read_bytes()):08x}.pyc"

    def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.decorator_list.append(ast.copy_location(ast.Name("@checked", ast.Load()), node))
            elif isinstance(node, ast.ClassDef):
                node.decorator_list.insert(0, ast.copy_location(ast.Name("@checked", ast.Load()), node))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["@checked"] = checked
        super().exec_module(module)

    def get_data(self, path: Any) -> bytes:
        return super().get_data(self._own(path))

    def set_data(self, path: Any, data: Any, **options: Any) -> None:
        super().set_data(self._own(path), data, **options)

    def _own(self, path: str) -> str:
        return path.removesuffix(".pyc") + self.SUFFIX if path.endswith(".pyc") else path
