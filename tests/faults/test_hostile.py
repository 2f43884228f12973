"""Input that means harm: nothing of it runs, nothing outside of the output folder changes, the terminal stays sane."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import time
import tracemalloc

import pytest
import torch
from rich.console import Console

from tests.data.loading import load_prompts
from tests.faults.test_state import rewritten
from tests.train.runs import tiny_run
from tether.cli.display import RunDisplay
from tether.config.load import dump_config
from tether.errors import USER_ERRORS, CheckpointError, ConfigError, ModelError
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.train.run import train_policy

HOSTILE = {
    "terminal escapes": "the \x1b[2J\x1b]0;owned\x07 cat \x9b31m",
    "control characters": "the \x00\x01\x08\x7f cat\r you",
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)> cat",
    "the end of a page": "</pre></body></html><!-- cat",
    "markup": "[red]cat[/red] [link=file:///etc/passwd]you[/link]",
    "another direction": "the \u202ecat\u2066 you\u2069",
    "templates": "{{ 7 * 7 }}{% raw %}{{ config.__class__ }} cat",
    "special tokens": "<eos><pad><bos> cat <eos>",
    "YAML": "!!python/object/apply:os.system ['echo owned'] &a *a cat",
}


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"prompt": text, "note": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_a_run_over_hostile_prompts_keeps_terminal_and_report_sane(tmp_path):
    stream = io.StringIO()
    prompts = write_rows(tmp_path / "hostile.jsonl", HOSTILE.values())
    config = tiny_run(tmp_path, data__eval_prompts=prompts)
    config = config.model_copy(update={"data": config.data.model_copy(update={"prompts": prompts})})
    echo = "def letters(prompts, completions): return [len(text) / 10 for text in completions]"
    (tmp_path / "rewards.py").write_text(echo, encoding="utf-8")
    with RunDisplay(Console(file=stream, width=200)) as display:
        train_policy(config, display=display)
    shown = stream.getvalue()
    assert "the cat" not in shown or "\x1b" not in shown
    assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or c in "\x7f\x9b\u202e\u2066\u2069"]
    assert "\\x1b[2J" in shown and "49" not in shown.split("config.__class__")[0][-20:]
    page = (config.output_dir / "report.html").read_text(encoding="utf-8")
    for harm in ("<script>alert", "<img src=x", "</body></html><!--", "\x1b", "\u202e"):
        assert harm not in page
    assert page.count("</html>") == 1
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    queries = {row["row"]: row["prompt"] for row in samples if row["split"] == "eval"}
    assert [queries[i] for i in range(len(HOSTILE))] == list(HOSTILE.values()), "what was read is kept as it was"


def test_lines_of_ten_megabytes_are_dropped_and_counted_in_bounded_time_and_memory(tmp_path):
    source = write_rows(tmp_path / "long.jsonl", ["the cat", "x" * 10_000_000, "the dog"])
    start = time.perf_counter()
    tracemalloc.start()
    data = load_prompts(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [prompt.row for prompt in data.prompts][::len(data.prompts) - 1] == [0, 2]
    assert peak < 200_000_000 and time.perf_counter() - start < 30


class Harm:
    """Makes a folder as it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def saved(tmp_path):
    config = tiny_run(tmp_path, train__save_steps=1, train__max_steps=1)
    train_policy(config)
    return config


@pytest.mark.parametrize("name", ["optimizers.pt", "random.pt"])
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_checkpoint_with_a_pickle_runs_nothing(tmp_path, saved, name, how):
    harm, buffer = Harm(tmp_path / "harmed"), io.BytesIO()
    torch.save({"policy": harm}, buffer) if how == "torch" else pickle.dump({"policy": harm}, buffer, protocol=2)
    rewritten(saved.output_dir / "checkpoint-1", f"tether_state/{name}", lambda content: buffer.getvalue())
    with pytest.raises(CheckpointError, match=rf"{name} holds more than tensors and numbers"):
        train_policy(saved.model_copy(update={"resume": True}))
    assert not (tmp_path / "harmed").exists()


def test_a_model_with_a_pickle_runs_nothing(tmp_path, saved):
    folder = tmp_path / "pickled"
    shutil.copytree(saved.model.path, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Harm(tmp_path / "harmed")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load_causal_lm(str(folder), dtype=None)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", ["../victim", "/victim", "a/../../victim", "..", "\\victim"])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path, saved, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    name = name.replace("/victim", str(victim)) if name == "/victim" else name
    (saved.output_dir / "manifest.json").write_text(json.dumps({"files": {name: {"bytes": 4, "sha256": ""}}}))
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        train_policy(saved.model_copy(update={"overwrite_output_dir": True}))
    assert victim.read_text() == "mine"


LINKS = ("checkpoint-1", ".checkpoint-1.partial", ".checkpoint-1.replaced", "checkpoint-7")


@pytest.mark.parametrize("replaced", LINKS)
@pytest.mark.parametrize("goes_on", [True, False], ids=["resume", "overwrite"])
def test_links_lead_nowhere(tmp_path, saved, replaced, goes_on):
    outside = tmp_path / "outside"
    shutil.copytree(saved.output_dir / "checkpoint-1", outside)
    before = digests(outside)
    link = saved.output_dir / replaced
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(outside)
    train = saved.train.model_copy(update={"max_steps": 2})
    changes = {"resume": True} if goes_on else {"overwrite_output_dir": True}
    try:
        train_policy(saved.model_copy(update={"train": train} | changes))
    except USER_ERRORS as error:
        assert (replaced, goes_on) == ("checkpoint-1", True) and "no complete checkpoint" in str(error)
    assert digests(outside) == before


WRITTEN = ("metrics.jsonl", "samples.jsonl", "config.yaml", ".config.yaml.tmp", ".metrics.jsonl.tmp")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("goes_on", [True, False], ids=["resume", "overwrite"])
def test_no_file_is_written_through_a_link(tmp_path, saved, name, goes_on):
    victim, link = tmp_path / "victim", saved.output_dir / name
    content = link.read_bytes() if link.is_file() else b"mine"
    victim.write_bytes(content)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    changes = {"resume": True} if goes_on else {"overwrite_output_dir": True}
    with pytest.raises(ConfigError, match=rf"output_dir: .*{name} is a link"):
        train_policy(saved.model_copy(update=changes))
    assert victim.read_bytes() == content


def digests(folder):
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [(str(file), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def test_a_state_with_a_hostile_configuration_is_only_text(tmp_path, saved):
    def hostile(content):
        state = json.loads(content)
        state["config"] = f"a: !!python/object/apply:os.mkdir ['{tmp_path / 'harmed'}']\n{dump_config(saved)}"
        return json.dumps(state).encode()

    rewritten(saved.output_dir / "checkpoint-1", "tether_state/state.json", hostile)
    with pytest.raises(USER_ERRORS, match="tags are not supported"):
        train_policy(saved.model_copy(update={"resume": True}))
    assert not (tmp_path / "harmed").exists()
