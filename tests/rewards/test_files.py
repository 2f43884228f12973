"""Reward files as modules: found by name in the processes of pools, members of their packages."""

import pickle
import sys

import pytest

from tether.errors import ConfigError
from tether.rewards.files import module_name
from tether.rewards.function import load_function

POOLED = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from {neighbour} import factor

def one(text):
    return factor * len(text), os.getpid(), "torch" in sys.modules

def f(prompts, completions, way):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(way[0])) as pool:
        found = list(pool.map(one, completions))
    assert all(pid != os.getpid() for _, pid, _ in found)
    assert way[0] != "spawn" or not any(has_torch for *_, has_torch in found), "the program ran again"
    return [score for score, *_ in found]
"""


@pytest.mark.parametrize(
    ("way", "neighbour"),
    [("spawn", "beside"), ("forkserver", "beside"), ("fork", "beside"), ("spawn", "..near"), ("spawn", ".near")],
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_functions_of_a_file_run_in_the_processes_of_a_pool(tmp_path, way, neighbour):
    """The file is in another folder than the current one, whose name no module could have. A forkserver may be there
    already, with whatever another test had it import."""
    folder = tmp_path / "v1.0 of my-judges" / "package" / "inner"
    folder.mkdir(parents=True)
    for name in ("beside.py", "near.py", "../near.py"):
        (folder / name).write_text("factor = 2.0\n")
    if neighbour.startswith("."):
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
    (folder / "judge.v2.py").write_text(POOLED.format(neighbour=neighbour))
    function = load_function(str(folder / "judge.v2.py"), "f", "rewards.0")
    assert function(["p", "p"], ["four", "to"], way=[way] * 2) == [8.0, 4.0]


def test_a_file_belongs_to_its_package_and_is_pickled_by_name(tmp_path):
    package = tmp_path / "judges"
    package.mkdir()
    (package / "__init__.py").write_text("weight = 3.0\n")
    (package / "short.py").write_text("from . import weight\ndef f(prompts, completions): return [weight]\n")
    function = load_function(str(package / "short.py"), "f", "rewards.0")
    assert function([], []) == [3.0] and pickle.loads(pickle.dumps(function)) is function
    name = module_name(package / "short.py", (package / "short.py").read_bytes())
    assert function.__module__ == name and name.endswith(".judges.short")
    assert "judges" not in sys.modules


def test_the_package_of_a_file_without_relative_imports_is_not_run(tmp_path):
    (tmp_path / "__init__.py").write_text("import no_such_package\n")
    (tmp_path / "judge.py").write_text("def f(prompts, completions): return [1.0]\n")
    assert load_function(str(tmp_path / "judge.py"), "f", "rewards.0")([], []) == [1.0]


def test_what_a_file_cannot_import_from_its_package_is_told(tmp_path):
    (tmp_path / "judge.py").write_text("from .no_such_neighbour import f\n")
    with pytest.raises(ConfigError, match=r"judge\.py cannot be run: ModuleNotFoundError: .*no_such_neighbour"):
        load_function(str(tmp_path / "judge.py"), "f", "rewards.0")


def test_a_file_that_changed_within_a_second_and_is_as_long_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "judge.py"
    for number in (1, 2, 1):
        file.write_text(f"def f(prompts, completions): return [{number}]\n")
        assert load_function(str(file), "f", "rewards.0")([], []) == [number]
    assert not (tmp_path / "__pycache__").exists()


SCORES = "def f(prompts, completions):\n    {late}\n    return [factor]\n"


def judges(folder, *, says, modules, factors=(1.0, 2.0)):
    """Two reward files in folders of their own, with modules of the same names beside them."""
    files = [folder / place / "judge.py" for place in ("a", "b")]
    for file, factor in zip(files, factors, strict=True):
        for name, text in modules.items():
            place = file.parent / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text.format(factor=factor))
        file.write_text(says)
    return [str(file) for file in files]


@pytest.mark.parametrize(
    ("says", "modules"),
    [
        (f"from twins import factor\n{SCORES.format(late='')}", {"twins.py": "factor = {factor}\n"}),
        (SCORES.format(late="from late_twins import factor"), {"late_twins.py": "factor = {factor}\n"}),
        (
            f"from twin_package.inner import factor\n{SCORES.format(late='')}",
            {"twin_package/__init__.py": "", "twin_package/inner.py": "factor = {factor}\n"},
        ),
        (
            f"from twin_folder.inner import factor\n{SCORES.format(late='')}",
            {"twin_folder/inner.py": "factor = {factor}\n"},
        ),
        (
            f"from same_twins import factor\n{SCORES.format(late='')}",
            {"same_twins.py": "from twins_of_twins import factor\n", "twins_of_twins.py": "factor = {factor}\n"},
        ),
        (
            f"from .own import factor\n{SCORES.format(late='')}",
            {"own.py": "import twins_of_own\nfactor = twins_of_own.factor\n", "twins_of_own.py": "factor = {factor}\n"},
        ),
    ],
)
def test_modules_of_one_name_beside_two_files_are_refused_if_they_differ(tmp_path, says, modules):
    first, second = judges(tmp_path, says=says, modules=modules)
    assert load_function(first, "f", "rewards.0")([], []) == [1.0]
    told = r"^rewards\.1\.path: .*/b/judge\.py and .*/a/judge\.py both import a module (\w+) .*\(from \.\1 import"
    for _ in range(2):
        with pytest.raises(ConfigError, match=told):
            load_function(second, "f", "rewards.1")
    with open(first, "a") as file:
        file.write("#")
    (tmp_path / "a" / next(reversed(modules))).write_text("factor = 3.0\n")  # which the process has imported
    assert load_function(first, "f", "rewards.0")([], []) == [1.0]


def test_each_file_has_its_own_module_if_it_imports_it_relatively(tmp_path):
    modules = {"relative_twins.py": "factor = {factor}\n"}
    files = judges(tmp_path, says=f"from .relative_twins import factor\n{SCORES.format(late='')}", modules=modules)
    assert [load_function(file, "f", "rewards.0")([], []) for file in files] == [[1.0], [2.0]]


def test_equal_modules_beside_two_files_and_modules_of_the_program_are_accepted(tmp_path):
    """A module that the program has imported is that one everywhere, whatever lies beside a file."""
    says = f"import math\nfrom equal_twins import factor\n{SCORES.format(late='')}"
    files = judges(tmp_path, says=says, modules={"equal_twins.py": "factor = 3.0\n", "math.py": "factor = {factor}\n"})
    assert [load_function(file, "f", "rewards.0")([], []) for file in files] == [[3.0], [3.0]]
