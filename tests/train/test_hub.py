"""Pushing to a hub: what goes there, what stays, and what is said where it cannot go."""

import json

import httpx2
import pytest

from tests.hub import TOKEN, fake_hub
from tests.models.build import save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.errors import ConfigError, HubError
from tether.models.saving import merge_adapter, written_into
from tether.train.hub import model_files
from tether.train.run import train_policy

MODEL = {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja"}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)
    with fake_hub(monkeypatch) as running:
        yield running


class Said:
    """A display that keeps its messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)

    def __getattr__(self, name):
        return lambda *args: None


def test_a_run_is_pushed_at_its_end(tmp_path, hub):
    config = tiny_run(tmp_path, train__push_to_hub=True, train__hub_model_id="lab/better", train__max_steps=1)
    said = Said()
    train_policy(config, display=said)
    assert hub.repositories == {"lab/better": True}
    assert hub.files.keys() == MODEL
    assert hub.files["model.safetensors"] == (config.output_dir / "model.safetensors").read_bytes()
    assert said.messages[-1].startswith("pushed: ")
    assert hub.requests and [asked for asked in hub.requests if asked[1] != f"Bearer {TOKEN}"] == []
    assert TOKEN not in (config.output_dir / "config.yaml").read_text() + hub.files["README.md"].decode()


def test_the_command_pushes_a_checkpoint_without_its_state(tmp_path, hub, capsys):
    config = tiny_run(tmp_path, train__save_steps=1, model__lora={"r": 2}, train__max_steps=1)
    train_policy(config)
    assert main(["push", str(config.output_dir / "checkpoint-1"), "--public"]) == 0
    assert hub.repositories == {"me/checkpoint-1": False}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= hub.files.keys()
    assert not any("tether_state" in name or name == "manifest.json" for name in hub.files)
    shown = capsys.readouterr().out
    assert "base is the local folder" in shown and "pushed: http" in shown


def test_prompts_and_answers_can_stay_out_of_the_card(tmp_path, hub, capsys):
    config = tiny_run(tmp_path, train__max_steps=1, data__eval_prompts=str(tmp_path / "prompts.jsonl"))
    train_policy(config)
    card = (config.output_dir / "README.md").read_bytes()
    assert b"## Answers" in card and b"the cat sees" in card
    assert main(["push", str(config.output_dir), "--no_samples"]) == 0
    pushed = hub.files["README.md"].decode()
    assert "## Answers" not in pushed and "the cat sees" not in pushed
    parts = card.decode().split("## Answers")
    assert pushed == parts[0] + parts[1][parts[1].index("## Use") :]
    assert hub.files.keys() == MODEL and (config.output_dir / "README.md").read_bytes() == card
    assert main(["push", str(config.output_dir)]) == 0
    assert hub.files["README.md"] == card


def test_folders_of_others_are_pushed_by_the_names_of_their_files(tmp_path, hub):
    base = tiny_run(tmp_path).model.path
    (tmp_path / base / "notes.md").write_text("mine")
    for inner in ("checkpoint-5", "checkpoint-5/tether_state", ".cache", "additional_chat_templates"):
        (tmp_path / base / inner).mkdir()
        for name in ("state.json", "model.safetensors", "tools.jinja"):
            (tmp_path / base / inner / name).write_text("{}")
    assert main(["push", str(base), "--to", "lab/start"]) == 0
    assert hub.files.keys() == MODEL - {"README.md"} | {"additional_chat_templates/tools.jinja"}
    adapter = save_adapter(tmp_path / "adapter", base, tokenizer=True)
    merge_adapter(str(adapter), tmp_path / "merged")
    assert "model.safetensors" in model_files(tmp_path / "merged")


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_model_that_is_not_whole_is_refused(tmp_path, hub, capsys, is_listed):
    with written_into(tmp_path / "model") as folder:
        save_tiny(folder)
    if not is_listed:
        (tmp_path / "model" / "manifest.json").unlink()
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert main(["push", str(tmp_path / "model")]) == 2
    assert "model.safetensors: Error while deserializing header" in capsys.readouterr().err
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert main(["push", str(tmp_path / "model")]) == 2
    told = "no longer holds model.safetensors" if is_listed else "holds no weights as safetensors"
    assert told in capsys.readouterr().err
    assert hub.files == {} and hub.repositories == {}


def test_offline_is_told_before_training(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tether.train.run.build_trainer", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"train.push_to_hub: HF_HUB_OFFLINE is set"):
        train_policy(tiny_run(tmp_path, train__push_to_hub=True))


def test_a_hub_that_refuses_is_told_before_training(tmp_path, hub, monkeypatch):
    hub.refuses = True
    monkeypatch.setattr("tether.train.run.build_trainer", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"repository out could not be opened on the hub: .*hf auth login") as raised:
        train_policy(tiny_run(tmp_path, train__push_to_hub=True))
    assert TOKEN not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_told_before_training(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise httpx2.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tether.train.hub.HfApi.create_repo", refused)
    monkeypatch.setattr("tether.train.run.build_trainer", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"^train\.push_to_hub: repository out could not be .*: Name") as raised:
        train_policy(tiny_run(tmp_path, train__push_to_hub=True))
    assert "cannot be reached: check the network" in str(raised.value)
    assert "hf auth login" not in str(raised.value)  # a token would not help


def test_a_failure_at_the_end_leaves_the_model_and_says_how_to_try_again(tmp_path, hub, monkeypatch):
    config = tiny_run(tmp_path, train__push_to_hub=True, train__max_steps=1)
    preupload = type(hub).post

    def post(self, path, body):
        return (500, {"error": "down"}) if "/commit/" in path else preupload(self, path, body)

    monkeypatch.setattr(type(hub), "post", post)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits longer each time that it asks again
    with pytest.raises(HubError, match=r"out could not be pushed to me/out: .*--to me/out` tries again"):
        train_policy(config)
    assert (config.output_dir / "model.safetensors").is_file() and (config.output_dir / "report.html").is_file()


def test_folders_without_a_model_are_refused(tmp_path, hub, capsys):
    assert main(["push", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err and hub.repositories == {}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {}}))
    with pytest.raises(ConfigError):
        model_files(tmp_path)


def test_what_a_folder_lists_in_other_folders_stays_but_for_chat_templates(tmp_path):
    with written_into(tmp_path) as temporary:
        for name in ("config.json", "additional_chat_templates/tools.jinja", "state/optimizer.bin"):
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text("{}")
    assert sorted(model_files(tmp_path)) == ["additional_chat_templates/tools.jinja", "config.json"]
