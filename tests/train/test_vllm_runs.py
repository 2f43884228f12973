"""Runs whose answers come from a real vLLM engine, where it is installed; on a CPU."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig, GPTNeoForCausalLM

from tests.models.build import plain_adapted
from tests.tiny import EOS, save_tiny
from tests.train.runs import tiny_run
from tests.train.test_run import CrashAfter, reproducible, weights
from tests.train.trainers import move
from tether.config.load import dump_config
from tether.errors import ConfigError
from tether.generation.build import build_generator
from tether.models.build import build_roles
from tether.models.roles import POLICY
from tether.models.tokenizer import load_tokenizer
from tether.train.run import open_trainer, train_policy, write_end
from tether.types import Request, Sampling, noise_key

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REQUESTS = [Request([8 + i, 20, 13][: 1 + i % 3], noise_key(0, "train", i, 0)) for i in range(8)]
SHARINGS = {"full": {}, "lora": {"model__lora": {"r": 8}}}


def vllm_run(folder, *, kind="llama", tied=True, **changes):
    """A tiny run with heads of 32 numbers, as vLLM wants."""
    model = folder / f"{kind}-{'tied' if tied else 'untied'}"
    if not model.exists():
        save_tiny(model, kind, tied=tied, hidden=128)
    vllm = {"enforce_eager": True, "gpu_memory_utilization": 0.02}
    return tiny_run(folder, kind=kind, tied=tied, **({"sampling__vllm": vllm, "train__learning_rate": 1e-2} | changes))


def greedy(generator, length=10):
    found = dict(generator.generate(REQUESTS, Sampling(length, 0.0, frozenset({EOS}))))
    return [found[i].token_ids for i in range(len(REQUESTS))]


def greedy_of(model, length=10):
    """What transformers writes."""
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": EOS, "pad_token_id": EOS}
    rows = [torch.tensor([request.token_ids]) for request in REQUESTS]
    whole = [model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0] for ids in rows]
    return [ids[len(request.token_ids) :].tolist() for request, ids in zip(REQUESTS, whole, strict=True)]


def saved(out, base, sharing):
    if sharing == "full":
        return AutoModelForCausalLM.from_pretrained(out)
    return plain_adapted(AutoModelForCausalLM, base, out)


COMPILED = {"sampling__vllm": {"gpu_memory_utilization": 0.02}}


@pytest.mark.parametrize(
    ("kind", "sharing", "changes"),
    [("llama", "full", {}), ("llama", "full", COMPILED), ("llama", "lora", {}), ("qwen2", "full", {}),
     ("qwen2", "lora", {}), ("gpt2", "full", {})],
)  # fmt: skip
def test_a_run_trains_on_answers_of_the_weights_that_it_has(tmp_path, kind, sharing, changes):
    config = vllm_run(tmp_path, kind=kind, train__max_steps=3, **SHARINGS[sharing], **changes)
    with open_trainer(config) as trainer:
        generator = trainer.parts.generator
        before = greedy(generator)
        assert trainer.fit() is None
        after = greedy(generator)
        trainer_gap = [row["rollout/logprob_gap"] for row in trainer.log.updates]
        means = [row["rollout/importance_mean"] for row in trainer.log.updates]
        write_end(trainer, finished=True)
    assert before != after
    assert after == greedy_of(saved(config.output_dir, config.model.path, sharing))
    assert max(trainer_gap) < 1e-4 and all(abs(mean - 1) < 1e-3 for mean in means)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_log_probabilities_are_those_of_the_policys_forward_at_any_temperature(tmp_path, sharing):
    config = vllm_run(tmp_path, sampling__temperature=0.7, train__max_steps=2, **SHARINGS[sharing])
    rows = train_policy(config).updates
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in rows)
    assert all(row["val/first_ratio_error"] == 0 for row in rows)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_resumed_run_goes_on_like_one_that_was_not_stopped(tmp_path, sharing):
    changes = {"train__save_steps": 2, "train__max_steps": 4, **SHARINGS[sharing]}
    whole = vllm_run(tmp_path, output_dir=str(tmp_path / "whole"), **changes)
    train_policy(whole)
    cut = vllm_run(tmp_path, output_dir=str(tmp_path / "cut"), **changes)
    with pytest.raises(OSError, match="the machine went away"):
        train_policy(cut, callbacks=[CrashAfter(3)])
    train_policy(cut.model_copy(update={"resume": True}))
    for row, again in zip(reproducible(whole.output_dir), reproducible(cut.output_dir), strict=True):
        assert all(row[name] == again[name] for name in ("step", "objective/scores", "rollout/length"))
    torch.testing.assert_close(weights(whole.output_dir), weights(cut.output_dir), atol=1e-6, rtol=1e-5)


def test_keys_and_values_of_weights_before_serve_no_answer(tmp_path):
    """The prompts fill blocks of vLLM's cache, which are kept for later prompts that begin alike."""
    config = vllm_run(tmp_path, data__max_prompt_length=300)
    shape = AutoConfig.from_pretrained(config.model.path)
    shape.max_position_embeddings = 320
    AutoModelForCausalLM.from_config(shape).save_pretrained(config.model.path)
    roles = build_roles(config, load_tokenizer(config.model.path), device="cpu", autocast_dtype=None)
    generator = build_generator(config, roles)
    ids = list(range(6, 38)) * 9
    for seed in range(2):
        ((_, told),) = generator.generate([Request([*ids, 8], seed)], Sampling(6))
        with roles.use(POLICY) as model, torch.no_grad():
            logits = model(torch.tensor([[*ids, 8, *told.token_ids]]), use_cache=False).logits[0, len(ids) : -1]
        own = logits.log_softmax(dim=-1)[range(6), told.token_ids]
        torch.testing.assert_close(torch.tensor(told.logprobs), own, atol=1e-4, rtol=0)
        move(roles, policy=0.3)
        generator.sync_weights(roles.policy)
    generator.close()


def test_weights_of_a_kept_average_are_evaluated(tmp_path):
    config = vllm_run(tmp_path, train__ema_decay=0.5, train__max_steps=2, train__eval_steps=1,
                      data__eval_prompts=str(tmp_path / "prompts.jsonl"))  # fmt: skip
    result = train_policy(config)
    assert len(result.evaluations) == 3 and result.updates[-1]["rollout/logprob_gap"] < 1e-4


def test_a_model_that_vllm_does_not_know_is_refused_before_it_is_loaded(tmp_path):
    config = vllm_run(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    shape = GPTNeoConfig(vocab_size=len(tokenizer), hidden_size=16, num_layers=2, num_heads=2, eos_token_id=EOS,
                         attention_types=[[["global", "local"], 1]], max_position_embeddings=128)  # fmt: skip
    GPTNeoForCausalLM(shape).save_pretrained(tmp_path / "neo")
    tokenizer.save_pretrained(tmp_path / "neo")
    with pytest.raises(ConfigError, match=r"vLLM cannot generate with .* are not supported"):
        train_policy(vllm_run(tmp_path, model__path=str(tmp_path / "neo")))


def test_ctrl_c_leaves_a_checkpoint_and_no_process(tmp_path):
    config = vllm_run(tmp_path, train__max_steps=500, train__rollout_batch_size=8)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "tether", "ppo", str(file)], start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = config.output_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while process.poll() is None and not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(config.output_dir.glob("checkpoint-*"))
