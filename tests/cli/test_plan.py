"""What ``tether plan`` shows."""

import re

import pytest

from tests.train.runs import tiny_run
from tests.train.test_mistakes import judge_of
from tether.cli.main import main
from tether.config.launched import num_processes
from tether.config.load import dump_config, parse_config


def shown_plan(config, folder, capsys, monkeypatch, *options, columns=200):
    """What ``tether plan`` prints."""
    monkeypatch.setenv("COLUMNS", str(columns))
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert main(["plan", str(folder / "run.yaml"), *options]) == 0
    return capsys.readouterr().out


def test_a_plan_shows_settings_arithmetic_roles_and_memory(tmp_path, capsys, monkeypatch):
    config = tiny_run(tmp_path, model__lora={"r": 4}, train__total_episodes=20)
    shown = shown_plan(config, tmp_path, capsys, monkeypatch)
    settings, _, rest = shown.partition("\nbatches")
    for text in ("total_episodes: 20", "r: 4", "kind: adapter", f"output_dir: {config.output_dir}"):
        assert text in settings, text  # what was set, and what follows from it
    assert "cliprange" not in settings  # a default
    for text in ("3 of 8 answers = 24 episodes", "base", "reference", "peak memory", "letters", "KiB"):
        assert text in rest, text
    assert shown.splitlines()[-1] == "nothing was found that would stop the run"
    assert not config.output_dir.exists()


def test_a_plan_shows_every_key_if_asked(tmp_path, capsys, monkeypatch):
    config = tiny_run(tmp_path, train__total_episodes=20)
    shown, _, _ = shown_plan(config, tmp_path, capsys, monkeypatch, "--config").partition("\nbatches")
    assert parse_config(shown) == config.resolved(bf16=False)


@pytest.mark.parametrize("processes", [1, 8])
def test_no_word_of_a_plan_is_broken_on_a_narrow_terminal(processes, tmp_path, capsys, monkeypatch):
    config = tiny_run(tmp_path, model__lora={"r": 4})
    wide, narrow = (
        shown_plan(config, tmp_path, capsys, monkeypatch, f"--processes={processes}", columns=columns)
        for columns in (400, 80)
    )
    words = set(re.findall(r"[^\s│╭─┬╮├┼┤╰┴╯]+", narrow))
    assert words == set(re.findall(r"[^\s│╭─┬╮├┼┤╰┴╯]+", wide))


def test_a_plan_ends_with_what_would_stop_the_run(tmp_path, capsys, monkeypatch):
    config = tiny_run(tmp_path)
    config.output_dir.mkdir()
    (config.output_dir / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    last = shown_plan(config, tmp_path, capsys, monkeypatch).splitlines()[-1]
    assert last.startswith("warning: output_dir: ") and last.endswith("or add --overwrite to replace it")


def test_a_plan_tries_reward_functions_but_no_services(tmp_path, capsys, monkeypatch):
    config = tiny_run(tmp_path)
    service = {"type": "http", "url": "http://127.0.0.1:1/"}
    several = {"type": "ensemble", "members": [service, service]}
    with_service = tiny_run(tmp_path, rewards=[*config.model_dump(mode="json")["rewards"], service, several])
    assert "nothing was found that would stop" in shown_plan(with_service, tmp_path, capsys, monkeypatch)
    (tmp_path / "rewards.py").write_text("def letters(prompts, completions):\n    [len(c) for c in completions]\n")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "rewards.0: the function failed to score a test answer: reward function letters returned None" in told


def test_a_plan_warns_of_answers_that_may_be_too_long_for_a_reward_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    tiny_run(tmp_path)
    config = tiny_run(tmp_path, rewards=judge_of(tmp_path / "judge", own_tokenizer=True), sampling__response_length=4)
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "warning: rewards.0: row 3 of the prompts has 10 tokens" in capsys.readouterr().out


def test_a_file_of_llamafactory_is_planned_for_as_many_processes_as_were_said(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("tether.compat.load.load_any", lambda *given: seen.append(num_processes()) or (config, None))
    config = tiny_run(tmp_path)
    assert main(["plan", "their.yaml", "--processes=2"]) == 0
    assert seen == [2] and num_processes() == 1
