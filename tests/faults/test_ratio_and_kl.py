"""Class C of the fault list: ratio, KL, losses, what is not finite.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import json
import math
from statistics import pstdev

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.faults.test_bad_numbers import Heard
from tests.models.build import save_adapter, save_model
from tests.tiny import EOS, KINDS, save_tiny
from tests.train.runs import tiny_run
from tests.train.test_run import SHARINGS, weights
from tests.train.trainers import trainer_of
from tether.errors import TrainingError
from tether.generation.fake import FakeGenerator
from tether.metrics.writers import read_jsonl
from tether.rewards.fake import FakeRewards
from tether.train.optim import PassOptimizer
from tether.train.run import train_policy

STILL = {"train__learning_rate": 0.0, "train__lr_scheduler_type": "constant"}
PRECISIONS = {"float32": {}, "bf16": {"train__bf16": True}, "fp16": {"train__fp16": True}}


def with_dropout(folder, kind):
    """A model whose configuration asks for much dropout wherever its kind has any."""
    path = save_tiny(folder, kind)
    settings = json.loads((path / "config.json").read_text())
    settings |= {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    (path / "config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_20_21_27_nothing_moves_where_nothing_is_learned(tmp_path, kind, precision, sharing):
    changes = SHARINGS[sharing] | {"model__path": with_dropout(tmp_path / "m", kind)} | PRECISIONS[precision] | STILL
    if "LoRA" in sharing:
        changes["model__lora"] = {"r": 4, "dropout": 0.5}
    minis = {"ppo__num_mini_batches": 2, "train__micro_batch_size": 2, "ppo__num_ppo_epochs": 2}
    result = train_policy(tiny_run(tmp_path, **changes, **minis))
    for row in result.updates:
        assert (row["val/ratio"], row["val/ratio_var"], row["val/ratio_max"]) == (1, 0, 1)
        assert (row["policy/clipfrac_avg"], row["policy/approxkl_avg"], row["val/first_ratio_error"]) == (0, 0, 0)
        assert (row["objective/kl"], row["objective/kl_k3"]) == (0, 0)
        assert row.get("policy/grad_norm", 0) > 0 or row["policy/num_overflows"] == 4
        assert 0 <= row["rollout/logprob_gap"] < {"float32": 1e-5, "bf16": 0.1, "fp16": 0.02}[precision]


RESPONSES = [
    [10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS],
    [EOS], [30, 31, 32, 33, EOS], [12, 12, 12, 12, 12, 12], [25, 26, EOS],
]  # fmt: skip
NO_CRITIC = {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2}
CRITICS = {kind: {"value__kind": kind} for kind in ("model", "head", "adapter")} | {"no critic": NO_CRITIC}
STARTS = [
    (start, critic)
    for start in ("full", "merged LoRA", "fresh LoRA", "loaded LoRA")
    for critic in CRITICS
    if critic != "adapter" or start in ("fresh LoRA", "loaded LoRA")
]
SETTINGS = [
    {"sampling__temperature": temperature, "train__gradient_checkpointing": checkpointing}
    for temperature in (0.7, 1.3)
    for checkpointing in (False, True)
]
NOWHERE = {
    "val/ratio": 1, "val/ratio_var": 0, "val/ratio_max": 1, "val/first_ratio_error": 0, "policy/approxkl_avg": 0,
    "policy/clipfrac_avg": 0, "policy/clipfrac_low": 0, "policy/clipfrac_high": 0,
}  # fmt: skip
"""What is logged of a policy that is the one that sampled, exactly."""
NO_KL = {"objective/kl": 0, "objective/kl_k3": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind → a model and a trained adapter of it, with dropout in the configurations of both."""
    made = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        model = save_model(root / "model", kind, tied=False)
        made[kind] = (model, save_adapter(root / "adapter", model, tokenizer=True))
    return made


@pytest.fixture
def trainer_from(tmp_path, folders):
    """(kind, start, critic, precision, changes) → a trainer with ``RESPONSES`` for answers, two in a micro-batch."""

    def trainer(kind, start, critic, precision, **changes):
        model, adapter = folders[kind]
        lora = {"r": 4, "dropout": 0.3} if start in ("fresh LoRA", "loaded LoRA") else None
        path = str(adapter if start in ("merged LoRA", "loaded LoRA") else model)
        usual = {"model__path": path, "model__lora": lora, "train__micro_batch_size": 2, "train__learning_rate": 1e-2}
        config = tiny_run(tmp_path, **usual | CRITICS[critic] | PRECISIONS[precision] | changes)
        judge, generator = FakeRewards(lambda query, response: len(response) / 10), FakeGenerator(RESPONSES)
        made = trainer_of(config, judge, generator, stop_ids={EOS})
        for optimizer in made.optimizers if precision == "fp16" else ():
            optimizer.loss_scale.scale = 2.0**8  # a tiny model's gradients are large
        return made

    return trainer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("start", "critic"), STARTS)
def test_20_21_27_ratio_is_1_and_kl_0_before_the_first_step(trainer_from, kind, precision, start, critic):
    """The four settings in turn. One mini-batch is the whole update, so that every number is of the first."""
    turn = KINDS.index(kind) + STARTS.index((start, critic)) + 2 * list(PRECISIONS).index(precision)
    in_loss = {"ppo__kl_in": "loss", "ppo__kl_estimator": "k3", "ppo__entropy_coef": 0.01}
    changes = SETTINGS[turn % 4] | (in_loss if turn % 3 == 0 else {})
    trainer = trainer_from(kind, start, critic, precision, ppo__num_ppo_epochs=1, **changes)
    no_kl = NO_KL | ({"loss/kl_avg": 0} if turn % 3 == 0 else {})
    first = trainer.step()
    assert {name: first[name] for name in NOWHERE | no_kl} == NOWHERE | no_kl
    assert first["policy/grad_norm"] > 0
    trainer.state.step += 1
    second = trainer.step()
    assert {name: second[name] for name in NOWHERE} == NOWHERE, "equal weights, whatever they are"
    assert all(second[name] != 0 for name in no_kl), "the case cannot tell a KL from none"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("start", "critic"), STARTS)
def test_20_21_27_nothing_drifts_where_optimizers_do_nothing(monkeypatch, trainer_from, precision, start, critic):
    turn = STARTS.index((start, critic)) + list(PRECISIONS).index(precision)
    monkeypatch.setattr(PassOptimizer, "step", PassOptimizer.skip)
    trainer = trainer_from(
        KINDS[turn % 3], start, critic, precision, ppo__num_ppo_epochs=3, ppo__num_mini_batches=2, **SETTINGS[turn % 4],
    )  # fmt: skip
    before = {name: p.clone() for name, p in trainer.roles.state_dict().items()}
    for _ in range(2):
        row = trainer.step()
        trainer.state.step += 1
        assert {name: row[name] for name in NOWHERE | NO_KL} == NOWHERE | NO_KL
        assert row["update/num_steps"] == 6 and row["policy/grad_norm"] > 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.roles.state_dict().items())


def test_24_estimated_kl_is_the_exact_one(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "the cat sees"}\n')
    (tmp_path / "many.jsonl").write_text('{"prompt": "the cat sees"}\n' * 2048)
    config = tiny_run(
        tmp_path, data__prompts=str(tmp_path / "one.jsonl"), data__eval_prompts=str(tmp_path / "many.jsonl"),
        data__chat_template="none", sampling__response_length=1, train__learning_rate=3e-3, train__max_steps=4,
        train__micro_batch_size=8,
    )  # fmt: skip
    result = train_policy(config)
    ids = torch.tensor([AutoTokenizer.from_pretrained(config.output_dir)("the cat sees")["input_ids"]])
    with torch.no_grad():
        log_p, log_ref = (
            AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits[0, -1].log_softmax(-1)
            for path in (config.output_dir, config.model.path)
        )
    exact = float((log_p.exp() * (log_p - log_ref)).sum())
    deviation = float((log_p.exp() * (log_p - log_ref - exact).square()).sum().sqrt())
    assert result.evaluations[0]["eval_kl"] == 0.0
    assert exact > 0.001
    assert abs(result.evaluations[-1]["eval_kl"] - exact) < 4 * deviation / math.sqrt(2048)


@pytest.mark.parametrize("narrow", [{"top_k": 5}, {"top_p": 0.9}])
def test_24_what_is_not_drawn_from_the_policy_itself_is_refused_unless_asked_for(tmp_path, narrow):
    changes = {f"sampling__{name}": value for name, value in narrow.items()}
    with pytest.raises(ValidationError, match="draws answers from a distribution other than"):
        tiny_run(tmp_path, **changes)
    assert tiny_run(tmp_path, sampling__allow_truncated_sampling=True, **changes).sampling.is_truncated
    for unknown in ("min_new_tokens", "no_repeat_ngram_size"):
        with pytest.raises(ValidationError, match=unknown):
            tiny_run(tmp_path, **{f"sampling__{unknown}": 3})


def test_26_a_target_bounds_the_kl_and_a_collapse_is_told(tmp_path):
    """Five points for one word: without a target the policy says nothing else before long."""
    greedy = {
        "train__max_steps": 14, "train__learning_rate": 4e-2, "sampling__stop_token": None,
        "sampling__response_length": 2, "train__log_samples": 0,
    }  # fmt: skip
    bounds = {
        "free": {"ppo__kl_coef": 0.001},
        "target": {"ppo__kl_coef": 3.0, "ppo__kl_target": 0.5, "ppo__kl_horizon": 8},
        "stop": {"ppo__kl_coef": 0.001, "ppo__max_approx_kl": 1e-3},
    }
    last, told = {}, {}
    for name, bound in bounds.items():
        config = tiny_run(tmp_path, output_dir=str(tmp_path / name), **greedy | bound)
        (tmp_path / "rewards.py").write_text(
            "def letters(prompts, completions): return [5.0 * c.split().count('good') for c in completions]"
        )
        display = Heard()
        updates = train_policy(config, display=display).updates
        last[name] = updates[-5:]
        told[name] = [text for text in display.said if "collapsed" in text]
        assert {"rollout/top_token_share", "rollout/top_answer_share", "rollout/eos_rate"} <= updates[0].keys()
        skipped = [row["update/num_steps"] < 2 for row in updates]
        assert any(skipped) == (name == "stop"), "steps that were not taken are counted"
    kl = {name: sum(row["objective/kl"] for row in rows) / 5 for name, rows in last.items()}
    assert 0 < kl["target"] < 2.5 and kl["free"] > 6
    assert last["free"][-1]["rollout/top_answer_share"] > 0.9 and told["free"] and not told["target"]


def test_28_kl_starts_at_zero_with_an_adapter_that_brings_a_head_of_its_own(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    start = save_adapter(tmp_path / "start", base, tokenizer=True, modules_to_save=["lm_head"])
    config = tiny_run(tmp_path, model__path=str(start), model__lora={}, **STILL)
    assert [row["objective/kl"] for row in train_policy(config).updates] == [0, 0]


def test_28_kl_starts_at_zero_where_training_goes_on_from_an_adapter(tmp_path):
    base = save_tiny(tmp_path / "base")
    first = tiny_run(tmp_path, model__path=str(base), model__lora={"r": 4}, train__learning_rate=1e-2)
    train_policy(first)
    assert max(float(t.abs().max()) for name, t in weights(first.output_dir).items() if "lora_B" in name) > 1e-3
    for number, lora in enumerate(({}, None)):  # continued as an adapter; merged and trained whole
        changes = {"model__path": str(first.output_dir), "model__lora": lora, **STILL}
        config = tiny_run(tmp_path, output_dir=str(tmp_path / f"next{number}"), **changes)
        assert [row["objective/kl"] for row in train_policy(config).updates] == [0, 0]


def test_34_logged_numbers_are_those_of_the_samples(tmp_path):
    config = tiny_run(tmp_path, ppo__kl_coef=0.3, ppo__missing_eos_penalty=1.0, train__max_steps=3)
    result = train_policy(config)
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    for row in result.updates:
        mine = [sample for sample in samples if sample["step"] == row["step"]]
        scores = [sample["score"] for sample in mine]
        mean = sum(scores) / 8
        assert row["objective/scores"] == pytest.approx(mean, abs=1e-5)
        assert row["objective/scores_std"] == pytest.approx(pstdev(scores), abs=1e-5)
        assert row["rewards/letters"] == pytest.approx(sum(s["rewards"]["letters"] for s in mine) / 8, abs=1e-5)
        assert row["objective/non_score_reward"] == pytest.approx(-0.3 * row["objective/kl"], abs=1e-6)
        assert row["objective/rlhf_reward"] == pytest.approx(mean - 0.3 * row["objective/kl"], abs=1e-5)
        assert row["rollout/length"] == sum(sample["length"] for sample in mine) / 8
        assert row["val/num_eos_tokens"] == sum(sample["finish_reason"] == "stop" for sample in mine)
        assert row["episode"] == 8 * row["step"]
    assert result.updates[-1]["objective/kl"] != 0


class PoisonGradient(TrainerCallback):
    """Makes one number of one gradient NaN in the second update, and keeps the weights from before it."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            self.model = model
            self.before = {name: p.detach().clone() for name, p in model.named_parameters()}
            next(p for p in model.parameters() if p.requires_grad).register_hook(self.poison)

    @staticmethod
    def poison(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = math.nan
        return gradient


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "LoRA"])
def test_35_gradient_that_is_not_finite_never_reaches_a_weight(tmp_path, lora):
    config, poison = tiny_run(tmp_path, model__lora=lora, train__max_bad_batches=0), PoisonGradient()
    with pytest.raises(TrainingError, match=r"^gradient is not finite for 8 .* no optimizer step was taken"):
        train_policy(config, callbacks=[poison])
    assert all(torch.equal(p, poison.before[name]) for name, p in poison.model.named_parameters())
    assert [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")] == [1]
    record, mark = read_jsonl(config.output_dir / "bad_batches.jsonl")
    assert record["what"] == "gradient is not finite" and len(record["rollouts"]) == 8
    assert mark == {"step": 2, "last_good_checkpoint": None}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32 passes", "bf16 passes"])
@pytest.mark.parametrize(
    ("lora", "critic"), [(None, "model"), (None, "head"), *(({"r": 2}, kind) for kind in ("model", "head", "adapter"))]
)
def test_35_types_of_body_adapter_and_head_do_not_clash(tmp_path, lora, critic, bf16):
    changes = {"model__dtype": "bfloat16", "model__lora": lora, "value__kind": critic, "train__bf16": bf16}
    config = tiny_run(tmp_path, train__max_steps=1, **changes)
    (update,) = train_policy(config).updates
    assert all(math.isfinite(value) for value in update.values()) and update["update/num_bad"] == 0
    assert update["policy/grad_norm"] > 0 and all(x.isfinite().all() for x in weights(config.output_dir).values())


def test_37_large_scores_stay_finite(tmp_path):
    config = tiny_run(tmp_path)
    reward = "def letters(prompts, completions): return [1e6 * len(c) for c in completions]"
    (tmp_path / "rewards.py").write_text(reward)
    for row in train_policy(config).updates:
        assert all(math.isfinite(value) for value in row.values())
