"""What ``tether plan`` says of a run is what the run then is."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    ElectraConfig,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    RemBertConfig,
)

from tests.models.build import edit_json
from tests.tiny import EOS, KINDS, VOCAB_SIZE, save_tiny, tiny_classifier, tiny_tokenizer
from tests.train.runs import tiny_run
from tests.train.test_run import SHARINGS
from tether.config.chat import with_now
from tether.config.load import load_config, parse_config
from tether.models.build import build_roles
from tether.models.merging import MOST_BYTES
from tether.train.inputs import load_data
from tether.train.plan import ACTIVATION_FACTOR, model_config, plan
from tether.train.run import train_policy


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_roles_have_the_parameters_that_were_planned(tmp_path, kind, sharing, kl_coef):
    config = tiny_run(tmp_path, kind=kind, ppo__kl_coef=kl_coef, **SHARINGS[sharing])
    planned = {role.role: role for role in plan(config).roles}
    roles = build_roles(config, load_data(config).tokenizer, device="cpu", autocast_dtype=None)
    for row in roles.table():
        assert planned[row.role].trainable == row.trainable, row.role
    built = sum(row.bytes for row in roles.table())
    if config.value_kind == "model":  # a critic is counted with its input embedding alone, as it is loaded
        assert abs(sum(role.weight_bytes for role in planned.values()) - built) <= 0.02 * built
    else:
        assert sum(role.weight_bytes for role in planned.values()) == built
    assert ("reference" in planned) == (kl_coef > 0) == roles.has_reference


WIDTHS = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": EOS,
}  # fmt: skip
PROJECTING = {
    "rembert": RemBertConfig(**WIDTHS, intermediate_size=16, output_embedding_size=24, is_decoder=True),
    "electra": ElectraConfig(**WIDTHS, intermediate_size=16, embedding_size=8, is_decoder=True),
    "opt": OPTConfig(**WIDTHS, ffn_dim=16, word_embed_proj_dim=8, do_layer_norm_before=False),
}
"""Models whose output embedding does not read states of the hidden size."""


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["head", "adapter"])
@pytest.mark.parametrize("kind", PROJECTING)
def test_a_critic_reads_the_states_of_a_model_that_projects_them(tmp_path, kind, lora):
    folder = save_tiny(tmp_path / "m", tied=False)
    AutoModelForCausalLM.from_config(PROJECTING[kind]).save_pretrained(folder)
    changes = {"value__kind": "adapter" if lora else "head", "model__lora": lora, "sampling__response_length": 4}
    config = tiny_run(tmp_path, model__path=str(folder), train__max_steps=1, **changes)
    planned = {role.role: role.trainable for role in plan(config).roles}
    roles = build_roles(config, load_data(config).tokenizer, device="cpu", autocast_dtype=None)
    assert {row.role: row.trainable for row in roles.table()}.items() <= planned.items()
    assert roles.role("value").head.in_features == (8 if kind == "opt" else 16)
    (metrics,) = train_policy(config).updates
    assert metrics["update/num_steps"] == 2 and metrics["value/grad_norm" if lora else "policy/grad_norm"] > 0


def test_a_model_without_attention_has_nothing_that_grows_with_the_text(tmp_path):
    folder = save_tiny(tmp_path / "mamba")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCAB_SIZE}
    model = MambaForCausalLM(MambaConfig(**shape))
    model.save_pretrained(folder)
    short, long = (
        plan(tiny_run(tmp_path, model__path=str(folder), value__kind="head", sampling__response_length=length))
        for length in (4, 40)
    )
    assert short.memory["rollout"] == long.memory["rollout"] > short.memory["weights and optimizer"]
    assert short.memory["update"] < long.memory["update"]


@pytest.mark.parametrize(("key", "dtype"), [("train__bf16", torch.bfloat16), ("train__fp16", torch.float16)])
def test_a_frozen_base_is_counted_in_the_type_of_autocast(tmp_path, monkeypatch, key, dtype):
    monkeypatch.setattr("tether.train.plan.MOST_BYTES", 0)  # no merged copy
    full, config = (tiny_run(tmp_path, model__lora={"r": 4}, **changes) for changes in ({}, {key: True}))
    planned = plan(config)
    roles = build_roles(config, load_data(config).tokenizer, device="cpu", autocast_dtype=dtype)
    assert sum(role.weight_bytes for role in planned.roles) == sum(row.bytes for row in roles.table())
    of_weights = [sum(role.weight_bytes for role in each.roles) for each in (plan(full), planned)]
    beside = [each.memory["rollout"] - size for each, size in zip((plan(full), planned), of_weights, strict=True)]
    assert of_weights[1] < of_weights[0] and beside[1] < beside[0], "the cache is half as large too"


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "bfloat16")]
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_is_counted_as_it_is_stored(tmp_path, kind, dtype, weights):
    changes = {"train__bf16" if dtype == "bfloat16" else "train__fp16": True, "value__kind": "head"}
    config = tiny_run(tmp_path, kind=kind, model__dtype=weights, **changes)
    (planned,) = (role for role in plan(config).roles if role.role == "reference")
    roles = build_roles(config, load_data(config).tokenizer, device="cpu", autocast_dtype=getattr(torch, dtype))
    (built,) = (row for row in roles.table() if row.role == "reference")
    assert (planned.weight_bytes, planned.dtype, planned.parameters) == (built.bytes, built.dtype, built.parameters)


def test_updates_and_memory_follow_the_batch(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    judge = [{"type": "model", "path": str(tmp_path / "judge")}]
    config = tiny_run(tmp_path, train__total_episodes=20, rewards=judge)
    small = plan(config)
    assert small.num_updates == 3
    assert small.num_updates == len(train_policy(config).updates)
    assert dict(small.arithmetic)["updates"] == "3 of 8 answers = 24 episodes"
    assert {role.role for role in small.roles} == {"policy", "reference", "value", "reward model"}
    large = plan(tiny_run(tmp_path, train__total_episodes=20, train__micro_batch_size=8, overwrite_output_dir=True))
    assert large.memory["update"] > small.memory["update"]
    assert large.memory["rollout"] <= small.memory["rollout"]


def test_gradients_are_those_of_the_policy_or_of_its_critic(tmp_path):
    """They take turns: beside a policy of more weights a critic of its own adds none, as a head on its trunk does."""
    own, head = (plan(tiny_run(tmp_path, tied=False, value__kind=kind)).memory for kind in ("model", "head"))
    assert own["weights and optimizer"] > head["weights and optimizer"]
    passes = [memory["update"] - memory["log-probabilities and values"] for memory in (own, head)]
    assert passes[0] == passes[1] > 0


def test_a_reward_model_counts_whole_or_in_part_by_who_has_it(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    kept = {}
    for processes in (None, "sharded", "all", "one"):
        judge = [{"type": "model", "path": str(tmp_path / "judge"), "processes": processes}]
        planned = plan(tiny_run(tmp_path, rewards=judge, train__micro_batch_size=2), num_processes=4)
        kept[processes] = {name: memory["weights and optimizer"] for name, memory in planned.engines.items()}
    (size,) = [role.weight_bytes for role in planned.roles if role.role == "reward model"]
    assert kept[None] == kept["sharded"] and kept["all"] == kept["one"]
    spared = {name: kept["all"][name] - kept["sharded"][name] for name in kept["all"]}
    assert spared == {"DDP": 0, "ZeRO-1": 0, "ZeRO-2": 0, "ZeRO-3": size - -(-size // 4), "FSDP2": size - -(-size // 4)}


def test_every_process_loads_every_model_whole_where_weights_are_spread(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    loading = {}
    for processes in ("sharded", "all"):
        judge = [{"type": "model", "path": str(tmp_path / "judge"), "processes": processes}]
        planned = plan(tiny_run(tmp_path, rewards=judge, train__micro_batch_size=2), num_processes=4)
        loading[processes] = planned.loading
    weights = {role.role: role.weight_bytes for role in planned.roles}
    roles = weights["policy"] + weights["reference"] + weights["value"]
    assert loading["all"] == {"ZeRO-3": roles, "FSDP2": roles}
    assert loading["sharded"] == {name: roles + weights["reward model"] for name in ("ZeRO-3", "FSDP2")}
    assert plan(tiny_run(tmp_path)).loading == {}


def test_a_critic_that_starts_as_a_judge_of_another_size_is_counted_as_that(tmp_path):
    judge = tiny_classifier("llama")
    shape = copy.deepcopy(judge.config)
    shape.hidden_size, shape.num_hidden_layers, shape.head_dim = 48, 4, 48 // shape.num_attention_heads
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    config = tiny_run(tmp_path, rewards=[{"type": "model", "path": str(tmp_path / "judge")}], value__kind="model")
    (planned,) = [role for role in plan(config).roles if role.role == "value"]
    roles = build_roles(config, load_data(config).tokenizer, device="cpu", autocast_dtype=None)
    (built,) = [row for row in roles.table() if row.role == "value"]
    assert planned.trainable == built.trainable > 2 * sum(p.numel() for p in judge.parameters())


def test_logits_that_a_model_changes_afterwards_are_counted_whole(tmp_path):
    def of_update():
        memory = plan(tiny_run(tmp_path, sampling__response_length=100)).memory
        return memory["update"] - memory["weights and optimizer"]

    usual = of_update()
    edit_json(tmp_path / "llama-tied" / "config.json", lambda config: config.update(final_logit_softcapping=30.0))
    assert of_update() - usual == 2 * 4 * 100 * VOCAB_SIZE * 4, "they and their gradient"


def test_a_merged_copy_of_adapted_weights_is_counted_where_there_is_one(tmp_path, monkeypatch):
    def more(**changes):
        config = tiny_run(tmp_path, **changes)
        with monkeypatch.context() as patch:
            rollouts = []
            for most in (MOST_BYTES, 1000, 0):
                patch.setattr("tether.train.plan.MOST_BYTES", most)
                planned = plan(config)
                rollouts.append(planned.memory["rollout"])
        base = next((role.weight_bytes for role in planned.roles if role.role == "base"), None)
        return [rollout - rollouts[-1] for rollout in rollouts], base

    (whole, limited, none), base = more(model__lora={"r": 4})
    assert (whole, limited, none) == (base, 1000, 0)
    assert more()[0] == more(model__lora={"r": 4}, train__bf16=True)[0] == [0, 0, 0]


def test_a_plan_writes_nothing(tmp_path):
    config = tiny_run(tmp_path)
    plan(config)
    assert not config.output_dir.exists()


def test_a_finished_run_can_be_planned_again_and_its_configuration_is_resolved(tmp_path):
    config = tiny_run(tmp_path, model__lora={"r": 4}, train__max_steps=1)
    train_policy(config)
    written = load_config(config.output_dir / "config.yaml")
    assert (written.value.kind, written.train.learning_rate, written.train.bf16) == ("adapter", 1e-3, False)
    assert with_now(parse_config(plan(config).config), written.data.chat_template_now) == written


def test_a_run_that_leaves_the_policy_as_it_is_is_told(tmp_path):
    told = "train.learning_rate is 0: the policy stays as it is"
    assert plan(tiny_run(tmp_path, train__learning_rate=0.0)).notes == [told]
    assert plan(tiny_run(tmp_path)).notes == []


def test_the_size_of_micro_batches_that_was_found_is_planned_and_saved(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=1, train__rollout_batch_size=10, train__micro_batch_size=None)
    planned = plan(config)
    assert dict(planned.arithmetic)["micro-batches"] == "2 of 5 answers"
    assert parse_config(planned.config).train.micro_batch_size == 5 and planned.notes == []
    assert dict(plan(config, num_processes=2).arithmetic)["micro-batches"] == "1 of 5 answers in each of 2 processes"
    train_policy(config)
    assert load_config(config.output_dir / "config.yaml").train.micro_batch_size == 5


def test_a_mini_batch_that_hardly_anything_divides_is_warned_of(tmp_path):
    few = plan(tiny_run(tmp_path, train__rollout_batch_size=13, train__micro_batch_size=None))
    (note,) = few.notes
    assert note.startswith("train.micro_batch_size is 1,") and "mini-batch size 13" in note
    assert dict(few.arithmetic)["micro-batches"] == "13 of 1 answer"


def test_adapters_that_are_continued_or_judge_are_counted_as_they_were_saved(tmp_path):
    first = tiny_run(tmp_path, model__lora={"r": 2, "target_modules": ["q_proj"]}, train__max_steps=1)
    train_policy(first)
    second = tiny_run(
        tmp_path, model__path=str(first.output_dir), model__lora={}, output_dir=str(tmp_path / "second")
    )  # fmt: skip
    planned = {role.role: role for role in plan(second).roles}
    roles = build_roles(second, load_data(second).tokenizer, device="cpu", autocast_dtype=None)
    assert sum(role.weight_bytes for role in planned.values()) == sum(row.bytes for row in roles.table())
    assert planned["policy"].trainable == 2 * 2 * (16 + 16)


def test_linear_layers_in_few_bits_are_counted_in_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.train.inputs.check_bitsandbytes", lambda *arguments: None)
    linear, others = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 32 * 3), 40 * 16 + 5 * 16
    for bits, size in (("4bit", 0.5 + (1 + 4 / 256) / 64), ("8bit", 1)):
        (base, *_) = plan(tiny_run(tmp_path, model__lora={"r": 2}, model__quantization=bits)).roles
        assert base.parameters == linear + others
        assert base.weight_bytes == pytest.approx(4 * others + size * linear, abs=2)


def test_services_add_nothing_and_are_not_asked(tmp_path):
    judge = {"type": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "grader", "rubric": "{response}"}
    config = tiny_run(tmp_path, rewards=[{"type": "http", "url": "http://127.0.0.1:1/score"}, judge])
    rows = [role for role in plan(config).roles if role.role.startswith("reward ")]
    assert [(row.role, row.source, row.parameters, row.weight_bytes, row.sharing) for row in rows] == [
        ("reward http_0", "http://127.0.0.1:1/score", 0, 0, "service"),
        ("reward judge_1", "grader at http://127.0.0.1:1/v1", 0, 0, "service"),
    ]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [({}, 4), ({"train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 24}, 1)],
    ids=["answers", "tokens"],
)
def test_a_demonstration_longer_than_any_answer_counts_in_the_update(tmp_path, batch, rows):
    shown = {"ppo__ptx_coef": 0.5, "data__ptx": str(tmp_path / "ptx.jsonl")}

    def with_words(count):
        row = {"prompt": "you", "completion": " ".join(["sun"] * count)}
        (tmp_path / "ptx.jsonl").write_text(json.dumps(row) + "\n")
        config = tiny_run(tmp_path, **batch, **shown)
        return load_data(config).demonstrations[0].num_tokens, plan(config).memory

    config = tiny_run(tmp_path, **batch)
    without, shape = plan(config).memory, model_config(config.model.path, config)
    (few, some), (many, more) = with_words(30), with_words(60)
    assert 30 < few < many and more["update"] > some["update"] > without["update"]
    each = shape.hidden_size * shape.num_hidden_layers * ACTIVATION_FACTOR * 2  # in float32 twice as much
    assert more["update"] - some["update"] == rows * (many - few) * each
    assert {**more, "update": 0} == {**without, "update": 0}
    assert with_words(1)[1] == without
