"""Class B of the fault list: padding, ends of answers, masks.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import pytest

from tests.models.build import edit_json
from tests.tiny import save_tiny, tiny_tokenizer
from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tether.metrics.writers import read_jsonl
from tether.models.tokenizer import load_tokenizer
from tether.train.run import train_policy

PROMPTS = "".join(f'{{"prompt": "{text}"}}\n' for text in ("cat", "i like the red dog and you", "the sun", "you run"))


def own_pad(tokenizer):
    tokenizer.pad_token = "<pad>"


def end_as_pad(tokenizer):
    tokenizer.pad_token = "<eos>"


def added_pad(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # id 40, of which the model has no row
    assert tokenizer.pad_token_id == 40


def right_side(tokenizer):
    tokenizer.padding_side = "right"


def left_side(tokenizer):
    tokenizer.padding_side = "left"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_5_7_17_pad_token_and_padding_side_change_nothing(tmp_path, kind):
    first = None
    for change in (own_pad, end_as_pad, added_pad, right_side, left_side):
        model = save_tiny(tmp_path / change.__name__, kind, pad=None)
        tokenizer = tiny_tokenizer(pad=None)
        change(tokenizer)
        side = tokenizer.padding_side
        tokenizer.save_pretrained(model)  # which does not write the side
        edit_json(model / "tokenizer_config.json", lambda settings, side=side: settings.update(padding_side=side))
        assert load_tokenizer(str(model)).padding_side == side
        config = tiny_run(
            tmp_path, model__path=str(model), data__prompts=str(tmp_path / "unequal.jsonl"),
            sampling__response_length=12, output_dir=str(tmp_path / "out" / change.__name__), value__kind="model",
            train__seed=1,
        )  # fmt: skip
        (tmp_path / "unequal.jsonl").write_text(PROMPTS)
        train_policy(config)
        out = config.output_dir
        got = reproducible(out), weights(out), read_jsonl(out / "samples.jsonl")
        first = first or got
        assert got[0] == first[0]
        assert_same_weights(got[1], first[1])
        assert got[2] == first[2]
        reasons = {sample["finish_reason"] for sample in got[2]}
        assert reasons == {"stop", "length"}, "the case needs answers of both kinds"


@pytest.mark.parametrize("stop", ["eos", "the"])
def test_14_missing_end_is_judged_by_the_stop_token_on_the_answer_alone(tmp_path, stop):
    config = tiny_run(
        tmp_path, sampling__stop_token=stop, sampling__response_length=20, ppo__missing_eos_penalty=100.0,
        train__max_steps=1, train__rollout_batch_size=16, train__log_samples=16,
    )  # fmt: skip
    result = train_policy(config)
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    ended = [sample["finish_reason"] == "stop" for sample in samples]
    assert True in ended and False in ended, "the case needs answers of both kinds"
    for sample, did_end in zip(samples, ended, strict=True):
        assert "<eos>" in sample["query"]
        assert sample["score"] == pytest.approx(sample["rewards"]["letters"] - (0 if did_end else 100), abs=1e-4)
        if stop == "the":
            # Row 11: neither the end nor anything after it is scored.
            assert "the" not in sample["response"].split()
            assert sample["length"] <= 20 if did_end else sample["length"] == 20
    assert result.updates[0]["val/num_eos_tokens"] == sum(ended)
    assert result.updates[0]["rollout/length_max"] <= 20
