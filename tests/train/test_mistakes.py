"""What a user gets wrong is said in one message, before any model is loaded and before anything is written over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig
from pydantic import ValidationError
from transformers import PhimoeConfig, PhimoeForCausalLM

from tests.models.build import of_kind, save_adapter
from tests.tiny import EOS, VOCAB_SIZE, save_tiny, tiny_classifier, tiny_tokenizer
from tests.train.runs import tiny_run, write_prompts
from tether.config.load import dump_config
from tether.errors import USER_ERRORS, ConfigError, DataError, ModelError
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.inference.saved import run_config
from tether.machine.claim import claimed
from tether.models import classifiers, loading
from tether.models.attention import check_kernel
from tether.train.display import NullDisplay
from tether.train.inputs import check_data, load_data, resolved
from tether.train.norms import read_norms
from tether.train.run import train_policy


@pytest.fixture
def loaded(monkeypatch):
    """Paths of the models that were loaded."""
    paths, load = [], loading.from_pretrained

    def spy(kind, path, **options):
        paths.append(path)
        return load(kind, path, **options)

    for module in (loading, classifiers):
        monkeypatch.setattr(module, "from_pretrained", spy)
    return paths


def judge_of(folder, *, own_tokenizer, **keys):
    """A reward model with few positions, and a tokenizer of its own or the policy's."""
    tiny_classifier(max_position_embeddings=16).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if own_tokenizer:
        tokenizer.chat_template = tokenizer.chat_template.replace("<assistant>", "<bos>")
    tokenizer.save_pretrained(folder)
    return [{"type": "model", "path": str(folder)} | keys]


def own_model(folder, **keys):
    return {"type": "model", "path": str(folder)} | keys


def reward_adapter(folder, **changes):
    return {"rewards": [{"type": "adapter", "path": str(folder)}], "model__lora": {}} | changes


def loha_adapter(folder, base):
    """The settings of one; its weights are not looked at."""
    save_adapter(folder, base)
    LoHaConfig(task_type="CAUSAL_LM", base_model_name_or_path=str(base)).save_pretrained(folder)
    return str(folder)


def foreign_tokenizer(folder):
    """A model whose tokenizer has words that the model does not know."""
    save_tiny(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    return str(folder)


def file_in_the_way(folder):
    (folder / "file").write_text("mine")
    return str(folder / "file" / "out")


def mixture(folder):
    """A model with experts whose router has the type of a linear layer."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, eos_token_id=EOS)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def lm_adapter(folder):
    """An adapter of a language model."""
    return str(save_adapter(folder / "adapter", save_tiny(folder / "base", tied=False)))


MISTAKES = {
    "prompt beyond the vocabulary": (
        lambda f: {"model__path": foreign_tokenizer(f / "m"), "data__chat_template": "none"},
        r"^model\.path: .*/m has embeddings for 40 tokens, .*token 40, 'zebra', of the prompt in row 1",
    ),
    "stop token that is none": (
        lambda f: {"sampling__stop_token": "zebra horse"},
        r"^sampling\.stop_token 'zebra horse': got \['<unk>', '<unk>'\]",
    ),
    "stop token beyond the vocabulary": (
        lambda f: {"model__path": foreign_tokenizer(f / "m"), "sampling__stop_token": "zebra", "rows": ["the cat"]},
        r"^sampling\.stop_token zebra has id 40, but the model has only 40",
    ),
    "LoRA targets that match nothing": (
        lambda f: {"model__lora": {"target_modules": ["c_attn"]}},
        r"^model\.lora\.target_modules: \['c_attn'\] names no module of LlamaForCausalLM; .* k_proj, lm_head, o_proj",
    ),
    "LoRA targets with a router among them": (
        lambda f: {"model__path": mixture(f / "m"), "model__lora": {}},
        r"^model\.lora\.target_modules: all-linear includes model\.layers\.0\.mlp\.router, a PhimoeTopKRouter, which "
        r"is no plain linear .* Name others of its linear modules: \[k_proj, o_proj, q_proj, v_proj\]$",
    ),
    "LoRA targets that PEFT has no adapter for": (
        lambda f: {"model__lora": {"target_modules": r".*\.layers\.0"}},
        r"^model\.lora\.target_modules: .* PEFT cannot adapt LlamaForCausalLM: Target module Llama.* Name others",
    ),
    "LoRA on layers whose weights are read past it": (
        lambda f: {
            "model__path": of_kind(f / "m", "mamba", "MambaForCausalLM", state_size=4),
            "model__lora": {"target_modules": ["in_proj", "dt_proj"]},
        },
        r"^model\.lora\.target_modules: \['in_proj', 'dt_proj'\] includes backbone\.layers\.0\.mixer\.dt_proj, whose "
        r"weight MambaForCausalLM also reads .* Name others of its linear modules: \[in_proj, x_proj\]$",
    ),
    "a critic of a kind that has none": (
        lambda f: {"model__path": of_kind(f / "m", "cohere", "CohereForCausalLM", num_attention_heads=4)},
        r"^CohereForCausalLM: there is no sequence classifier of this kind, .* value\.kind head$",
    ),
    "a language model as reward model": (
        lambda f: {"rewards": [{"type": "model", "path": str(save_tiny(f / "judge"))}]},
        r"^rewards\.0\.path: .*/judge holds no scalar head; wanted a model trained as a sequence classifier",
    ),
    "a language model as critic": (
        lambda f: {"value__kind": "model", "value__init": str(save_tiny(f / "critic"))},
        r"^value\.init: .*/critic holds no scalar head",
    ),
    "a language model's adapter as critic": (
        lambda f: {"value": {"kind": "adapter", "init": lm_adapter(f)}, "model__lora": {}},
        r"^value\.init: .*/adapter is an adapter without a head \(task_type CAUSAL_LM\)",
    ),
    "a critic from a function": (
        lambda f: {"value__kind": "model", "value__init": "reward"},
        r"value\.init reward: the first reward is of type function, but a critic of kind model is copied from model",
    ),
    "a critic from a judge of another vocabulary": (
        lambda f: {"value__init": "reward", "rewards": [own_model(save_tiny(f / "judge", "qwen2", num_labels=1))]},
        r"^value\.init reward: the tokenizer of .*/judge has a different vocabulary",
    ),
    "a critic adapter from a full model": (
        lambda f: {"value__init": str(save_tiny(f / "critic", num_labels=1)), "model__lora": {}},
        r"^value\.init: .*/critic holds no adapter_config\.json",
    ),
    "an adapter without a head as reward model": (
        lambda f: {"rewards": [own_model(save_adapter(f / "sft", f / "llama-tied"))]},
        r"^rewards\.0\.path: .*/sft is an adapter without a head \(task_type CAUSAL_LM\); wanted the adapter of a seq",
    ),
    "a reward adapter of another base": (
        lambda f: reward_adapter(save_adapter(f / "judge", save_tiny(f / "other", seed=1), reward=True)),
        r"^rewards\.0\.path: .*/judge: .* was trained on .*/other, but the policy's base is .*/llama-tied",
    ),
    "a reward adapter beside one of another method": (
        lambda f: reward_adapter(
            save_adapter(f / "judge", f / "llama-tied", reward=True),
            model__path=loha_adapter(f / "start", f / "llama-tied"),
        ),
        r"^rewards\.0\.path: .*/judge: got a LORA adapter; wanted a LOHA adapter, as the policy's is",
    ),
    "a reward model of two labels": (
        lambda f: {"rewards": [own_model(save_tiny(f / "judge", num_labels=2))]},
        r"^rewards\.0\.path: .*/judge is .* with 2 labels; .*, or rewards\.0\.label, the .*: LABEL_0, LABEL_1$",
    ),
    "a label that is none": (
        lambda f: {"rewards": [own_model(save_tiny(f / "judge", num_labels=2), label="POSITIVE")]},
        r"^rewards\.0\.label: .*/judge: has no label 'POSITIVE'; wanted one of 0 \(LABEL_0\), 1 \(LABEL_1\)",
    ),
    "a critic of two labels": (
        lambda f: {"value__kind": "model", "value__init": str(save_tiny(f / "critic", num_labels=2))},
        r"^value\.init: .*/critic is a classifier with 2 labels",
    ),
    "answers too long for a reward model that reads ids": (
        lambda f: {"rewards": judge_of(f / "judge", own_tokenizer=False), "sampling__response_length": 12},
        r"^rewards\.0: sampling\.response_length 12 after the longest query of 5 tokens makes 17, .*judge reads 16: l",
    ),
    "prompts too long for a reward model that reads text": (
        lambda f: {"rewards": judge_of(f / "judge", own_tokenizer=True, max_length=6)},
        r"^rewards\.0: row 0 of the prompts has 7 tokens with .*, .*judge reads 6: .* rewards\.0\.max_length",
    ),
    "a file in the way": (lambda f: {"output_dir": file_in_the_way(f)}, r"^output_dir: .*/file is a file; name a"),
    "a folder beyond reach": (lambda f: {"output_dir": "/proc/out"}, r"^output_dir: /proc/out cannot be created"),
    "the policy's own folder": (
        lambda f: {"output_dir": str(f / "llama-tied"), "overwrite_output_dir": True},
        r"^output_dir: .*/llama-tied holds a model",
    ),
    "a reward function that ends the process": (
        lambda f: (f / "rewards.py").write_text("import sys\nsys.exit(3)\n") and {},
        r"^rewards\.0\.path: .*rewards\.py cannot be run: SystemExit: 3",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_before_a_model_is_loaded(tmp_path, loaded, name):
    tiny_run(tmp_path)  # writes the files
    changes, message = MISTAKES[name]
    changes = changes(tmp_path)
    rows = changes.pop("rows", ["the cat", "the zebra"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    written = (tmp_path / "rewards.py").read_text()
    with pytest.raises((*USER_ERRORS, ValidationError), match=message):
        config = tiny_run(tmp_path, data__prompts=str(tmp_path / "rows.jsonl"), **changes)
        (tmp_path / "rewards.py").write_text(written)
        train_policy(config)
    assert loaded == []


@pytest.mark.parametrize(("response_length", "is_told"), [(3, False), (4, True)])
def test_answers_that_may_be_too_long_for_a_reward_model_are_told_once(tmp_path, loaded, response_length, is_told):
    tiny_run(tmp_path)
    rewards = judge_of(tmp_path / "judge", own_tokenizer=True)
    held_out = {"data__eval_prompts": str(write_prompts(tmp_path / "held_out.jsonl"))}
    config = tiny_run(tmp_path, rewards=rewards, sampling__response_length=response_length, **held_out)
    notes = check_data(resolved(config), load_data(config))
    assert len(notes) == is_told and loaded == []
    if is_told:
        assert re.search(r"^rewards\.0: row 3 of the prompts has 10 .* leaves 7 of the 16 tokens", notes[0]), notes
        assert re.search(r"ends the run: .*, or set rewards\.0\.missing to the score of such answers$", notes[0]), notes


@pytest.mark.parametrize(("own_tokenizer", "left"), [(True, 7), (False, 8)])
def test_answers_that_are_too_long_for_a_reward_model_may_have_a_score(tmp_path, loaded, own_tokenizer, left):
    tiny_run(tmp_path)
    rewards = judge_of(tmp_path / "judge", own_tokenizer=own_tokenizer, missing=-1)
    config = tiny_run(tmp_path, rewards=rewards, sampling__response_length=9)
    (note,) = check_data(resolved(config), load_data(config))
    assert re.search(rf"^rewards\.0: row 3 .* leaves {left} of .* is 9 .* A longer answer counts -1$", note), note
    assert loaded == []


def test_run_never_writes_over_what_it_reads(tmp_path, loaded):
    first = tiny_run(tmp_path, train__save_steps=1, value__kind="model", value__save=True)
    train_policy(first)
    del loaded[:]
    checkpoint = first.output_dir / "checkpoint-1"
    again = tiny_run(tmp_path, model__path=str(checkpoint), overwrite_output_dir=True)
    with pytest.raises(ConfigError, match=r"would overwrite .*checkpoint-1, which model\.path names"):
        train_policy(again)
    assert (checkpoint / "model.safetensors").exists()
    assert loaded == []
    critic = first.output_dir / "critic"
    again = tiny_run(tmp_path, value__kind="model", value__init=str(critic), overwrite_output_dir=True)
    with pytest.raises(ConfigError, match=r"would overwrite .*critic, which value\.init names"):
        train_policy(again)
    assert (critic / "model.safetensors").exists()
    elsewhere = tiny_run(tmp_path, output_dir=str(tmp_path / "other"), train__save_steps=1)
    train_policy(elsewhere)
    with pytest.raises(ConfigError, match="other holds an earlier run"):
        train_policy(tiny_run(tmp_path, output_dir=str(tmp_path / "other"), resume=str(checkpoint)))


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "samples.jsonl", "report.html"])
def test_run_never_writes_over_what_no_run_wrote(tmp_path, loaded, name):
    """As where output_dir is the folder that the user works in."""
    config = tiny_run(tmp_path)
    config.output_dir.mkdir()
    mine = config.output_dir / name
    mine.write_text("output_dir: .  # mine\n")
    with pytest.raises(ConfigError, match=rf"output_dir: .*out holds a {name}, which .*--overwrite"):
        train_policy(config)
    assert mine.read_text() == "output_dir: .  # mine\n" and loaded == []


def test_a_run_that_ended_before_it_began_is_begun_again(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=1)
    config.output_dir.mkdir()
    (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert len(train_policy(config).updates) == 1


PLACES = {
    "data__prompts": DataError, "data__eval_prompts": DataError, "model__path": ModelError, "value__init": ModelError,
    "rewards__0__path": ConfigError, "output_dir": ConfigError,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [("dangling", "is a link to nowhere, which does not exist"), ("locked", "is a folder that you may not read")],
)
@pytest.mark.parametrize("key", PLACES)
def test_a_place_where_nothing_can_be_read_is_told(tmp_path, loaded, monkeypatch, key, name, words):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "locked").mkdir()
    may = os.access
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("locked") and may(path, mode))
    place = str(tmp_path / name)
    changes = {key: place}
    if key == "rewards__0__path":
        (tmp_path / name).rename(f"{place}.py")
        place, changes = f"{place}.py", {"rewards": [{"type": "function", "path": f"{place}.py", "name": "letters"}]}
        monkeypatch.setattr("os.access", lambda path, mode: "locked" not in str(path) and may(path, mode))
    with pytest.raises(PLACES[key], match=rf"^{key.replace('__', '.')}: {place} {words}"):
        train_policy(tiny_run(tmp_path, **changes))
    assert loaded == []


def test_a_folder_where_a_file_belongs_is_told(tmp_path, loaded):
    config = tiny_run(tmp_path, resume=True)
    (config.output_dir / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is not a file"):
        train_policy(config)
    assert loaded == []


CLAIM = """
import sys, time
from pathlib import Path
from tether.machine.claim import claimed
with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_two_runs_never_write_into_one_folder(tmp_path):
    config = tiny_run(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(config.output_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=r"output_dir: another run is writing to .*out; wait"):
            train_policy(config)
        other.kill()
    train_policy(config)
    with claimed(config.output_dir):
        assert not [name for name in os.listdir(config.output_dir) if "lock" in name]


def test_a_run_of_a_script_is_evaluated_by_the_script(tmp_path):
    """Its configuration names the script as the source of the rewards, and to load it would run it."""
    config = tiny_run(tmp_path, data__prompts="train_dataset")
    config.output_dir.mkdir()
    (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"started by a script that uses tether\.compat\.trl"):
        evaluate_path(config.output_dir, prompts=str(tmp_path / "prompts.jsonl"))


def test_rewards_of_a_run_are_looked_for_before_prompts_are_read(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, value__kind="head")
    save_tiny(config.output_dir)
    (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "rewards.py").unlink()
    for name in ("load_prompts", "load_prompt_sets"):
        monkeypatch.setattr(f"tether.inference.evaluate.{name}", lambda *args, **options: pytest.fail("reads prompts"))
    with pytest.raises(ConfigError, match=r"^rewards\.0\.path: .*rewards\.py"):
        evaluate_path(config.output_dir, prompts=str(tmp_path / "prompts.jsonl"))


NEEDY = """
def letters(prompts, completions, answer):
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("lacks", ["column", "chat template"])
def test_prompts_that_a_runs_judges_cannot_use_are_told_before_models_load(tmp_path, loaded, lacks):
    config = tiny_run(tmp_path)
    rows, message = [{"prompt": "the cat"}], r"^rewards\.0.*answer"
    (tmp_path / "rewards.py").write_text(NEEDY)
    if lacks == "chat template":
        judge = save_tiny(tmp_path / "judge", "qwen2", num_labels=1, chat_template=False)
        config = tiny_run(tmp_path, rewards=[{"type": "model", "path": str(judge)}])
        rows = [{"prompt": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees"},
                            {"role": "user", "content": "a dog"}]}]  # fmt: skip
        message = r"^rewards\.0: .*row 0 of the prompts.*template"
    save_tiny(config.output_dir)
    (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=message):
        evaluate_path(config.output_dir, prompts=str(tmp_path / "asked.jsonl"))
    assert loaded == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompts.jsonl", r"--output: .*prompts\.jsonl exists; name a new file"),
        ("prompts.jsonl/answers.jsonl", r"--output: .*prompts\.jsonl is a file; name a folder"),
        ("llama-tied", r"--output: .*llama-tied is a folder; name a new file"),
        ("closed/new/answers.jsonl", r"--output: .*closed is not writable"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_models_load(tmp_path, monkeypatch, loaded, name, message):
    config = tiny_run(tmp_path)
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    with pytest.raises(ConfigError, match=message):
        generate_path(config.model.path, config.data.prompts, output=tmp_path / name)
    assert loaded == []


def test_a_configuration_in_the_folder_above_is_that_of_checkpoints_alone(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "score_norm.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for other in ("merged", "gpt2", "checkpoint-best", "org/gpt2"):
        assert run_config(Path(other)) is None
    with pytest.raises(ConfigError, match=r"no score_norm\.json"):
        read_norms(Path("merged"))
    assert run_config(tmp_path / "checkpoint-12") == config == run_config(tmp_path)


class Said(NullDisplay):
    """A display that keeps its messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)


class TestLengths:
    @pytest.fixture
    def asked(self, tmp_path):
        return str(write_prompts(tmp_path / "asked.jsonl", [" ".join(["the"] * 121), "the cat"]))

    @pytest.fixture
    def model(self, tmp_path):
        """It has 128 positions; the template adds 3 tokens to a prompt."""
        return str(save_tiny(tmp_path / "model"))

    @pytest.fixture
    def said(self):
        return Said()

    def test_prompts_that_leave_no_room_for_an_answer_are_left_out_with_a_word(self, model, asked, said):
        assert [row["row"] for row in generate_path(model, asked, response_length=5, display=said)] == [1]
        assert said.messages[0].endswith("1 of 2 prompts, 1 dropped as longer than 123 tokens")
        said.messages.clear()
        assert [row["row"] for row in generate_path(model, asked, response_length=4, display=said)] == [0, 1]
        assert said.messages == []

    def test_a_limit_of_ones_own(self, model, asked, loaded):
        with pytest.raises(ConfigError, match=r"--response_length 5 after .* 124 .* 128: .*--max_prompt_length"):
            generate_path(model, asked, response_length=5, max_prompt_length=124)
        with pytest.raises(DataError, match=r"longer than --max_prompt_length 4; the shortest has 5"):
            generate_path(model, asked, response_length=5, max_prompt_length=4)
        with pytest.raises(ConfigError, match=r"--response_length 128 leaves no positions .* has 128: lower it"):
            generate_path(model, asked, response_length=128)
        assert loaded == []

    def test_an_evaluation_says_so_before_models_load(self, tmp_path, asked, loaded):
        config = tiny_run(tmp_path)
        save_tiny(config.output_dir)
        (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        told = r"^the run's sampling\.response_length 6 after .* 124 tokens needs 130 .* 128: remove longer prompts$"
        with pytest.raises(ConfigError, match=told):
            evaluate_path(str(config.output_dir), asked, output=str(tmp_path / "new.jsonl"))
        assert loaded == []

    def test_an_evaluation_says_what_it_leaves_out(self, tmp_path, asked, said, monkeypatch):
        config = tiny_run(tmp_path, data__max_prompt_length=8)
        save_tiny(config.output_dir)
        (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr("tether.inference.evaluate.try_sources", lambda *given: pytest.fail("enough"))
            with pytest.raises(pytest.fail.Exception):
                evaluate_path(config.output_dir, prompts=asked, display=said)
        assert said.messages[0].endswith("1 of 2 prompts, 1 dropped as longer than 8 tokens")


def test_attention_that_does_not_train_on_a_cpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.train.inputs.default_device", lambda: torch.device("cpu"))
    told = r"^model\.attn_implementation: got flex_attention, which torch does not train on a CPU; wanted sdpa or eager"
    with pytest.raises(ConfigError, match=told):
        train_policy(tiny_run(tmp_path, model__attn_implementation="flex_attention"))
    check_kernel("flex_attention", torch.device("cuda"))
