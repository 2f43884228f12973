"""The lower bounds in pyproject.toml and the versions that ``make test-lowest`` installs are the same."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXACT = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(), re.M)


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_lowest_versions_tested_are_the_bounds():
    wanted = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", r).groups() for r in wanted if not r.startswith("tether["))
    tested = {normal(name): version for name, version in EXACT}
    for name, bound in bounds.items():
        version = tested[normal(name)]
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", version), f"{name}>={bound}, tested with {version}"
