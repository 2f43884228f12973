"""What importing Tether loads, each in a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "trl")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that an interpreter holds after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["tether", "tether.errors", "tether.config", "tether.config.schema", "tether.config.load"]
)
def test_light_modules_load_nothing_heavy(module):
    loaded = loaded_by(f"import {module}")
    assert "tether" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_algorithm_loads_torch_and_no_other_framework():
    loaded = loaded_by("import tether.algo")
    assert "torch" in loaded
    assert loaded.isdisjoint(set(HEAVY) - {"torch"})


def test_a_heavy_module_is_seen_where_it_is_loaded():
    assert "transformers" in loaded_by("import tether.algo, transformers")
