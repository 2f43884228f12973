"""Reward files as modules that any process can import by their names.

The file ``/home/me/judges/short.py`` is the module ``tether.rewards.files./home/me/judges.short``, with its full path:
two files of the same name never clash. A process of a pool gets a function by the name of its module and finds the file
by that name alone. A file with relative imports in a package, a folder with ``__init__.py``, is a module of that
package, below the path of the folder that contains it. Without them, the package is none of its business and is not
run.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from urllib.parse import quote, unquote_to_bytes

_run: dict[str, bytes] = {}
"""The source of every file that is a module now."""


def file_module(file: Path, source: bytes) -> ModuleType:
    """The module that a file defines, which runs again if its source has changed.

    Args:
        file: full path.
        source: its content.
    """
    name = module_name(file, source)
    if _run.get(name) != source:
        sys.modules.pop(name, None)
    module = import_module(name)
    _run[name] = source
    return module


def module_name(file: Path, source: bytes) -> str:
    """The name under which a file can be imported."""
    root = _root(file) if _imports_relatively(source) else file.parent
    parts = [str(root), *file.relative_to(root).with_suffix("").parts]
    return ".".join([__name__, *map(_quoted, parts)])


def folders_of(file: Path) -> tuple[Path, Path]:
    """Where a file's imports are searched first: its folder, then the one that contains its package."""
    return file.parent, _root(file)


@contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """A context in which imports search ``folder`` first, like the folder of a script; afterwards they search it last,
    for imports within function calls: nothing in it then hides modules that the run has yet to import."""
    place = str(folder)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        if place in sys.path:  # the imported code may have changed it
            sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


class _Finder(MetaPathFinder):
    """Finds the folders, packages and files that ``module_name`` names, and modules that they import relatively."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        root, *parts = (_unquoted(part) for part in fullname.removeprefix(f"{__name__}.").split("."))
        if not parts:
            folder = ModuleSpec(fullname, None, is_package=True)
            folder.submodule_search_locations = [root]
            return folder
        place = Path(root, *parts)
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))
        return None


class _Loader(SourceFileLoader):
    """Runs a file as it is now, without a cache of its bytecode; its imports search its own folder first."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        first, last = folders_of(Path(self.path))
        with imports_from(last), imports_from(first):
            super().exec_module(module)


def _imports_relatively(source: bytes) -> bool:
    try:
        return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # told when it is run
        return False


def _root(file: Path) -> Path:
    """The first folder above a file that is no package."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file() or folder == folder.parent)


def _quoted(part: str) -> str:
    """A part of a path without dots, which separate modules."""
    return quote(os.fsencode(part), safe="/ ").replace(".", "%2E")


def _unquoted(part: str) -> str:
    return os.fsdecode(unquote_to_bytes(part))


sys.meta_path.insert(0, _Finder())
