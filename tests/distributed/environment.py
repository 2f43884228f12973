"""What a launcher tells its processes: python -m tests.distributed.environment FILE writes it down in each of them."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def launched(name: str) -> dict[str, str]:
    """What ``accelerate launch`` tells two processes with a launch file that is shipped; asked once.

    Args:
        name: of the file, ``fsdp2``, ``zero1``, ….
    """
    file = ROOT / "examples" / "accelerate" / f"{name}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / f"{name}.told"
        options = ["--config_file", str(file), "--num_processes", "2", "-m", "tests.distributed.environment", str(told)]
        command = [sys.executable, "-m", "accelerate.commands.launch", *options]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        first, second = (json.loads(told.with_suffix(f".{rank}").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    return first


if __name__ == "__main__":
    told = {name: value for name, value in os.environ.items() if name.startswith(("FSDP_", "ACCELERATE_"))}
    Path(sys.argv[1]).with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(told), encoding="utf-8")
