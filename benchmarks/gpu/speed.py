"""How close a GPU comes to its limits: python benchmarks/gpu/speed.py [--sides NAME …] [-o FOLDER], about ten minutes

Two jobs on random weights, answers of exactly 512 tokens, pure bfloat16: full fine-tuning of a Qwen2 of 0.5B
parameters, and LoRA on one of 1.5B, four roles on one base. Three sides, one after the other on both jobs, each in its
own process:

    tether   decoding in a growing cache: tokens per second, and the share of what the memory bandwidth allows,
                 rows · bandwidth / (bytes of the weights + bytes of the rows' keys and values, half full);
             the update: 10¹² operations per second, and the share of the rate of the GPU's own matrix product;
             episodes per second, and peak memory
    trl      TRL 1.12.0 on the same job: episodes per second and peak memory, and Tether's relative to them
    static   decoding in a cache of fixed size with the forward of a token compiled, likewise

What a side measured is printed, and written to speed.json, as soon as it is done. If a side fails, the others run.
After --minutes, the side that is running is stopped and no other is started. Exits with 1 if one is missing. TRL runs
in the same Python if that has this version, otherwise in an environment of its own, made the first time.

--tiny runs the same on any machine with a model of two layers, to test the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer  # noqa: E402

import benchmarks.peers.tether_ppo  # noqa: E402, F401 - a package that is missing is missed at once
from benchmarks.peers.job import Job, Outcome, SideFailed  # noqa: E402

SHAPES = {
    "0.5B, full": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B, LoRA": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES = ("tether", "trl", "static")
"""The last one compiles, which takes longest."""
GROWS = "its cache is not one of fixed size"
"""What the log of a run says that decodes in a growing cache although it was to use one of fixed size."""
SHARED = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 1}


def main() -> int:
    """Runs every side on both jobs and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--minutes", type=float, default=9.5, help="time for all of them together")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-gpu"))
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; --tiny runs without one")
    end = time.monotonic() + 60 * given.minutes
    peers, rate = peers_script(), None if given.tiny else bandwidth()
    results: dict[str, dict[str, Outcome]] = {name: {} for name in SHAPES}
    for side in given.sides:
        for name in SHAPES:
            print(f"{name}: {side}", flush=True)
            if time.monotonic() > end:
                print("  not started: the time is over", flush=True)
                continue
            try:
                job = job_of(name, given.output, peers, is_tiny=given.tiny)
                of_side = replace(job, cache="static") if side == "static" else job
                system, folder = "trl" if side == "trl" else "tether", Path(job.folder) / side
                outcome = peers.outcome(system, of_side, folder, limit=end - time.monotonic())
                if side == "static" and GROWS in (folder / "log.txt").read_text(encoding="utf-8"):
                    raise SideFailed(f"its cache grew after all; {folder / 'log.txt'} says why")
            except (SideFailed, subprocess.SubprocessError, OSError) as error:
                print(f"  failed: {error}", flush=True)
                continue
            results[name][side] = outcome
            for line in lines(side, job, results[name], rate):
                print(f"  {line}", flush=True)
            measured = {name: {side: asdict(seen) for side, seen in sides.items()} for name, sides in results.items()}
            (given.output / "speed.json").write_text(json.dumps(measured, indent=1), encoding="utf-8")
    return 0 if all(side in sides for sides in results.values() for side in given.sides) else 1


def job_of(name: str, output: Path, peers, *, is_tiny: bool) -> Job:
    """The job on a model of one of ``SHAPES``, whose files are written unless they exist."""
    folder = (output / name.replace(", ", "-")).resolve()
    model = save_random(folder / "model", TINY if is_tiny else SHAPES[name], 512 if is_tiny else 151_936)
    return Job(
        **peers.material(model, folder),
        episodes=4 if is_tiny else 64,
        micro=2 if is_tiny else 8,
        decoded=64,
        tokens=16 if is_tiny else 512,
        updates=2 if is_tiny else 3,
        lora="LoRA" in name,
        bfloat16=True,
    )


def lines(side: str, job: Job, seen: dict[str, Outcome], rate: float | None) -> list[str]:
    """The lines to print about a side.

    Args:
        seen: the outcome of this side, and of those before it.
        rate: memory bandwidth of the device in bytes per second, read and written; None if not of interest.
    """
    outcome, said, told = seen[side], seen[side].details, []
    if side != "trl":
        kind = {"tether": "in a cache that grows", "static": "in one of fixed size, compiled"}[side]
        told.append(f"decode {kind}: {said['speed/rollout']:,.0f} tokens/s")
        if rate is not None:
            bound = min(job.decoded, job.episodes) * rate / step_bytes(job, Path(job.model))
            told[-1] += f", {said['speed/rollout'] / bound:.1%} of the {bound:,.0f} that the bandwidth allows"
    if side == "tether":
        flops = said["flops/update"] / said["time/update_s"]
        told.append(f"update: {flops:.2f} · 10¹² operations/s, {said['speed/mfu']:.1%} of the matrix rate")
    told.append(f"{outcome.episodes_per_second(job):.3f} episodes/s, {outcome.peak_gib:.2f} GiB at most")
    if side == "trl" and "tether" in seen:
        ours = seen["tether"]
        speed = ours.episodes_per_second(job) / outcome.episodes_per_second(job)
        memory = ours.peak_gib / outcome.peak_gib
        told.append(f"Tether over TRL: {speed:.2f} times the episodes/s, {memory:.2f} of the memory")
    return told


def step_bytes(job: Job, model: Path) -> int:
    """Bytes that one decoding step has to read: the weights, and keys and values of half-written rows."""
    config = AutoConfig.from_pretrained(model)
    weights = (model / "model.safetensors").stat().st_size
    width = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return weights + 2 * min(job.decoded, job.episodes) * (job.tokens // 2) * config.num_hidden_layers * width


def bandwidth() -> float:
    """Bytes per second, read and written, of a copy within the GPU's memory, best of a few."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * source.numel() / (time.perf_counter() - start))
    return best


def save_random(folder: Path, shape: dict[str, int], vocab_size: int) -> Path:
    """Saves a Qwen2 of this shape with random bfloat16 weights and a tokenizer of single bytes, unless it exists."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", vocab_size=vocab_size, tie_word_embeddings=True, **SHARED | shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    names = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    vocab = {token: i for i, token in enumerate((*names.values(), *sorted(ByteLevel.alphabet())))}
    Qwen2Tokenizer(vocab=vocab, merges=[], **names).save_pretrained(folder)
    return folder


def peers_script():
    """The script benchmarks/peers.py, which shares its name with the package of its sides."""
    spec = importlib.util.spec_from_file_location("peers_script", ROOT / "benchmarks" / "peers.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


if __name__ == "__main__":
    sys.exit(main())
