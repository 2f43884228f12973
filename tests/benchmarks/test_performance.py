"""The scripts that measure speed and memory run, and say what they promise to; how fast is not asked here."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from benchmarks.peers.environment import ROOT

from benchmarks import decode, flat, scaling, tricks
from tests.generation import stand_in_vllm
from tests.tiny import save_tiny
from tether.models.loading import load_causal_lm

SMALL = scaling.SHAPE | {"num_hidden_layers": 1}


def run(monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    return script.main()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama")


def test_decoding_is_profiled_beside_generate(monkeypatch, capsys, model):
    run(monkeypatch, decode, "--model", model, "--rows", 2, "--tokens", 3)
    head, names, *rows, share = capsys.readouterr().out.splitlines()
    assert head.startswith("2 rows, 3 tokens, float32") and names.split() == ["Tether", "generate"]
    assert [row[:12].strip() for row in rows] == ["products", "attention", "drawing", "cache", "all else", "sum"]
    assert rows[-1].count("100.0%") == 2 and share.startswith("products and attention: ")
    parts = [float(row[12:].split()[0]) for row in rows]
    assert parts[0] > 0 and parts[2] > 0 and sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.03)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_every_trick_is_measured_with_and_without(monkeypatch, capsys, model):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(tricks, "check_compile", lambda *given: None)  # which needs no compiler
    assert run(monkeypatch, tricks, "--model", model, "--repeats", 0, "--small") == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 2 + len(tricks.TRICKS) and all(len(row) == 4 for row in rows)
    assert len({row[0] for row in rows}) == len(rows)


def test_costs_are_drawn_and_promises_kept_to(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scaling, "episode_cost", lambda model, batch, tokens: batch**0.1 * tokens**1.1 / 1e3)
    arguments = ("--batches", 4, 8, "--lengths", 4, 16, "-o", tmp_path)
    assert run(monkeypatch, scaling, *arguments) == 0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(scaling, "episode_cost", lambda model, batch, tokens: batch**0.5 * tokens**1.5)
    assert run(monkeypatch, scaling, *arguments) == 1
    told = capsys.readouterr().err
    assert "an episode of 8 costs 1.41 times one of 4" in told
    assert "from 4 to 16 tokens the cost grows as the length to the power of 1.50" in told


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_episode_costs_processor_time(monkeypatch, tmp_path):
    model, results, whole_run = scaling.save_random(tmp_path / "model", SMALL, 512), [], scaling.whole_run
    monkeypatch.setattr(scaling, "whole_run", lambda *given, **more: results.append(whole_run(*given, **more)))
    stamps = iter([1.0, 10.0, 14.0])
    monkeypatch.setattr(scaling, "time", SimpleNamespace(process_time=lambda: next(stamps)))
    assert scaling.episode_cost(model, 16, 2) == 4.0 / 16  # the second of two updates
    assert [update["rollout/length"] for update in results[0].updates] == [2.0, 2.0]


def test_memory_of_log_probabilities_and_of_a_run():
    # in a process of its own, as pages that other tests left on the heap are taken anew by nobody; what threads and
    # libraries take once is there by then
    measure = "from benchmarks import flat; flat.pass_peaks(1_000, 64); print(*flat.pass_peaks(40_000, 1024))"
    done = subprocess.run([sys.executable, "-c", measure], cwd=ROOT, capture_output=True, text=True, check=True)
    forward, backward, whole = map(float, done.stdout.split())
    assert 30 < forward < backward < whole
    # logits and their gradient, and log-probabilities and probabilities of 342 tokens, the largest of three even chunks
    assert whole * flat.MIB == pytest.approx((2 * 1024 + 2 * 342) * 40_000 * 4, rel=0.01)
    sizes = flat.run_sizes(30)
    assert list(sizes) == [*range(3, 31, 3)]
    assert max(sizes.values()) - sizes[3] < 2 * flat.MIB
    assert flat.grown({100: 5 * flat.MIB, 1000: 9 * flat.MIB, 5000: 12 * flat.MIB}) == []
    assert flat.grown({1000: 9 * flat.MIB, 5000: 15 * flat.MIB}) == ["from 1000 to 5000 updates a run grew by 6.0 MiB"]


def test_each_part_of_a_decoding_step_is_found(model):
    loaded = load_causal_lm(str(model), dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = (decode.profiled(by(loaded, 2, 3)) for by in (decode.by_tether, decode.by_transformers))
    assert all(ours[name] > 0 for name in ("products", "attention", decode.DRAWING, decode.CACHE))
    assert theirs["products"] > 0 < theirs["attention"] and theirs[decode.DRAWING] == theirs[decode.CACHE] == 0


@pytest.mark.filterwarnings("ignore")  # of generate
def test_both_sides_decode_as_many_tokens(monkeypatch, model):
    loaded = load_causal_lm(str(model), dtype=torch.float32)
    counts, forward = [], type(loaded).forward

    def counted(self, *args, **kwargs):
        counts.append(kwargs["input_ids"].shape)
        return forward(self, *args, **kwargs)

    ours, theirs = (by(loaded, 4, 6) for by in (decode.by_tether, decode.by_transformers))
    ours()  # tests the cache, once
    read = []
    monkeypatch.setattr(type(loaded), "forward", counted)
    for side in (ours, theirs):
        counts.clear()
        side()
        read.append(list(counts))
    assert read[0] == read[1] == [(4, 13), *[(4, 1)] * 5]


@pytest.mark.parametrize("more", [[], ["--lora"]])
def test_vllm_answers_beside_the_policy(monkeypatch, capsys, model, more):
    engines = stand_in_vllm.install(monkeypatch)
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import vllm

    sides, answered = [], vllm.answered

    def noted(generator, asked, sampling):
        answers = answered(generator, asked, sampling)
        sides.append((type(generator).__name__, [len(answer.token_ids) for answer in answers]))
        return answers

    monkeypatch.setattr(vllm, "answered", noted)
    run(monkeypatch, vllm, "--model", model, "--rows", 2, "--tokens", 3, "--turns", 2, *more)
    told = capsys.readouterr().out
    assert len(engines) == 1 and "2 answers of 3 tokens, the fastest of 2 turns" in told
    assert sides == [("HFGenerator", [3, 3]), ("VLLMGenerator", [3, 3])] * 2 + [("VLLMGenerator", [1])]
    assert float(told.rpartition("own: ")[2]) < 1e-5
