"""Saved folders in vLLM, where it is installed: the same greedy tokens as transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.build import plain_adapted
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.train.run import train_policy

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[8, 20, 13, 9], [11, 12]]
LENGTH = 8


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def greedy(model):
    """What transformers writes."""
    rows = [torch.tensor([ids]) for ids in PROMPTS]
    options = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False}
    whole = [model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0] for ids in rows]
    return [ids[len(query) :].tolist() for query, ids in zip(PROMPTS, whole, strict=True)]


def engine(folder, **options):
    return vllm.LLM(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.2, **options
    )


def written(llm, **options):
    """What vLLM writes."""
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False, **options)]


@pytest.mark.parametrize("tied", [True, False])
def test_full_policy(tmp_path, tied):
    save_tiny(tmp_path / f"llama-{'tied' if tied else 'untied'}", tied=tied, hidden=128)  # heads of 32, as vLLM wants
    out = train_policy(tiny_run(tmp_path, tied=tied, train__max_steps=1)).output_dir
    assert written(engine(out)) == greedy(AutoModelForCausalLM.from_pretrained(out))


def test_adapter(tmp_path):
    base = save_tiny(tmp_path / "llama-tied", hidden=128)
    run = tiny_run(tmp_path, train__max_steps=2, train__learning_rate=0.05, model__lora={"r": 8})
    out = train_policy(run).output_dir
    from vllm.lora.request import LoRARequest

    got = written(engine(base, enable_lora=True, max_lora_rank=8), lora_request=LoRARequest("policy", 1, str(out)))
    assert got == greedy(plain_adapted(AutoModelForCausalLM, base, out))
