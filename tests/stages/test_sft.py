"""``tether sft``: what is trained on, what it writes, and that the next stage takes it."""

import itertools
import json
import math
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MixtralConfig, MixtralForCausalLM

from tests.models.build import edit_json
from tests.tiny import EOS, save_tiny
from tether.config.chat import with_now
from tether.config.load import load_config
from tether.config.model import LoraConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from tether.inference.generate import generate_path
from tether.inference.saved import run_config
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.models.saving import verify_manifest
from tether.models.tokenizer import load_tokenizer
from tether.stages import training
from tether.stages.checkpoints import newest_checkpoint
from tether.stages.sft import IGNORED, _dataset, load_data, train_sft

ROWS = [
    {"prompt": " ".join(words), "completion": f"{words[1]} is {'good' if words[1] == 'cat' else 'bad'}"}
    for words in itertools.product(("the", "a"), ("cat", "dog", "sun"), ("sees", "likes", "eats"))
]


def stage(folder, *, kind="llama", rows=ROWS, lora=None, data=None, model=None, out="out", **train):
    """A run in ``folder`` on a tiny model."""
    if not (folder / "model").exists():
        save_tiny(folder / "model", kind)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    usual = {"bf16": False, "learning_rate": 1e-2, "num_train_epochs": 8, "batch_size": 6, "micro_batch_size": 3}
    if "max_steps" in train:
        del usual["num_train_epochs"]
    return SftStageConfig.model_validate(
        {
            "model": {"path": str(model or folder / "model")} | ({} if lora is None else {"lora": lora}),
            "data": {"demonstrations": str(folder / "rows.jsonl")} | (data or {}),
            "train": usual | train,
            "output_dir": str(folder / out),
        }
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    config = stage(tmp_path_factory.mktemp("full"), kind="gpt2", data={"eval_fraction": 0.2}, eval_steps=5)
    return config, train_sft(config)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    config = stage(tmp_path_factory.mktemp("lora"), lora={"r": 4}, data={"eval_fraction": 0.2})
    return config, train_sft(config)


def weights(folder):
    return load_file(next(folder.glob("*model.safetensors")))


@pytest.mark.parametrize("trained", ["full", "lora"])
def test_it_learns_and_logs_what_it_learned(trained, request):
    config, result = request.getfixturevalue(trained)
    rows = read_jsonl(config.output_dir / "metrics.jsonl")
    steps, evaluations = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"] and steps[-1]["mean_token_accuracy"] > 0.7
    assert result.metrics["train_loss"] == steps[-1]["loss"]
    assert [row["step"] for row in evaluations] == ([5, 10, 15, 20, 24] if trained == "full" else [24])
    assert result.metrics["eval_loss"] == evaluations[-1]["eval_loss"]
    assert result.metrics["eval_mean_token_accuracy"] > 0.5
    assert result.metrics["demonstrations/train"] + result.metrics["demonstrations/eval"] == len(ROWS)


@torch.no_grad()
def test_the_folder_is_a_plain_model_that_says_what_it_was_taught(full):
    config, _ = full
    verify_manifest(config.output_dir)
    saved = load_config(config.output_dir / "config.yaml", section=SftStageConfig)
    assert saved.data.chat_template_now is not None, "when it started"
    assert saved == with_now(config, saved.data.chat_template_now)
    model = AutoModelForCausalLM.from_pretrained(config.output_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    assert tokenizer.chat_template == load_tokenizer(config.model.path).chat_template
    before, after = (GenerationConfig.from_pretrained(path) for path in (config.model.path, config.output_dir))
    assert before.to_diff_dict() == after.to_diff_dict()
    start = AutoModelForCausalLM.from_pretrained(config.model.path)
    assert start.config.to_diff_dict() == model.config.to_diff_dict()
    assert set(weights(config.output_dir)) == set(load_file(f"{config.model.path}/model.safetensors"))
    query = tokenizer.apply_chat_template([{"role": "user", "content": "the cat sees"}], add_generation_prompt=True)
    answer = model.generate(torch.tensor([query["input_ids"]]), do_sample=False, max_new_tokens=8)[0]
    words = tokenizer.decode(answer[len(query["input_ids"]) :]).split()
    assert words[:2] == ["cat", "is"] and words[2] in ("good", "bad")
    assert words[3:] == ["<eos>"], "the end is trained, too"


def test_an_adapter_loads_in_peft_on_the_start(lora):
    config, _ = lora
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    model = PeftModel.from_pretrained(base, config.output_dir)
    assert model.peft_config["default"].base_model_name_or_path == config.model.path
    names = {file.name for file in config.output_dir.iterdir()}
    assert {"adapter_model.safetensors", "generation_config.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "training_args.bin"}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_first_loss_is_the_mean_over_the_answers_tokens(tmp_path, kind):
    """Of answers of unequal length in unequal micro-batches; prompts, and pads, count nothing."""
    rows = [{"prompt": "the cat", "completion": "is good and nice"}, {"prompt": "a very nice day", "completion": "two"}]
    config = stage(tmp_path, kind=kind, rows=rows, batch_size=2, micro_batch_size=1, max_steps=1, learning_rate=1e-12)
    train_sft(config)
    (line,) = read_jsonl(config.output_dir / "metrics.jsonl")
    model, total, count = load_causal_lm(config.model.path, dtype=torch.float32), 0.0, 0
    tokenizer = load_tokenizer(config.model.path)
    for row in rows:
        text = f"<user> {row['prompt']} <eos> <assistant>"
        query = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(f" {row['completion']}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([query + answer])).logits[0].log_softmax(-1)
        for place, token in enumerate(answer, start=len(query) - 1):
            total, count = total - logprobs[place, token].item(), count + 1
    assert line["loss"] == pytest.approx(total / count, abs=1e-4)


TURNS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "is good"},
    {"role": "user", "content": "and you"},
    {"role": "assistant", "content": "very nice"},
]


@pytest.mark.parametrize(
    ("row", "turns", "trained"),
    [
        ({"prompt": "the cat", "completion": "is good"}, "all", ["is good <eos>"]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, "all", ["very nice <eos>"]),
        ({"messages": TURNS}, "all", ["is good <eos>", "very nice <eos>"]),
        ({"messages": TURNS}, "last", ["very nice <eos>"]),
        ({"text": "the cat is good"}, "all", ["cat is good <eos>"]),
        ({"prompt": "the cat", "chosen": "is good", "rejected": "is bad"}, "all", ["is good <eos>"]),
        ({"chosen": "\n\nHuman: the cat\n\nAssistant: is good", "rejected": "x"}, "all", ["is good <eos>"]),
    ],
)
def test_what_is_trained_on(tmp_path, row, turns, trained):
    data = load_data(stage(tmp_path, rows=[row], data={"turns": turns}))
    labels = [[token for token in entry["labels"] if token != IGNORED] for entry in _dataset(data.train)]
    assert [data.tokenizer.decode(ids) for ids in labels] == trained
    for entry, ids in zip(_dataset(data.train), labels, strict=True):
        assert entry["input_ids"][-len(ids) :] == ids and ids[-1] == EOS
        assert entry["labels"][: -len(ids)] == [IGNORED] * (len(entry["labels"]) - len(ids))


def test_a_conversations_turns_stay_on_one_side_of_the_split(tmp_path):
    rows = [{"messages": [{**TURNS[0], "content": f"the {word}"}, *TURNS[1:]]} for word in ("cat", "dog", "sun", "day")]
    data = load_data(stage(tmp_path, rows=rows, data={"eval_fraction": 0.5}))
    assert not {each.row for each in data.train} & {each.row for each in data.held_out}
    assert (len(data.train), len(data.held_out)) == (4, 4)


@pytest.mark.parametrize("how", [{}, {"lora": {"r": 4}}], ids=["full", "lora"])
def test_a_stopped_run_goes_on_bitwise(tmp_path, how):
    straight = stage(tmp_path, out="straight", max_steps=6, **how)
    train_sft(straight)
    stopped = stage(tmp_path, out="stopped", max_steps=6, **how)
    asked = iter([None, None, "SIGTERM"])
    assert train_sft(stopped, stop=lambda: next(asked)).interrupted == "SIGTERM"
    assert not list(stopped.output_dir.glob("*model.safetensors"))
    resumed = stopped.model_copy(update={"resume": True})
    assert train_sft(resumed).interrupted is None
    first, second = weights(straight.output_dir), weights(stopped.output_dir)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    log = [read_jsonl(config.output_dir / "metrics.jsonl") for config in (straight, stopped)]
    assert log[0] == log[1] and [row["step"] for row in log[0]] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(CheckpointError, match="is finished"):
        train_sft(resumed)


def test_a_stopped_run_goes_on_with_smaller_micro_batches(tmp_path):
    """Optimizer steps read the same rows; what they add up is rounded otherwise."""
    straight = stage(tmp_path, out="straight", max_steps=4)
    train_sft(straight)
    stopped = stage(tmp_path, out="stopped", max_steps=4)
    asked = iter([None, "SIGTERM"])
    train_sft(stopped, stop=lambda: next(asked))
    smaller = {"micro_batch_size": 1, "gradient_checkpointing": True}
    train_sft(stage(tmp_path, out="stopped", max_steps=4, **smaller).model_copy(update={"resume": True}))
    start, end = weights(tmp_path / "model"), weights(straight.output_dir)
    assert max(float((end[name] - x).abs().max()) for name, x in start.items()) > 1e-3
    for name, x in weights(stopped.output_dir).items():
        torch.testing.assert_close(x, end[name], atol=1e-5, rtol=0)


def test_a_model_whose_names_in_files_are_not_those_in_memory_goes_on_with_its_own_weights(tmp_path):
    """Experts: files hold each by itself, memory all of a layer in one tensor."""
    save_tiny(tmp_path / "model", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    experts = {"num_key_value_heads": 1, "num_local_experts": 2, "vocab_size": len(tokenizer)}
    MixtralForCausalLM(MixtralConfig(**shape, **experts, **ends)).save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    given = {"model": tmp_path / "experts", "max_steps": 4, "save_steps": 2}
    straight = stage(tmp_path, out="straight", **given)
    train_sft(straight)
    stopped = stage(tmp_path, out="stopped", **given)
    asked = iter([None, "SIGTERM"])
    train_sft(stopped, stop=lambda: next(asked))
    train_sft(stopped.model_copy(update={"resume": True}))
    ours, theirs = weights(stopped.output_dir), weights(straight.output_dir)
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_files_and_links_called_like_a_checkpoint_are_none(tmp_path):
    config = stage(tmp_path, max_steps=1)
    train_sft(config)
    (tmp_path / "outside").mkdir()
    (config.output_dir / "checkpoint-5").write_text("mine")
    (config.output_dir / "checkpoint-7").symlink_to(tmp_path / "outside")
    train_sft(config.model_copy(update={"overwrite_output_dir": True}))
    assert (config.output_dir / "checkpoint-5").read_text() == "mine" and (tmp_path / "outside").is_dir()


def test_a_start_that_failed_is_made_again_by_the_same_command(tmp_path, monkeypatch):
    config = stage(tmp_path, max_steps=1)
    monkeypatch.setattr(training, "train", lambda *args: pytest.fail("no trainer"))
    with pytest.raises(pytest.fail.Exception):
        train_sft(config)
    assert (config.output_dir / "config.yaml").exists()
    monkeypatch.undo()
    train_sft(config)
    with pytest.raises(ConfigError, match=r"output_dir: .* is not empty\. Add --resume"):
        train_sft(config)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "fingerprints.json"])
def test_a_file_that_a_killed_process_was_replacing_is_no_other_run(tmp_path, name):
    config, left = stage(tmp_path, max_steps=1), tmp_path / "out" / f".{name}.tmp"
    if name != "config.yaml":
        train_sft(config)
        config = config.model_copy(update={"overwrite_output_dir": True})
    config.output_dir.mkdir(exist_ok=True)
    left.write_text("half")
    train_sft(config)
    assert not left.exists() and len(read_jsonl(config.output_dir / "metrics.jsonl")) == 1


def test_resume_auto_starts_or_goes_on_and_replaces_nothing(tmp_path):
    config = stage(tmp_path, max_steps=3).model_copy(update={"resume": "auto"})
    asked = iter([None, "SIGTERM"])
    assert train_sft(config, stop=lambda: next(asked)).interrupted == "SIGTERM"
    train_sft(config)
    assert [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")] == [1, 2, 3]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_auto_leaves_a_finished_run_as_it_is(tmp_path, monkeypatch):
    config = stage(tmp_path, max_steps=3, save_steps=2).model_copy(update={"resume": "auto"})
    train_sft(config)
    before, told = files(config.output_dir), []
    other = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 4})})
    monkeypatch.setattr(training, "train", lambda *args: pytest.fail("it trains"))
    assert train_sft(config, tell=told.append).interrupted is None
    assert told == [f"finished: {config.output_dir} holds the model after the last step"]
    with pytest.raises(CheckpointError, match=r"another run: train\.max_steps 3 → 4"):
        train_sft(other)
    with pytest.raises(CheckpointError, match="is finished"):
        train_sft(config.model_copy(update={"resume": True}))
    assert files(config.output_dir) == before
    path = next(config.output_dir.glob("*model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="its manifest says"):
        train_sft(config)


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path, lora):
    """transformers begins without a word with new moments, a new schedule or other random numbers."""
    config = stage(tmp_path, max_steps=4, save_steps=1, save_total_limit=None, lora=lora)
    asked = iter([None, None, "SIGINT"])
    train_sft(config, stop=lambda: next(asked))
    last, before = config.output_dir / "checkpoint-3", config.output_dir / "checkpoint-2"
    of_model = ("adapter_model.safetensors", "adapter_config.json") if lora else ("model.safetensors", "config.json")
    for name in (*of_model, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        content, told = (last / name).read_bytes(), []
        (last / name).unlink()
        assert newest_checkpoint(config.output_dir, told.append) == before
        (last / name).write_bytes(content[: len(content) // 2])
        assert newest_checkpoint(config.output_dir, told.append) == before
        assert [line.startswith(f"{last} is incomplete: ") and name[:4] in line for line in told] == [True, True]
        with pytest.raises(CheckpointError, match="checkpoint-3 is not a complete checkpoint"):
            train_sft(config.model_copy(update={"resume": str(last)}))
        (last / name).write_bytes(content)
    assert newest_checkpoint(config.output_dir, told.append) == last
    (last / "optimizer.pt").unlink()
    told = []
    train_sft(config.model_copy(update={"resume": True}), tell=told.append)
    assert any("checkpoint-3 is incomplete: there is no optimizer.pt" in line for line in told)
    assert [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_what_cannot_go_on_is_told(tmp_path):
    config = stage(tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train_sft(config.model_copy(update={"resume": True}))
    train_sft(config, stop=lambda: "SIGTERM")
    other = config.model_copy(update={"resume": True, "train": config.train.model_copy(update={"seed": 7})})
    with pytest.raises(CheckpointError, match=r"another run: train\.seed 42 → 7"):
        train_sft(other)
    with pytest.raises(ConfigError, match=r"output_dir: .* is not empty\. Add --resume"):
        train_sft(config)


def test_a_run_goes_on_with_the_rows_and_the_model_that_it_began_with(tmp_path):
    config = stage(tmp_path, max_steps=3, data={"eval_fraction": 0.2})
    train_sft(config, stop=lambda: "SIGTERM")
    resumed = config.model_copy(update={"resume": True})
    stage(tmp_path, rows=ROWS[::-1])
    with pytest.raises(CheckpointError, match=r"data\.demonstrations and held-out demonstrations changed since .*rows"):
        train_sft(resumed)
    stage(tmp_path, rows=[{**row, "completion": f"{row['completion']} day"} for row in ROWS])
    with pytest.raises(CheckpointError, match=r"data\.demonstrations and .* Restore what was there, or start anew"):
        train_sft(resumed)
    stage(tmp_path)
    model, place = load_causal_lm(config.model.path, dtype=torch.float32), tmp_path / "model/model.safetensors"
    before = place.read_bytes()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"resume: model\.path changed since .*checkpoint-1 was written: weights"):
        train_sft(resumed)
    place.write_bytes(before)
    (config.output_dir / "fingerprints.json").rename(tmp_path / "fingerprints.json")
    with pytest.raises(CheckpointError, match=r"resume: .*fingerprints\.json cannot be read: .*No such file"):
        train_sft(resumed)
    (tmp_path / "fingerprints.json").rename(config.output_dir / "fingerprints.json")
    assert train_sft(resumed).interrupted is None


def test_a_run_whose_model_data_and_folder_moved_goes_on_or_is_finished(tmp_path):
    straight = stage(tmp_path, max_steps=3, out="straight", data={"eval_fraction": 0.2})
    train_sft(straight)
    train_sft(stage(tmp_path, max_steps=3, data={"eval_fraction": 0.2}), stop=lambda: "SIGTERM")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("model", "out", "rows.jsonl"):
        (tmp_path / name).rename(other / name)
    config = stage(other, max_steps=3, data={"eval_fraction": 0.2}).model_copy(update={"resume": "auto"})
    train_sft(config)
    assert all(torch.equal(x, weights(config.output_dir)[name]) for name, x in weights(straight.output_dir).items())
    (other / "model").rename(tmp_path / "model")
    back = {"model": {"path": str(tmp_path / "model")}, "data": {"demonstrations": str(tmp_path / "rows.jsonl")}}
    (other / "rows.jsonl").rename(tmp_path / "rows.jsonl")
    again = SftStageConfig.model_validate(config.model_dump(mode="json") | {"model": back["model"]} | {
        "data": back["data"] | {"eval_fraction": 0.2}
    })  # fmt: skip
    assert train_sft(again).metrics == {}
    stage(tmp_path, rows=ROWS[::-1])
    with pytest.raises(CheckpointError, match=r"data\.demonstrations and held-out demonstrations changed since"):
        train_sft(again)
    save_tiny(tmp_path / "model", "llama", seed=1)
    with pytest.raises(CheckpointError, match=r"another run: .*model\.path .* one in a folder by its contents"):
        train_sft(again)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 2}, {"warmup_ratio": 0.5}])
def test_warm_up_is_in_steps_or_a_share_of_them(tmp_path, warmup):
    train_sft(stage(tmp_path, max_steps=4, learning_rate=1e-2, **warmup))
    rates = [row["learning_rate"] for row in read_jsonl(tmp_path / "out/metrics.jsonl") if "learning_rate" in row]
    assert rates == pytest.approx([0, 5e-3, 1e-2, 5e-3])


def test_the_model_that_a_run_starts_from_is_not_removed_with_the_checkpoints_of_the_run_before(tmp_path):
    config = stage(tmp_path, max_steps=2)
    train_sft(config, stop=lambda: "SIGTERM")
    (start,) = config.output_dir.glob("checkpoint-*")
    again = stage(tmp_path, model=start, max_steps=2).model_copy(update={"overwrite_output_dir": True})
    with pytest.raises(ConfigError, match=rf"output_dir: this run would overwrite {start}, which model\.path names"):
        train_sft(again)
    assert weights(start)


def test_an_adapter_goes_on_with_lora_and_is_merged_without(lora, tmp_path):
    before, _ = lora
    folder = before.output_dir
    on = stage(tmp_path, model=folder, lora={}, max_steps=1, learning_rate=1e-12)
    train_sft(on)
    settings = json.loads((on.output_dir / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"]) == (before.model.path, 4)
    again = load_config(on.output_dir / "config.yaml", section=SftStageConfig)
    train_sft(again.model_copy(update={"output_dir": tmp_path / "again"}))
    old, new = weights(folder), weights(on.output_dir)
    assert old.keys() == new.keys()
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)
    merged = stage(tmp_path, model=folder, max_steps=1, learning_rate=1e-12, out="merged")
    train_sft(merged)
    expected = load_causal_lm(str(folder), dtype=torch.float32).state_dict()
    for name, tensor in weights(merged.output_dir).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"model\.lora\.r: 8, but the adapter"):
        train_sft(stage(tmp_path, model=folder, lora={"r": 8}, out="other"))


def test_a_named_template_is_saved_and_ends_answers_at_its_own_token(tmp_path):
    folder = save_tiny(tmp_path / "model", chat_template=False)
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <system> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = stage(tmp_path, model=folder, data={"chat_template": str(tmp_path / "own.jinja")}, max_steps=1)
    train_sft(config)
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    end = tokenizer.convert_tokens_to_ids("<system>")
    assert tokenizer.eos_token == "<system>" and tokenizer.chat_template == (tmp_path / "own.jinja").read_text()
    assert GenerationConfig.from_pretrained(config.output_dir).eos_token_id == sorted([EOS, end])
    data = load_data(config)
    assert {each.response_ids[-1] for each in data.train} == {end}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = stage(tmp_path, learning_rate=1e30, max_grad_norm=None)
    with pytest.raises(TrainingError, match=r"step \d+: the loss is"):
        train_sft(config)
    assert not (config.output_dir / "model.safetensors").exists()


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tether.stages.sft.start_model", no_model)
    for rows, error, message in [
        ([*ROWS, {"prompt": "the", "completion": 3}], DataError, r"row 18 \(line 19\), completion: got 3"),
        ([{"prompt": "the cat " * 600, "completion": "is"}], DataError, r"longer than data\.max_length 1024"),
        ([{"prompt": "the " * 130, "completion": "is"}], ConfigError, r"row 0 has 1\d\d tokens, the model has 128 pos"),
    ]:
        with pytest.raises(error, match=message):
            train_sft(stage(tmp_path, rows=rows))
    config = stage(tmp_path)
    for section, keys, error, message in [
        ("model", {"path": str(tmp_path / "none")}, ModelError, r"model\.path: .* does not exist"),
        ("data", {"eval_demonstrations": "none.jsonl"}, DataError, r"data\.eval_demonstrations: no such file"),
        ("data", {"chat_template": "chatml"}, ConfigError, r"data\.chat_template: chatml needs <\|im_start\|>"),
        ("data", {"chat_template": "chatmall"}, ConfigError, r"chat_template: got chatmall, wanted auto, none, a file"),
        ("data", {"chat_template_kwargs": {"thinking": 1}}, ConfigError, r"chat_template_kwargs\.thinking: .* not use"),
        ("train", {"lr_scheduler_type": "stairs"}, ConfigError, r"train\.lr_scheduler_type: got stairs"),
        ("train", {"lr_scheduler_type": "cosine_with_min_lr"}, ConfigError, r"type: got cosine_with_min_lr, wanted"),
        ("model", {"lora": LoraConfig(target_modules=["nope"])}, ConfigError, r"\['nope'\] names no module of Llama"),
        ("model", {"path": str(save_tiny(tmp_path / "judge", num_labels=1))}, ModelError, "is a sequence classifier"),
    ]:
        changed = config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})
        with pytest.raises(error, match=message):
            train_sft(changed)


def test_a_model_without_an_end_token_is_told_what_it_lacks(tmp_path):
    config = stage(tmp_path)
    for file, name in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        edit_json(tmp_path / "model" / file, lambda data, name=name: data.pop(name, None))
    with pytest.raises(ConfigError, match=r"^neither .* has an end token; set eos_token in the tokenizer$"):
        train_sft(config)


def test_weights_in_few_bits_that_are_to_train_themselves_are_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    config = stage(tmp_path)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(tmp_path / "model" / "config.json", lambda shape: shape.update(quantization_config=settings))
    monkeypatch.setattr("tether.stages.sft.start_model", no_model)
    with pytest.raises(ConfigError, match=r"model holds quantized weights, .* add `lora: \{\}` under model"):
        train_sft(config)
    with pytest.raises(AssertionError, match="a model was loaded"):
        train_sft(stage(tmp_path, lora={}))


def test_a_token_without_an_embedding_is_told_before_a_model_is_loaded(tmp_path):
    config = stage(tmp_path, rows=[{"prompt": "the <new> cat", "completion": "is"}])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"token 40, '<new>', of the demonstration in row 0 has no embedding"):
        train_sft(config)


def test_the_first_demonstration_is_told_with_its_special_tokens(tmp_path):
    told = []
    train_sft(stage(tmp_path, max_steps=1), tell=told.append)
    assert re.fullmatch("on one process, [a-z]+", told[0]) and told[2] == (
        "the first prompt: '<user> the cat sees <eos> <assistant>', and what is trained on: 'cat is good <eos>'"
    )
    assert math.isfinite(read_jsonl(tmp_path / "out" / "metrics.jsonl")[0]["loss"])


def test_rows_of_a_named_dataset_without_an_answer_are_left_out_and_told(tmp_path):
    rows = [{"instruction": "the cat sees", "output": out} for out in ("cat is good", "", "cat is bad")]
    (tmp_path / "named.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"named": {"file_name": "named.json"}}))
    data = load_data(stage(tmp_path, data={"demonstrations": "named", "dataset_dir": str(tmp_path)}))
    assert (data.counts["demonstrations/train"], data.counts["demonstrations/unanswered"]) == (2, 1)
    assert data.notes[0].endswith("0 dropped as too long, 1 without an answer")


def test_what_it_made_answers(lora, tmp_path):
    """Its configuration is not that of a run of PPO."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}')
    (row,) = generate_path(str(lora[1].path), str(prompts), response_length=3, temperature=0.0)
    assert row["response"] and run_config(lora[1].path) is None
