"""Generation by vLLM, with a stand-in for its engine; ``tests/train/test_vllm_runs.py`` uses the real one."""

import gc
import os
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig
from transformers import AutoConfig, LlamaConfig, LlavaConfig

from tests.generation import stand_in_vllm
from tests.generation.scopes import answers
from tests.tiny import EOS, tiny_tokenizer
from tests.train.runs import tiny_run
from tests.train.test_run import CrashAfter, assert_same_weights, reproducible, weights
from tests.train.trainers import move
from tether.errors import CheckpointError, ConfigError, GenerationError
from tether.generation import vllm as generation
from tether.generation.build import build_generator
from tether.generation.vllm import check_vllm, check_vllm_model
from tether.inference.evaluate import evaluate_path
from tether.models.build import build_roles
from tether.models.roles import POLICY
from tether.models.stop_strings import StopStrings
from tether.models.tokenizer import load_tokenizer
from tether.train.plan import plan
from tether.train.run import train_policy
from tether.types import Request, Sampling, noise_key

REQUESTS = [Request([7 + i] * (1 + 5 * (i % 3)), noise_key(0, "train", i, 0)) for i in range(10)]
CPU = torch.device("cpu")


@pytest.fixture
def engines(monkeypatch):
    return stand_in_vllm.install(monkeypatch)


def parts(folder, *, kind="llama", **changes):
    """Configuration, roles and generator of a tiny run by vLLM."""
    config = tiny_run(folder, kind=kind, **({"sampling__vllm": {}, "sampling__batch_size": 4} | changes))
    roles = build_roles(config, load_tokenizer(config.model.path), device="cpu", autocast_dtype=None)
    return config, roles, build_generator(config, roles)


def greedy(generator, length=12):
    found = dict(generator.generate(REQUESTS, Sampling(length, 0.0, frozenset({EOS}))))
    return [found[i].token_ids for i in range(len(REQUESTS))]


def greedy_of(roles, length=12):
    """What the policy itself writes."""
    with roles.use(POLICY) as model:
        found = answers(model, REQUESTS, Sampling(length, 0.0, frozenset({EOS})))
    return [completion.token_ids for completion in found]


# Weights


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_greedy_answers_are_the_policys_before_and_after_its_weights_change(tmp_path, engines, kind, lora):
    _, roles, generator = parts(tmp_path, kind=kind, model__lora=lora)
    before = greedy(generator)
    assert before == greedy_of(roles)
    move(roles, policy=0.3)
    assert greedy(generator) == before != greedy_of(roles), "weights are copied when told, not before"
    generator.sync_weights(roles.policy)
    assert greedy(generator) == greedy_of(roles)
    assert len(engines) == 1


def test_an_adapter_beside_others_is_given_alone_and_its_base_once(tmp_path, engines):
    """The critic's adapter shares the policy's base."""
    _, roles, generator = parts(tmp_path, model__lora={"r": 3})
    assert roles.role("value").adapter == "value"
    for _ in range(3):
        move(roles, policy=0.3, critic=0.5)
        generator.sync_weights(roles.policy)
        assert greedy(generator) == greedy_of(roles)
    (engine,) = engines
    assert engine.num_loads == 1 and len(engine.loras) == 1
    assert engine.args.enable_lora and engine.args.max_lora_rank == 8, "the next rank that vLLM has"


@pytest.mark.parametrize(("lora", "level"), [(None, 2), ({"r": 2}, 1)])
def test_the_engine_sleeps_unless_it_generates(tmp_path, engines, lora, level):
    """Weights that are trained are dropped and copied anew; an adapter's base waits."""
    _, roles, generator = parts(tmp_path, model__lora=lora, sampling__vllm={"enable_sleep_mode": True})
    (engine,) = engines
    assert engine.asleep == {"weights", "kv_cache"}
    for _ in range(2):
        seen = iter(generator.generate(REQUESTS, Sampling(3)))
        next(seen)
        assert engine.asleep == set()
        assert len(list(seen)) == len(REQUESTS) - 1
        assert engine.asleep == {"weights", "kv_cache"}
        assert greedy(generator) == greedy_of(roles)
    assert engine.num_loads == 1 + 2 * 2 * (lora is None)
    assert set(engine.levels) == {level}, "what is dropped waits nowhere"


def test_an_average_is_generated_with_while_it_is_in_place(tmp_path, engines):
    _, roles, generator = parts(tmp_path)
    trained = greedy(generator)
    saved = {name: p.detach().clone() for name, p in roles.trained.items()}
    move(roles, policy=0.3)
    generator.sync_weights(roles.policy)
    assert greedy(generator) != trained
    roles.load_state_dict(saved)
    generator.sync_weights(roles.policy)
    assert greedy(generator) == trained


# Answers


def test_samples_follow_the_policy_and_log_probabilities_are_what_they_were_drawn_with(tmp_path, engines):
    _, roles, generator = parts(tmp_path)
    query, count, temperature = [8, 20, 13], 2000, 0.7
    asked = [Request(query, noise_key(3, "train", 0, i)) for i in range(count)]
    found = dict(generator.generate(asked, Sampling(1, temperature)))
    with roles.use(POLICY) as model, torch.no_grad():
        wanted = (model(torch.tensor([query])).logits[0, -1] / temperature).log_softmax(-1)
    drawn = torch.tensor([found[i].token_ids[0] for i in range(count)])
    told = torch.tensor([found[i].logprobs[0] for i in range(count)])
    torch.testing.assert_close(told, wanted[drawn], atol=1e-5, rtol=0)
    counts, expected = torch.bincount(drawn, minlength=len(wanted)), count * wanted.exp()
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert (statistic - common.sum()) / (2 * common.sum()).sqrt() < 3.5


def test_a_key_is_the_seed_of_its_answer_alone(tmp_path, engines):
    _, _, generator = parts(tmp_path)
    sampling = Sampling(12, 1.0, frozenset({EOS}))
    whole = dict(generator.generate(REQUESTS, sampling))
    backwards = dict(generator.generate(REQUESTS[::-1], sampling))
    assert [whole[i] for i in range(10)] == [backwards[9 - i] for i in range(10)]
    assert len({tuple(each.token_ids) for each in whole.values()}) > 5


@pytest.mark.parametrize("by", ["top_k", "top_p"])
def test_truncated_sampling_draws_from_what_it_keeps(tmp_path, engines, by):
    _, roles, generator = parts(tmp_path)
    asked = [Request([8, 20, 13], key) for key in range(200)]
    with roles.use(POLICY) as model, torch.no_grad():
        logits = model(torch.tensor([[8, 20, 13]])).logits[0, -1]
    kept = logits.topk(3)
    cut = {"top_k": 3} if by == "top_k" else {"top_p": float(logits.softmax(-1)[kept.indices].sum()) - 1e-3}
    found = [completion for _, completion in generator.generate(asked, Sampling(1, **cut))]
    assert {completion.token_ids[0] for completion in found} == set(kept.indices.tolist())
    wanted = dict(zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True))
    assert all(abs(c.logprobs[0] - wanted[c.token_ids[0]]) < 1e-5 for c in found)


def test_a_string_ends_an_answer_and_the_engine_stops_writing_it(tmp_path, engines):
    _, _, generator = parts(tmp_path)
    strings = StopStrings(tiny_tokenizer(), ["dog", "not", "e s"])
    found = dict(generator.generate(REQUESTS, Sampling(20, 1.0, frozenset({EOS}), text_ends=strings)))
    (engine,) = engines
    ended = [c for c in found.values() if c.finish_reason == "stop" and c.token_ids[-1] != EOS]
    assert ended and len(engine.aborted) == len([c for c in ended if len(c.token_ids) < 20])
    assert engine.requests == {}


def test_answers_come_as_they_finish_and_no_more_are_written_side_by_side_than_asked_for(tmp_path, engines):
    _, _, generator = parts(tmp_path)
    found = generator.generate(REQUESTS[:4], Sampling(20, 1.0, frozenset({EOS, 9, 15})))
    lengths = [len(completion.token_ids) for _, completion in found]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1
    list(generator.generate(REQUESTS, Sampling(5)))
    assert max(engines[0].widths) == 4


def test_weights_that_change_while_answers_are_written_are_told(tmp_path, engines):
    """Their keys and values would serve the next answers."""
    _, roles, generator = parts(tmp_path)
    writing = generator.generate(REQUESTS, Sampling(9, 1.0, frozenset({EOS, 9, 15})))
    next(writing)
    generator.sync_weights(roles.policy)
    with pytest.raises(GenerationError, match="weights have changed while answers were still being generated"):
        next(generator.generate(REQUESTS, Sampling(9)))
    writing.close()
    assert len(list(generator.generate(REQUESTS, Sampling(9)))) == 10


def test_leaving_in_the_middle_leaves_nothing_behind(tmp_path, engines):
    _, _, generator = parts(tmp_path, sampling__vllm={"enable_sleep_mode": True})
    seen = generator.generate(REQUESTS, Sampling(9, 1.0, frozenset({EOS})))
    next(seen)
    seen.close()
    (engine,) = engines
    assert engine.requests == {} and engine.asleep
    assert len(list(generator.generate(REQUESTS, Sampling(9)))) == 10


def test_logits_that_are_not_finite_are_told(tmp_path, engines):
    _, roles, generator = parts(tmp_path)
    with torch.no_grad():
        next(iter(roles.role(POLICY).trained.values())).fill_(torch.nan)
    generator.sync_weights(roles.policy)
    with pytest.raises(GenerationError, match=r"request \d: the policy's logits for token 0 .* are not finite"):
        list(generator.generate(REQUESTS, Sampling(4, 0.0)))


def test_a_failure_of_the_engine_is_told_with_the_way_out(tmp_path, engines):
    _, _, generator = parts(tmp_path, data__max_prompt_length=20)
    with pytest.raises(GenerationError, match=r"30 tokens are more than max_model_len, 26\. Leave sampling\.vllm out"):
        list(generator.generate([Request([8] * 24, 0)], Sampling(6)))


# The engine


def test_what_the_engine_is_made_for(tmp_path, engines):
    settings = {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    parts(tmp_path, sampling__vllm=settings, data__max_prompt_length=30, sampling__response_length=10)
    args = engines[0].args
    assert (args.max_model_len, args.max_num_seqs, args.dtype) == (40, 4, "float32")
    assert (args.gpu_memory_utilization, args.enforce_eager, args.enable_sleep_mode) == (0.5, True, False)
    assert args.kv_cache_memory_bytes > 2**20 and args.distributed_executor_backend == "uni"
    parts(tmp_path, sampling__batch_size=4096)
    assert engines[1].args.max_num_seqs == 2048, "vLLM starts with no more than the tokens of one forward pass"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"train__bf16": True}, "bfloat16"),
        ({"train__fp16": True}, "float16"),
        ({"model__dtype": "bfloat16"}, "bfloat16"),
        ({"model__lora": {}}, "float32"),
    ],
)
def test_the_engine_multiplies_in_the_type_that_forward_passes_do(tmp_path, engines, changes, dtype):
    parts(tmp_path, **changes)
    assert engines[0].args.dtype == dtype


def test_texts_are_no_longer_than_the_models_positions(tmp_path, engines):
    parts(tmp_path, data__max_prompt_length=500)
    assert engines[0].args.max_model_len == 128


def test_nothing_else_of_the_process_is_changed(tmp_path, engines, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    config, roles, _ = parts(tmp_path)
    assert os.environ["LOCAL_WORLD_SIZE"] == "2" and "LD_PRELOAD" not in os.environ
    torch.manual_seed(5), np.random.seed(5)  # not Python's, from which beartype draws what it checks
    wanted = (torch.rand(1).item(), np.random.rand())
    torch.manual_seed(5), np.random.seed(5)
    set_num_threads = torch.set_num_threads
    generator = build_generator(config, roles)
    list(generator.generate(REQUESTS, Sampling(3)))
    generator.close()
    assert (torch.rand(1).item(), np.random.rand()) == wanted
    assert torch.set_num_threads is set_num_threads


def test_each_process_has_an_engine_and_its_share_of_the_cpu(tmp_path, engines, monkeypatch):
    monkeypatch.setattr(generation, "total_memory", lambda device: 10 * 2**30)
    for count, launcher in ((1, "uni"), (2, "external_launcher")):
        monkeypatch.setattr(generation.launched, "num_processes", lambda count=count: count)
        parts(tmp_path, sampling__vllm={"gpu_memory_utilization": 0.5})
        args = engines.pop().args
        assert (args.kv_cache_memory_bytes, args.distributed_executor_backend) == (5 * 2**30 // count, launcher)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_gone_after_its_run(tmp_path, engines, fails):
    config = run(tmp_path, train__max_steps=2)
    with pytest.raises(OSError, match="the machine went away") if fails else nullcontext() as failed:
        train_policy(config, callbacks=[CrashAfter(1)] if fails else [])
    engine = weakref.ref(engines.pop())
    gc.collect()
    assert engine() is None
    del failed  # whose traceback holds the trainer


def test_an_engine_in_another_librarys_process_group_shuts_down_with_the_process(tmp_path, engines, monkeypatch):
    """It destroys the group, which others still need."""
    left = []
    monkeypatch.setattr(generation.atexit, "register", left.append)
    monkeypatch.setattr(generation, "KEPT", [])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        generator = parts(tmp_path)[2]
    finally:
        torch.distributed.destroy_process_group()
    engine = weakref.ref(engines.pop())
    generator.close()
    assert engine() is not None
    (shut_down,) = left
    shut_down()
    assert engine() is None


# Refusals


@pytest.mark.parametrize(("scale", "is_refused"), [(0.999, False), (0.97, True)])
def test_an_engine_that_computes_the_model_in_another_way_is_refused_when_it_starts(
    tmp_path, engines, monkeypatch, scale, is_refused
):
    exact = stand_in_vllm.processed
    monkeypatch.setattr(stand_in_vllm, "processed", lambda logits, params: exact(scale * logits, params))
    told = r"vLLM's log-probabilities for .* differ from the policy's own"
    with pytest.raises(ConfigError, match=told) if is_refused else nullcontext():
        parts(tmp_path)


def run(folder, **changes):
    return tiny_run(folder, **({"sampling__vllm": {}} | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sampling__vllm": {"enable_sleep_mode": True}}, "sampling.vllm.enable_sleep_mode: got true, wanted false on"),
        ({"model__quantization": "4bit", "model__lora": {}}, "model.quantization 4bit: vLLM would round other weights"),
        ({"model__trust_remote_code": True}, "model.trust_remote_code: got true, wanted false with sampling.vllm"),
        ({"sampling__temperature": 0.005}, "sampling.temperature: got 0.005, wanted at least 0.01"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tmp_path, engines, changes, told):
    with pytest.raises(ConfigError) as refused:
        check_vllm(run(tmp_path, **changes), CPU)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"sampling\.vllm needs the package vllm.*pip install 'tether\[vllm\]'"):
        check_vllm(run(tmp_path), CPU)


def test_an_old_release_is_told(tmp_path, engines, monkeypatch):
    module = __import__("sys").modules["vllm"]
    monkeypatch.setattr(module, "__version__", "0.11.2")
    monkeypatch.setattr(module, "__version_tuple__", (0, 11, 2))
    with pytest.raises(ConfigError, match=r"got vLLM 0\.11\.2, wanted 0\.32 or later"):
        check_vllm(run(tmp_path), CPU)


def test_an_architecture_that_vllm_does_not_know_is_told_before_the_engine_is_made(tmp_path, engines):
    config = run(tmp_path)
    shape = AutoConfig.from_pretrained(config.model.path)
    check_vllm_model(config, shape, None)
    shape.architectures = ["OddForCausalLM"]
    with pytest.raises(ConfigError, match=r"vLLM cannot generate with .*: Model architectures \['OddForCausalLM'\]"):
        check_vllm_model(config, shape, None)
    assert engines == []


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({"use_dora": True}, "is a DoRA adapter"),
        ({"bias": "all"}, "is an adapter with biases"),
        ({"modules_to_save": ["lm_head"]}, "brings whole modules"),
        ({"trainable_token_indices": [1]}, "brings whole modules, tokens"),
        ({"lora_bias": True}, "is an adapter with biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights, pissa, changes the base"),
        (None, "is an adapter of the method IA3"),
    ],
)
def test_adapters_that_vllm_cannot_add_to_a_model_are_named(tmp_path, engines, settings, lacking):
    config = run(tmp_path, model__lora={})
    shape = AutoConfig.from_pretrained(config.model.path)
    start = IA3Config(task_type="CAUSAL_LM") if settings is None else LoraConfig(task_type="CAUSAL_LM", **settings)
    check_vllm_model(config, shape, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights="gaussian"))
    with pytest.raises(ConfigError, match=lacking):
        check_vllm_model(config, shape, start)


@pytest.mark.parametrize("start", [None, LoraConfig(task_type="CAUSAL_LM", rank_pattern={"q_proj": 600})])
def test_a_rank_beyond_those_of_vllm_is_told(tmp_path, engines, start):
    config = run(tmp_path, model__lora={"r": 600 if start is None else 4})
    with pytest.raises(ConfigError, match=r"model\.lora\.r: got 600, wanted at most 512"):
        check_vllm_model(config, AutoConfig.from_pretrained(config.model.path), start)


def test_adapters_on_a_model_to_which_vllm_adds_none_are_refused_before_it_loads(tmp_path, engines):
    config = run(tmp_path, kind="gpt2", model__lora={})
    shape = AutoConfig.from_pretrained(config.model.path)
    with pytest.raises(ConfigError, match=r"model\.lora: vLLM adds no adapters to GPT2LMHeadModel"):
        check_vllm_model(config, shape, None)
    check_vllm_model(run(tmp_path, kind="gpt2"), shape, None)


def test_quantized_weights_and_models_of_several_parts_are_refused(tmp_path, engines):
    config = run(tmp_path, model__lora={})
    shape = AutoConfig.from_pretrained(config.model.path)
    shape.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError, match="holds quantized weights"):
        check_vllm_model(config, shape, None)
    with pytest.raises(ConfigError, match="is a model of several parts"):
        check_vllm_model(config, LlavaConfig(text_config=LlamaConfig()), None)


# Whole runs


@pytest.mark.parametrize("changes", [{}, {"model__lora": {"r": 2}}, {"train__ema_decay": 0.5}])
def test_a_run_has_the_weights_of_each_update_and_repeats(tmp_path, engines, changes):
    gaps, rows = [], []
    for name in ("a", "b"):
        config = run(tmp_path, output_dir=str(tmp_path / name), train__max_steps=3, train__learning_rate=1e-2,
                     data__eval_prompts=str(tmp_path / "prompts.jsonl"), train__eval_steps=1, **changes)  # fmt: skip
        rows.append([x for x in train_policy(config).updates])
        gaps += [row["rollout/logprob_gap"] for row in rows[-1]]
    assert max(gaps) < 1e-5
    assert [row["objective/scores"] for row in rows[0]] == [row["objective/scores"] for row in rows[1]]
    assert len(engines) == 2


def test_a_resumed_run_goes_on_with_the_weights_of_its_checkpoint(tmp_path, engines):
    """Bitwise as if it had not been stopped: the stand-in, like the policy, rounds alike in every process."""
    changes = {"train__save_steps": 2, "train__max_steps": 4, "train__learning_rate": 1e-2}
    whole = run(tmp_path, output_dir=str(tmp_path / "whole"), **changes)
    train_policy(whole)
    cut = run(tmp_path, output_dir=str(tmp_path / "cut"), **changes)
    with pytest.raises(OSError, match="the machine went away"):
        train_policy(cut, callbacks=[CrashAfter(3)])
    train_policy(cut.model_copy(update={"resume": True}))
    assert reproducible(whole.output_dir) == reproducible(cut.output_dir)
    assert_same_weights(weights(whole.output_dir), weights(cut.output_dir))


@pytest.mark.parametrize(("before", "after"), [({}, None), (None, {})])
def test_a_run_goes_on_with_the_engine_that_it_began_with(tmp_path, engines, before, after):
    """Its keys may change, and those of a group are all of its keys."""
    train_policy(run(tmp_path, sampling__vllm=before, train__max_steps=1, train__save_steps=1))
    with pytest.raises(CheckpointError, match=f"sampling.vllm: was {before}, now {after}"):
        train_policy(run(tmp_path, sampling__vllm=after, train__max_steps=2, resume=True))
    if before is not None:
        smaller = {"gpu_memory_utilization": 0.1}
        train_policy(run(tmp_path, sampling__vllm=smaller, train__max_steps=2, resume=True))


def test_an_evaluation_of_a_finished_run_needs_no_engine(tmp_path, engines, monkeypatch):
    out = train_policy(run(tmp_path, train__max_steps=1)).output_dir
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    assert evaluate_path(out, tmp_path / "prompts.jsonl").metrics["eval_length"] > 0
    assert len(engines) == 1


def test_a_run_without_it_never_imports_vllm(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    assert len(train_policy(tiny_run(tmp_path, train__max_steps=1)).updates) == 1


@pytest.mark.parametrize(("sleeps", "phases"), [(False, ["rollout", "log-probabilities and values", "update"]),
                                                (True, ["rollout"])])  # fmt: skip
def test_the_plan_counts_the_engine_where_it_has_its_memory(tmp_path, engines, monkeypatch, sleeps, phases):
    monkeypatch.setattr("tether.train.plan.total_memory", lambda device: 10 * 2**30)
    monkeypatch.setattr("tether.train.inputs.check_vllm", lambda config, device: None)
    without = plan(tiny_run(tmp_path)).memory
    config = run(tmp_path, sampling__vllm={"gpu_memory_utilization": 0.5, "enable_sleep_mode": sleeps})
    memory, roles = plan(config).memory, plan(config).roles
    assert memory.pop("vLLM") == 5 * 2**30 + roles[0].weight_bytes and roles[0].role == "policy"
    ((engine, each),) = plan(config, num_processes=2).engines.items()
    assert (engine, each["vLLM"]) == ("DDP", 5 * 2**29 + roles[0].weight_bytes)
    assert [name for name, size in memory.items() if size - without[name] > 4 * 2**30] == phases
