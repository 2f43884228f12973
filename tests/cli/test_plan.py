"""What ``tether plan`` shows."""

import pytest

from tests.train.runs import tiny_run
from tests.train.test_mistakes import judge_of
from tether.cli.main import main
from tether.cli.plan import size
from tether.config.launched import num_processes
from tether.config.load import dump_config


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536 * 1024, "1.5 MiB"), (1020 * 2**20, "1020 MiB"),
        (2**34, "16 GiB"),
    ],
)
def test_sizes_are_for_people(num_bytes, text):
    assert size(num_bytes) == text


def test_a_plan_shows_configuration_arithmetic_roles_and_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = tiny_run(tmp_path, model__lora={"r": 4}, train__total_episodes=20)
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    shown = capsys.readouterr().out
    for line in dump_config(config.resolved(bf16=False)).splitlines():
        assert line.strip()[:40] in shown
    for text in ("3 of 8 answers = 24 episodes", "base", "reference", "peak memory", "letters", "KiB"):
        assert text in shown, text
    assert not config.output_dir.exists()


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
