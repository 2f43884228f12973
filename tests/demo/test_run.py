"""What the demo refuses before it starts."""

import pytest

from tether.demo import run, vader
from tether.errors import ConfigError


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path):
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="holds policy, not written by an earlier demo"):
        run.run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"^--output: .*file is a file; name a folder$"):
        run.run_demo(tmp_path / "file")


def test_missing_judge_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(vader, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'VADER.*pip install "tether\[demo\]"'):
        run.run_demo(tmp_path)


def test_vader_tells_warm_from_cold():
    warm, plain, cold = vader.compound(["I love this wonderful day!", "The door is green.", "I hate this awful day."])
    assert warm > 0.5 and plain == 0.0 and cold < -0.5


def test_cache_folder_follows_the_desktop_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run.cache_folder() == tmp_path / "tether"
