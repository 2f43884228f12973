"""Writes what a launcher told this process into a file: python -m tests.distributed.environment FILE"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    told = {name: value for name, value in os.environ.items() if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))}
    Path(sys.argv[1]).with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(told), encoding="utf-8")
