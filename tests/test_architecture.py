"""Who may import whom, read from the source of every module. ``docs/architecture.md`` says why."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

LEVELS = {
    "errors": 0, "types": 0, "algo": 0, "config": 0,
    "data": 1, "models": 1, "metrics": 1, "report": 1,
    "rewards": 2, "generation": 2, "machine": 2,
    "train": 3, "stages": 3,
    "inference": 4, "compat": 4, "demo": 4, "pipeline": 4,
    "cli": 5,
    "__main__": 6,
}  # fmt: skip
ALONE = {
    "tether.algo": {"torch", "jaxtyping", "tether.algo"},
    "tether.config": {"pydantic", "pydantic_core", "yaml", "tether.config", "tether.errors"},
    "tether.errors": set(),
}
"""Packages that import nothing but these and the standard library."""
OPTIONAL = {"trl": {"stages", "demo"}, "matplotlib": {"report"}, "vaderSentiment": {"demo"}, "gguf": {"demo"}}
"""Packages of an extra, with the parts that may import them; any other one belongs into a module of its own name."""
LATE = {"tether.stages.trl"}
"""Modules that need a package of an extra, and are themselves imported inside the function that needs them."""
PRIVATE = {
    "tether.models.products": {"torch.ops.mkldnn._linear_pointwise"},  # does without it where it is missing
    "tether.cli.launched": {"os._exit"},  # public, by the documentation of Python
}
"""Names that look private and that a module may reach all the same."""
IMPORT_NAMES = {"pyyaml": "yaml"}
"""Distributions that are imported under another name."""


def declared_packages() -> set[str]:
    """Import names of the packages that a plain installation brings."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = (re.match(r"[\w.-]+", requirement).group() for requirement in requirements)
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


DECLARED = declared_packages()


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a.b import c`` is module a.b and name c, ``import a.b`` has no name."""

    module: str
    name: str | None
    line: int
    is_lazy: bool

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import of a module, those inside functions and by ``import_module("…")`` included."""
    lazy = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        line, is_lazy = getattr(node, "lineno", 0), id(node) in lazy
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, None, line, is_lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (Import("." * level + (module or ""), alias.name, line, is_lazy) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module" | "find_spec") | ast.Name(id="import_module" | "find_spec"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module, None, line, is_lazy)


def private_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes with a leading underscore that are reached through an imported name."""
    bound = {(alias.asname or alias.name.split(".")[0]) for node in ast.walk(tree)
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield node.lineno, ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def faults(module: str, source: str) -> list[str]:
    """What the module ``module`` may not do, a line each."""
    tree = ast.parse(source)
    if module == "tether":  # it names what it offers for type checkers, and imports that when it is first used
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).split(":")[0]]
    allowed = PRIVATE.get(module, set())
    found = [f"{line}: {name} is private" for line, name in private_attributes(tree) if name not in allowed]
    for each in imports(tree):
        found += [f"{each.line}: {fault}" for fault in import_faults(module, each)]
    return found


def import_faults(module: str, each: Import) -> Iterator[str]:
    if each.module.startswith("."):
        yield f"relative import of {each.module}"
        return
    if each.package in sys.stdlib_module_names:
        return
    target = resolved(each)
    for package, allowed in ALONE.items():
        if within(module, package) and not any(within(target, name) for name in allowed):
            yield f"{package} may not import {target}"
    if target in LATE and not each.is_lazy:
        yield f"{target} needs an optional package: import it inside the function that needs it"
    if each.package == "tether":
        yield from level_faults(module, target)
    else:
        yield from package_faults(module, each)
    own = each.package == "tether" and part(module) == part(target)
    names = [*each.module.split("."), *([each.name] if each.name else [])]
    if not own and any(is_private(name) for name in names):
        yield f"{'.'.join(names)} is private"


def level_faults(module: str, target: str) -> Iterator[str]:
    here, there = part(module), part(target)
    if there == "__version__":
        return
    if here == "":
        yield f"the root package may not import {target} when it is imported itself"
    elif there not in LEVELS:
        yield f"{target} has no level: import from the module that defines it"
    elif here != there and LEVELS[there] and LEVELS[there] >= LEVELS[here]:
        yield f"{here} is level {LEVELS[here]}, {there} is level {LEVELS[there]}"


def package_faults(module: str, each: Import) -> Iterator[str]:
    if each.package in DECLARED:
        return
    homes = OPTIONAL.get(each.package, set())
    if part(module) not in homes and module.split(".")[-1] != each.package:
        yield f"{each.package} is not in the dependencies, and this is not its module"
    elif not each.is_lazy and module not in LATE:
        yield f"{each.package} is optional: import it inside the function that needs it"


def resolved(each: Import) -> str:
    """The module that an import reaches: ``from tether import algo`` is tether.algo."""
    return f"tether.{each.name}" if each.module == "tether" and each.name else each.module


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def part(module: str) -> str:
    """The part of Tether that a module belongs to; empty for the root package."""
    return [*module.split("."), ""][1]


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted((SOURCE / "tether").rglob("*.py")):
        *folders, file = path.relative_to(SOURCE).with_suffix("").parts
        names[".".join(folders if file == "__init__" else [*folders, file])] = path
    return names


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=modules())
def test_imports_point_down(module, path):
    assert faults(module, path.read_text(encoding="utf-8")) == []


def test_every_part_has_a_level():
    assert {part(module) for module in modules()} - {""} <= set(LEVELS)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("tether.data.prompts", "from tether.models.loading import x", "data is level 1, models is level 1"),
        ("tether.rewards.model", "import tether.generation.hf", "rewards is level 2, generation is level 2"),
        ("tether.models.roles", "def f():\n    from tether.train import run", "models is level 1, train is level 3"),
        ("tether.types", "from tether.models import x", "types is level 0, models is level 1"),
        ("tether.train.run", "from tether import cli", "train is level 3, cli is level 5"),
        ("tether.train.run", "from tether import PPOTrainer", "tether.PPOTrainer has no level"),
        ("tether", "from tether.train.run import train_policy", "the root package may not import tether.train.run"),
        ("tether.train.run", "from . import trainer", "relative import"),
        ("tether.algo.kl", "import tether.types", "tether.algo may not import tether.types"),
        ("tether.algo.kl", "import numpy", "tether.algo may not import numpy"),
        ("tether.algo.kl", "from transformers import x", "tether.algo may not import transformers"),
        ("tether.config.schema", "def f():\n    import torch", "tether.config may not import torch"),
        ("tether.config.schema", "from tether.types import Prompt", "tether.config may not import tether.types"),
        ("tether.errors", "import torch", "tether.errors may not import torch"),
        ("tether.train.run", "def f():\n    import trl", "trl is not in the dependencies"),
        ("tether.stages.reward", "from trl import RewardTrainer", "trl is optional: import it inside"),
        ("tether.stages.sft", "from tether.stages.trl import SftArguments", "trl needs an optional package: import"),
        ("tether.train.run", "import importlib\nimportlib.import_module('vllm')", "vllm is not in the dependencies"),
        ("tether.models.roles", "from torch._C import x", "torch._C.x is private"),
        ("tether.models.roles", "from peft.utils import _get_submodules", "peft.utils._get_submodules is private"),
        ("tether.models.roles", "import torch\ntorch.nn.modules._functions", "torch.nn.modules._functions is private"),
        ("tether.train.run", "from tether.models.roles import _helper", "tether.models.roles._helper is private"),
    ],
)
def test_a_planted_fault_is_found(module, source, fault):
    assert any(fault in found for found in faults(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tether.train.run", "from tether import algo, __version__\nfrom tether.models.roles import ModelRoles"),
        ("tether.models.roles", "from tether.models.heads import _scale\nself._x = 1"),
        ("tether.stages.reward", "def f():\n    from trl import RewardTrainer"),
        ("tether.generation.vllm", "def f():\n    import vllm"),
        ("tether.algo.kl", "import math\nimport torch.nn.functional as F\nfrom tether.algo.masking import wide"),
        ("tether.cli.main", "import torch\ntorch.__version__"),
    ],
)
def test_what_is_allowed_is_no_fault(module, source):
    assert faults(module, source) == []


@pytest.mark.parametrize("path", [path for name, path in modules().items() if part(name) in ("algo", "train")])
def test_no_mean_over_padding(path):
    """A mean over tokens takes its mask: ``masked_mean`` or ``Metrics.mean("name", …)``, never ``x.mean()``."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    means = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "mean"]
    collectors = ("metrics.mean", "drift.mean")
    assert [ast.unparse(call) for call in means if not ast.unparse(call.func).endswith(collectors)] == []
