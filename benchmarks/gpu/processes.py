"""Whether the multi-process engines work on GPUs: python benchmarks/gpu/processes.py [-o FOLDER], a few minutes

Trains a model of two layers with each launch file of examples/accelerate/, on all GPUs, in float32, with an equally
small reward model, and in one process without a launcher. Prints for each

    parameters   the largest difference from the single process, and how far that one moved
    NCCL         whether its processes communicated through it

One GPU is enough for ZeRO and NCCL: DeepSpeed shards weights over one process as it does over many. Exits with 1 if an
engine failed, differs by more than rounding, or communicated through something else. On a machine without GPUs two
processes communicate through gloo, to test the script.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tests.tiny import save_tiny  # noqa: E402
from tests.train.runs import tiny_run  # noqa: E402

from tether.config.load import dump_config  # noqa: E402

MOST = 1e-5
"""Maximum difference of parameters after two updates at a learning rate of 1e-3; beyond it an engine is wrong."""
AT_ONCE = 8
"""Number of answers of all processes in a forward; divisible by the number of processes."""


def main() -> int:
    """Runs every engine and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="*", default=["ddp", "fsdp2", "zero1", "zero2", "zero3"])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-processes"))
    given = parser.parse_args()
    folder, gpus = given.output.resolve(), torch.cuda.device_count()
    count = min(gpus, AT_ONCE) or 2
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny(folder / "judge", num_labels=1, seed=1)
    one, log = trained(folder, "one", [], 1)
    if one is None:
        print(log)
        return 1
    start, failed = load_file(folder / "llama-tied" / "model.safetensors"), False
    print(f"{count} processes, {'NCCL' if gpus else 'gloo'}; one process moved by {distance(one, start):.1e}")
    for engine in given.engines:
        file = ROOT / "examples" / "accelerate" / f"{engine}.yaml"
        launcher = ["accelerate.commands.launch", "--config_file", str(file)]
        if engine == "ddp" and count == 1:  # with one process Accelerate accepts no multi-GPU launch
            launcher = ["torch.distributed.run"]
        flag = "--nproc_per_node" if launcher[0] == "torch.distributed.run" else "--num_processes"
        weights, log = trained(folder, engine, [*launcher, flag, str(count), "-m"], count)
        talked = "NCCL version" in log
        if weights is None:
            print(f"{engine:6}  failed\n{log[-4000:]}")
        else:
            print(f"{engine:6}  parameters {distance(weights, one):.1e}  NCCL {'yes' if talked else 'no'}")
        failed |= weights is None or not distance(weights, one) <= MOST or talked != (gpus > 0)
    return int(failed)


def trained(folder: Path, name: str, launcher: list[str], count: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    """The policy that a run saved, None if it failed; and everything that its processes printed."""
    config = tiny_run(
        folder,
        rewards=[{"type": "model", "path": str(folder / "judge"), "batch_size": 2}],
        train__micro_batch_size=AT_ONCE // count,
        output_dir=str(folder / name),
        overwrite_output_dir=True,
        train__dry_step=True,
    )
    (folder / f"{name}.yaml").write_text(dump_config(config), encoding="utf-8")
    environment = os.environ | {"NCCL_DEBUG": "VERSION"}
    if not launcher and torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    command = [sys.executable, "-m", *launcher, "tether", "ppo", str(folder / f"{name}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    log = done.stdout + done.stderr
    return (load_file(folder / name / "model.safetensors") if done.returncode == 0 else None), log


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element; NaN if there is one."""
    return float(torch.stack([(x - theirs[name]).abs().max() for name, x in ours.items()]).max())


if __name__ == "__main__":
    sys.exit(main())
