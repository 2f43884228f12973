"""Whether the engines of several processes work on GPUs: python benchmarks/gpu/processes.py [-o FOLDER], some minutes

Trains a model of two layers by each launch file of examples/accelerate/, on every GPU that there is, in float32, with a
reward model as small, and by one process without a launcher. Prints for each

    parameters   the largest difference from the one process, and how far that moved
    NCCL         whether its processes talked through it

One GPU is enough for ZeRO and NCCL: DeepSpeed spreads weights over one process as it does over many. Ends with 1 if an
engine failed, is further off than rounding, or talked through something else. On a machine without GPUs two processes
talk through gloo, to try the script.
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
"""Parameters are this near after two updates at a learning rate of 1e-3, or an engine is wrong."""
AT_ONCE = 8
"""Answers of all processes in a forward; their number has to divide it."""


def main() -> int:
    """Runs every engine and prints what came of it."""
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
        if engine == "ddp" and count == 1:  # with one process Accelerate takes no launch of several GPUs
            launcher = ["torch.distributed.run"]
        flag = "--nproc_per_node" if launcher[0] == "torch.distributed.run" else "--num_processes"
        weights, log = trained(folder, engine, [*launcher, flag, str(count), "-m"], count)
        talked = "NCCL version" in log
        if weights is None:
            print(f"{engine:6}  failed\n{log[-4000:]}")
        else:
            print(f"{engine:6}  parameters {distance(weights, one):.1e}  NCCL {'yes' if talked else 'no'}")
        failed |= weights is None or distance(weights, one) > MOST or talked != (gpus > 0)
    return int(failed)


def trained(folder: Path, name: str, launcher: list[str], count: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    """The policy that a run left, None if it failed; and everything that its processes wrote."""
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
    """Largest difference of a number."""
    return max(float((x - theirs[name]).abs().max()) for name, x in ours.items())


if __name__ == "__main__":
    sys.exit(main())
