"""TRL 1.12.0, the last release that has the PPO trainer, if need be in its own environment: .peers/trl-1.12."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRL_ENVIRONMENT = ROOT / ".peers" / "trl-1.12"
TRL_VERSION = "1.12.0"
TRL_PACKAGES = ("torch==2.13.0", f"trl=={TRL_VERSION}", "peft", "jaxtyping")


def trl_python() -> Path:
    """A Python with this version of TRL: the one that runs, or that of TRL's environment, which is created the first
    time."""
    if find_spec("trl") is not None and version("trl") == TRL_VERSION:
        return Path(sys.executable)
    python, complete = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / "complete"
    if not complete.exists():
        say(f"installing {', '.join(TRL_PACKAGES)} into {TRL_ENVIRONMENT}")
        venv.create(TRL_ENVIRONMENT, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)
        complete.touch()
    return python


def say(text: str) -> None:
    """Prints progress, separately from the table."""
    print(text, file=sys.stderr, flush=True)
