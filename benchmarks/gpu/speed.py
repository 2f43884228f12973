"""How close a GPU comes to its limits: python benchmarks/gpu/speed.py [--skip-trl] [-o FOLDER], about ten minutes

Two jobs on random weights, answers of exactly 512 tokens, pure bfloat16: full fine-tuning of a Qwen2 of 0.5B
parameters, and LoRA on one of 1.5B, four roles on one base. Prints for each

    decode     tokens per second, and the share of what the memory bandwidth allows:
                   rows · bandwidth / (bytes of the weights + bytes of the rows' keys and values, half full)
               in a growing cache, and in one of fixed size with the forward of a token compiled
    update     10¹² operations per second, and the share of the rate of the GPU's own matrix product
    episodes   per second, and peak memory; both relative to TRL 1.12.0 (--skip-trl: Tether alone)

--tiny runs the same on any machine with a model of two layers, to test the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, this folder alone would be searched

import torch  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer  # noqa: E402

from benchmarks.peers.job import Job, Outcome  # noqa: E402

SHAPES = {
    "0.5B, full": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B, LoRA": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 1}


def main() -> int:
    """Runs both jobs and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-trl", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench-gpu"))
    given = parser.parse_args()
    peers, results = peers_script(), {}
    rate = None if given.tiny else bandwidth()
    for name, shape in SHAPES.items():
        folder = (given.output / name.replace(", ", "-")).resolve()
        model = save_random(folder / "model", TINY if given.tiny else shape, 512 if given.tiny else 151_936)
        job = Job(
            **peers.material(model, folder),
            episodes=4 if given.tiny else 64,
            micro=2 if given.tiny else 8,
            decoded=64,
            tokens=16 if given.tiny else 512,
            updates=2 if given.tiny else 3,
            lora="LoRA" in name,
            bfloat16=True,
        )
        sides = {
            "tether": peers.outcome("tether", job, folder / "tether"),
            "static": peers.outcome("tether", replace(job, cache="static"), folder / "static"),
        }
        if not given.skip_trl:
            sides["trl"] = peers.outcome("trl", job, folder / "trl")
        print(name)
        for line in lines(job, sides, model, rate):
            print(f"  {line}", flush=True)
        results[name] = {side: asdict(outcome) for side, outcome in sides.items()}
        (given.output / "speed.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


def lines(job: Job, sides: dict[str, Outcome], model: Path, rate: float | None) -> list[str]:
    """The lines to print about a job.

    Args:
        rate: memory bandwidth of the device in bytes per second, read and written; None if not of interest.
    """
    ours, said, told = sides["tether"], sides["tether"].details, []
    for side, kind in (("tether", "in a cache that grows"), ("static", "in one of fixed size, compiled")):
        speed = sides[side].details["speed/rollout"]
        told.append(f"decode {kind}: {speed:,.0f} tokens/s")
        if rate is not None:
            bound = min(job.decoded, job.episodes) * rate / step_bytes(job, model)
            told[-1] += f", {speed / bound:.1%} of the {bound:,.0f} that the bandwidth allows"
    flops = said["flops/update"] / said["time/update_s"]
    told.append(f"update: {flops:.2f} · 10¹² operations/s, {said['speed/mfu']:.1%} of the matrix rate")
    for side, outcome in sides.items():
        told.append(f"{side}: {outcome.episodes_per_second(job):.3f} episodes/s, {outcome.peak_gib:.2f} GiB at most")
    if "trl" in sides:
        theirs = sides["trl"]
        speed = ours.episodes_per_second(job) / theirs.episodes_per_second(job)
        memory = ours.peak_gib / theirs.peak_gib
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
