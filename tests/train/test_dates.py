"""Chat templates that print today's date: a command keeps the one that it started with."""

import json
from datetime import datetime

import pytest
from transformers import AutoTokenizer

from tests.cli.test_chat import OPTIONS, noted
from tests.compat.trl_runs import arguments, trainer
from tests.stages.test_sft import stage
from tests.tiny import save_tiny, tiny_tokenizer
from tests.train.runs import seen_by_models, tiny_run
from tether.config.load import load_config
from tether.config.source import SourceConfig
from tether.errors import CheckpointError
from tether.inference.chat import open_chat
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.inference.scoring import score_file
from tether.metrics.writers import read_jsonl
from tether.stages.sft import train_sft
from tether.train.run import open_trainer, train_policy

DAYS = ("one", "two", "three")
TEMPLATE = (
    "{%- if strftime_now is defined %}{%- set today = strftime_now('%d') %}{%- else %}{%- set today = 'none' %}"
    "{%- endif %}" + "".join(f"{{{{- '{word} ' if today == '0{i}' else '' }}}}" for i, word in enumerate(DAYS, 1))
)
"""Prints the first three days of a month as words that the tiny tokenizer knows."""


@pytest.fixture
def day(monkeypatch):
    """Sets the day on which everything happens from now on, a second before midnight."""

    def begin(number):
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 1, number, 23, 59, 59)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("tether.config.chat.datetime", Clock)

    begin(1)
    return begin


def dated(folder):
    """Puts the day into a saved tokenizer's template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def judged_run(folder, **changes):
    """A run whose policy and whose judge, in its own template, read the day."""
    if not (folder / "judge").exists():
        dated(save_tiny(folder / "judge", "qwen2", num_labels=1, seed=1))
        tiny_run(folder)
        dated(folder / "llama-tied")
    judge = {"type": "model", "path": str(folder / "judge"), "name": "judge"}
    return tiny_run(folder, **{"rewards": [judge], "train__save_steps": 1, "data__eval_fraction": 0.3} | changes)


def texts(folder):
    return [row["query"].split()[0] for row in read_jsonl(folder / "samples.jsonl")]


def test_a_run_is_resumed_and_evaluated_with_the_date_of_its_start(tmp_path, day, monkeypatch):
    config = judged_run(tmp_path)
    train_policy(config)
    assert load_config(config.output_dir / "config.yaml").data.chat_template_now == "2026-01-01T23:59:59"
    day(2)
    seen = seen_by_models(monkeypatch)
    train_policy(judged_run(tmp_path, resume=str(config.output_dir / "checkpoint-1")))
    assert set(texts(config.output_dir)) == {"one"}
    assert seen and all(text.strip().startswith("one") for text in seen), "the judge reads the same day"
    del seen[:]
    samples = evaluate_path(config.output_dir).samples
    assert {row["query"].split()[0] for row in samples} == {"one"} and len(seen) == len(samples)
    assert all(text.strip().startswith("one") for text in seen)
    asked = noted(monkeypatch)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    open_chat(str(config.output_dir), **OPTIONS | {"alone": True}).say("the cat")
    generate_path(config.output_dir, tmp_path / "asked.jsonl")
    one = tiny_tokenizer().convert_tokens_to_ids("one")
    assert [query[0] for query in asked] == [one, one]


def test_another_run_has_its_own_date(tmp_path, day):
    train_policy(judged_run(tmp_path))
    day(3)
    anew = judged_run(tmp_path, output_dir=str(tmp_path / "anew"))
    train_policy(anew)
    assert set(texts(anew.output_dir)) == {"three"}


def test_a_finished_run_stays_finished_on_another_day(tmp_path, day):
    config = judged_run(tmp_path, resume="auto")
    train_policy(config)
    day(2)
    assert train_policy(config).updates == []


def test_the_date_can_be_set_but_not_changed(tmp_path, day):
    config = judged_run(tmp_path, data__chat_template_now="2026-01-03")
    train_policy(config)
    assert set(texts(config.output_dir)) == {"three"}
    with pytest.raises(CheckpointError, match=r"chat_template_now: was '2026-01-03.*', now '2026-01-02"):
        train_policy(judged_run(tmp_path, data__chat_template_now="2026-01-02", resume=True))
    with open_trainer(judged_run(tmp_path, data__chat_template_now="2026-01-03", resume=True)) as resumed:
        assert resumed.parts.rewards.parts[0].source.reader.now == "2026-01-03T00:00:00"


def test_a_stage_is_resumed_with_the_date_of_its_start(tmp_path, day):
    config = stage(tmp_path, max_steps=2)
    dated(tmp_path / "model")
    assert train_sft(config.model_copy(update={"resume": "auto"}), stop=lambda: "SIGTERM").interrupted == "SIGTERM"
    day(2)
    told = []
    assert train_sft(config.model_copy(update={"resume": "auto"}), tell=told.append).interrupted is None
    assert any("the first prompt: 'one " in line for line in told)
    day(3)
    assert train_sft(config.model_copy(update={"resume": "auto"})).metrics == {}, "it is finished"
    moved = (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    data = config.data.model_copy(update={"demonstrations": str(moved)})
    assert train_sft(config.model_copy(update={"resume": "auto", "data": data})).metrics == {}, "also with moved rows"


def test_a_trl_script_is_resumed_with_the_date_of_its_start(tmp_path, day):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    rows = [{"prompt": text} for text in ("the cat sees", "a nice night", "you runs and")]
    given = {"args": arguments(tmp_path, save_steps=1), "processing_class": tokenizer, "train_dataset": rows}
    trainer(tmp_path, **given).train()
    day(2)
    trainer(tmp_path, **given).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert set(texts(tmp_path / "out")) == {"one"}


def test_a_file_is_scored_with_one_date(tmp_path, day):
    dated(save_tiny(tmp_path / "judge", num_labels=1))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "the cat", "response": "good"}) + "\n", encoding="utf-8")
    rewards = [{"type": "model", "path": str(tmp_path / "judge")}]
    scored = score_file(SourceConfig.model_validate({"rewards": rewards}), tmp_path / "rows.jsonl")
    assert "one" in scored.seen[0]
    data = {"chat_template_now": "2026-01-02"}
    scored = score_file(SourceConfig.model_validate({"rewards": rewards, "data": data}), tmp_path / "rows.jsonl")
    assert "two" in scored.seen[0]
