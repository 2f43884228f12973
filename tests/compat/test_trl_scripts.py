"""Scripts as TRL's users have them, and what they push, from the outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.compat.trl_runs import TEXTS, arguments, trainer
from tests.hub import fake_hub
from tests.tiny import save_tiny
from tether.errors import ConfigError
from tether.metrics.writers import read_jsonl

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")


@pytest.fixture
def folder(tmp_path):
    save_tiny(tmp_path / "policy")
    save_tiny(tmp_path / "judge", num_labels=1)
    (tmp_path / "data").mkdir()
    for split, times in (("train", 4), ("validation", 1)):
        lines = [json.dumps({"prompt": text, "other": 1}) + "\n" for text in TEXTS * times]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines))
    return tmp_path


def ran(folder, script, *arguments, launcher=(), **environment):
    """The output of a script that ended well."""
    sizes = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --total_episodes 16 --response_length 6"
    command = [
        sys.executable, *launcher, str(SCRIPTS / script), "--dataset_name", "data", "--sft_model_path", "policy",
        "--reward_model_path", "judge", "--output_dir", "out", "--learning_rate", "1e-3", *sizes.split(), *arguments,
    ]  # fmt: skip
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_script_with_full_models(folder):
    shown = ran(folder, "sentiment.py", "--missing_eos_penalty", "1.0", "--num_ppo_epochs", "1")
    assert "model response" in shown
    _, info = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert AutoTokenizer.from_pretrained(folder / "out").pad_token == "[PAD]"
    updates = read_jsonl(folder / "out" / "metrics.jsonl")
    assert [row["step"] for row in updates] == [1, 2]
    assert updates[0]["rollout/length"] == 6.0
    assert (folder / "out" / "checkpoint-2").is_dir()


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


def test_a_script_with_lora_under_accelerate_that_pushes(folder, hub):
    shown = ran(
        folder, "summaries.py", "--use_peft", "--stop_token", "eos", "--eval_strategy", "steps", "--eval_steps", "2",
        "--push_to_hub", "--hub_token", "hf_secret", "--hub_strategy", "end", launcher=LAUNCH, HF_ENDPOINT=hub.url,
        HF_HUB_OFFLINE="0",
    )  # fmt: skip
    assert "episodes 16" in shown
    assert "hf_secret" not in shown
    assert hub.messages == ["Model save", "End of training"]
    files = hub.files
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert not {"samples.jsonl", "metrics.jsonl", "config.yaml"} & set(files)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "policy"), folder / "out")
    assert again.peft_config["default"].r == 4
    rows = read_jsonl(folder / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_scores" in row] == [0, 2]
    assert not any(b"hf_secret" in path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file())


def test_what_is_pushed_and_when(tmp_path, hub):
    own = {"hub_model_id": "mine", "hub_private_repo": True, "hub_token": "t"}
    args = arguments(tmp_path, push_to_hub=True, save_steps=1, **own)
    made = trainer(tmp_path, args=args)
    assert hub.repositories == {"me/mine": True}
    assert made.hub_model_id == "me/mine"
    made.train()
    assert hub.messages == ["Training in progress, step 1", "Training in progress, step 2"]
    made.push_to_hub(dataset_name="org/prompts", tags="test", model_name="Mine")
    assert hub.messages[-1] == "End of training"
    assert hub.files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    for text in ("# Mine", "- org/prompts", "- test", "- ppo", "library_name: transformers", "PPOTrainer", "| 2 |"):
        assert text in card
    assert "tether ppo" not in card
    assert not {"samples.jsonl", "metrics.jsonl", "config.yaml", "manifest.json"} & set(hub.files)
    assert {token for _, token in hub.requests} == {"Bearer t"}, hub.requests


def test_pushing_without_having_asked_for_it_before(tmp_path, hub):
    made = trainer(tmp_path)
    with pytest.raises(ConfigError, match="holds no run yet; train first"):
        made.push_to_hub(token="t")
    made.train()
    made.push_to_hub(token="t")
    assert hub.repositories == {"me/out": False}
    assert hub.messages == ["End of training"]


def test_a_hub_that_refuses_stops_the_run_before_it_begins_and_not_later(tmp_path, hub, caplog):
    args = arguments(tmp_path, push_to_hub=True, hub_token="t", save_steps=1)
    made = trainer(tmp_path, args=args)
    hub.refuses = True
    made.train()
    assert made.state.global_step == 2
    assert sum("push_to_hub after step" in record.message for record in caplog.records) == 2
    with pytest.raises(ConfigError, match="push_to_hub: repository out could not be opened"):
        trainer(tmp_path, args=args)
