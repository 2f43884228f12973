"""Modules beside reward files. Those that are imported by a bare name, as ``import helpers``, exist once in a process,
whichever file imports them; so two reward files cannot have different ones of the same name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

from tether.rewards.files import folders_of


@dataclass(frozen=True)
class _Module:
    """A module beside a reward file."""

    file: Path
    """The reward file."""
    folder: Path
    """The folder that contains the module."""
    source: Mapping[Path, bytes]
    """What its files contain, by their places in that folder."""


_held: dict[str, _Module] = {}
"""The modules by their names, each as the first file had it that imports one of that name."""


def clash(file: Path) -> str | None:
    """What is wrong if a reward file that is about to run, or a module beside it, imports one that would be another
    reward file's; None if nothing is.

    Args:
        file: full path of the reward file.
    """
    modules = _beside(file)
    for name, module in modules.items():
        held = _held.get(name, module)
        if held.folder != module.folder and held.source != module.source:
            return (
                f"{file} and {held.file} both import a module {name} that lies beside them, and these differ, but a "
                "process can import only one of that name. Rename one of them, or import them relatively "
                f"(from .{name} import …)"
            )
    for name, module in modules.items():
        _held.setdefault(name, module)
    return None


def _beside(file: Path) -> dict[str, _Module]:
    """The modules that a reward file finds beside itself by bare names, also by way of modules beside it.

    Those that something else has imported already are not found there.
    """
    found: dict[str, _Module] = {}
    seen, left = {file}, [file]
    while left:
        for package, name in _imported(left.pop()):
            if package is None and name in sys.modules and name not in _held:
                continue
            folder, files = _files(name, [package] if package is not None else folders_of(file))
            if package is None and files:
                found[name] = _Module(file, folder, {each.relative_to(folder): each.read_bytes() for each in files})
            left += [each for each in files if each not in seen]
            seen.update(files)
    return found


def _imported(file: Path) -> Iterator[tuple[Path | None, str]]:
    """The names that a file imports, with the folder of each that it imports relatively."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # told when it is run
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((None, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                first = [module] if module else [alias.name for alias in names]
                for package in file.parents[level - 1 : level] if level else [None]:
                    yield from ((package, name.partition(".")[0]) for name in first)


def _files(name: str, folders: Sequence[Path]) -> tuple[Path, list[Path]]:
    """The first folder that contains a module, and the files of that one; none of what is installed."""
    installed = {Path(get_path(kind)) for kind in ("purelib", "platlib")}
    for folder in folders:
        places = [] if folder in installed else [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]
        if files := [place for place in places if place.is_file()]:
            return folder, files
    return folders[0], []
