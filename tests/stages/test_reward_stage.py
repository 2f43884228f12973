"""``tether reward``: what it learns, what it writes, and that others read the same rewards from it."""

import itertools
import json
import math

import pytest
import torch
from huggingface_hub import constants as hub_constants
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig

from tests.data.loading import load_pairs
from tests.models.build import of_kind, save_adapter, save_model
from tests.tiny import KINDS, save_tiny, tiny_tokenizer
from tether.config.chat import with_now
from tether.config.load import dump_config, load_config
from tether.config.model import LoraConfig
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftModelConfig
from tether.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from tether.machine.claim import claimed
from tether.machine.distributed import Dist
from tether.metrics.writers import read_jsonl
from tether.models.build import build_roles
from tether.models.saving import merge_adapter, verify_manifest
from tether.models.tokenizer import load_tokenizer
from tether.rewards.build import build_rewards, check_rewards
from tether.rewards.reading import READS_TO
from tether.stages.reward import (
    accuracy_by_length,
    adapted,
    pair_metrics,
    spare_token,
    start_model,
    train_reward_model,
)
from tether.stages.run import StageRun
from tether.stages.sft import start_model as start_of_sft
from tether.stages.training import trainer_arguments
from tether.types import RewardBatch

PROMPTS = [
    " ".join(words) for words in itertools.product(("the", "a"), ("cat", "dog", "sun"), ("sees", "likes", "eats"))
]


def write_pairs(file, prompts=PROMPTS):
    """Pairs whose better answer says good; lengths say nothing."""
    rows = []
    for i, prompt in enumerate(prompts):
        filler = ["you", "rain", "night", "blue", "red"]
        long, short = " ".join(filler[: 2 + i % 3]), filler[i % 5]
        words = (long, short) if i % 2 else (short, long)
        rows.append({"prompt": prompt, "chosen": f"{words[0]} good", "rejected": f"{words[1]} bad"})
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def stage_config(folder, *, kind="llama", lora=None, data=None, **train):
    """A run in ``folder`` on a tiny model whose pad token is its end token, as many models have it."""
    if not (folder / "model").exists():
        save_tiny(folder / "model", kind, pad="eos")
    return RewardStageConfig.model_validate(
        {
            "model": {"path": str(folder / "model")} | ({"lora": lora} if lora else {}),
            "data": {"pairs": write_pairs(folder / "pairs.jsonl"), "eval_fraction": 0.3} | (data or {}),
            "train": {
                "bf16": False,
                "learning_rate": 1e-2,
                "num_train_epochs": 6,
                "batch_size": 4,
                "micro_batch_size": 4,
            }
            | train,
            "output_dir": str(folder / "out"),
        }
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    config = stage_config(tmp_path_factory.mktemp("full"), kind="gpt2")
    return config, train_reward_model(config)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    config = stage_config(tmp_path_factory.mktemp("lora"), lora={"r": 4})
    return config, train_reward_model(config)


def held_out(config):
    """(token ids, reward in the file) of every held-out answer."""
    tokenizer = load_tokenizer(config.model.path)
    pairs = {p.row: p for p in load_pairs(config.data.pairs, tokenizer).pairs}
    rows = json.loads((config.output_dir / "reward_eval.json").read_text())["pairs"]
    return [
        (list(ids), row[side])
        for row in rows
        for side, ids in (("chosen", pairs[row["row"]].chosen_ids), ("rejected", pairs[row["row"]].rejected_ids))
    ]


@torch.no_grad()
def classifier_logits(model, tokenizer, sequences):
    """What transformers' own forward says of a padded batch."""
    model.config.pad_token_id = tokenizer.pad_token_id
    batch = tokenizer.pad({"input_ids": sequences}, return_tensors="pt")
    return model.eval()(**batch).logits.squeeze(-1).tolist()


@pytest.mark.parametrize("trained", ["full", "lora"])
def test_it_learns_and_reports_what_it_learned(trained, request):
    config, result = request.getfixturevalue(trained)
    assert result.path == config.output_dir
    assert result.metrics["eval_accuracy"] >= 0.8
    assert result.metrics["eval_margin"] > 1.0
    assert result.metrics["pairs/train"] + result.metrics["pairs/eval"] == len(PROMPTS)
    log = read_jsonl(config.output_dir / "metrics.jsonl")
    assert log[-1]["loss"] < 0.3 < log[0]["loss"]
    assert result.metrics["train_loss"] == log[-1]["loss"]
    assert load_tokenizer(str(result.path)).init_kwargs[READS_TO] == "<eos>"


def test_where_it_reads_survives_a_merge(lora, tmp_path):
    merge_adapter(str(lora[1].path), tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").init_kwargs[READS_TO] == "<eos>"


def test_a_full_model_loads_in_transformers_and_gives_the_rewards_of_the_file(full):
    config, _ = full
    sequences, rewards = zip(*held_out(config), strict=True)
    model = AutoModelForSequenceClassification.from_pretrained(config.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert classifier_logits(model, tokenizer, list(sequences)) == pytest.approx(list(rewards), abs=1e-5)
    assert tokenizer.chat_template == load_tokenizer(config.model.path).chat_template


def test_an_adapter_loads_in_peft_and_gives_the_rewards_of_the_file(lora):
    config, _ = lora
    sequences, rewards = zip(*held_out(config), strict=True)
    set_seed(7)
    base = AutoModelForSequenceClassification.from_pretrained(config.model.path, num_labels=1)
    model = PeftModel.from_pretrained(base, config.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    assert classifier_logits(model, tokenizer, list(sequences)) == pytest.approx(list(rewards), abs=1e-5)


@pytest.mark.parametrize(("trained", "kind"), [("full", "model"), ("lora", "adapter"), ("lora", "model")])
def test_reward_sources_take_it_and_give_the_rewards_of_the_file(trained, kind, request, tmp_path):
    config, _ = request.getfixturevalue(trained)
    run = RunConfig.model_validate(
        {
            "model": {"path": config.model.path, "lora": {"r": 2}},
            "rewards": [{"type": kind, "path": str(config.output_dir)}],
            "data": {"prompts": "prompts.jsonl"},
            "train": {"max_steps": 1},
            "output_dir": str(tmp_path),
        }
    )
    check_rewards(run.rewards)
    tokenizer = load_tokenizer(config.model.path)
    roles = build_roles(run, tokenizer, device="cpu", autocast_dtype=None)
    rewards = build_rewards(run.rewards, run.reward_names, roles=roles, tokenizer=tokenizer, device="cpu")
    sequences, expected = zip(*held_out(config), strict=True)
    batch = RewardBatch(
        prompts=[""] * len(sequences),
        queries=[""] * len(sequences),
        responses=[""] * len(sequences),
        query_ids=[ids[:3] for ids in sequences],
        response_ids=[ids[3:] for ids in sequences],
        conversations=[None] * len(sequences),
    )
    assert rewards.score(batch).scores == pytest.approx(list(expected), abs=1e-5)


def test_the_folder_is_whole_and_holds_its_configuration(lora):
    config, _ = lora
    verify_manifest(config.output_dir)
    saved = load_config(config.output_dir / "config.yaml", section=RewardStageConfig)
    assert saved.data.chat_template_now is not None, "when it started"
    assert saved == with_now(config, saved.data.chat_template_now)
    names = {file.name for file in config.output_dir.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "reward_eval.json", "metrics.jsonl"} <= names
    assert not names & {"model.safetensors", "training_args.bin"}
    tensors = load_file(config.output_dir / "adapter_model.safetensors")
    assert {"base_model.model.score.weight"} == {name for name in tensors if "score" in name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_first_loss_is_the_definition_on_the_start_model(tmp_path, kind, coefficient):
    """Also with half the pairs in each forward, and with activations recomputed."""
    config = stage_config(
        tmp_path,
        kind=kind,
        data={"eval_fraction": 0.0},
        batch_size=len(PROMPTS),
        micro_batch_size=len(PROMPTS) // 2,
        num_train_epochs=1,
        learning_rate=1e-12,
        center_rewards_coefficient=coefficient,
        gradient_checkpointing=True,
        lr_scheduler_type="constant",
    )
    train_reward_model(config)
    (line,) = read_jsonl(config.output_dir / "metrics.jsonl")

    set_seed(config.train.seed)
    model = start_model(config.model, None, precision=None, device=torch.device("cpu"))
    tokenizer = load_tokenizer(config.model.path)
    losses, margins = [], []
    for pair in load_pairs(config.data.pairs, tokenizer).pairs:
        with torch.no_grad():
            chosen, rejected = (
                model.score(model.base_model(torch.tensor([ids])).last_hidden_state)[0, -1].item()
                for ids in (pair.chosen_ids, pair.rejected_ids)
            )
        losses.append(-math.log(1 / (1 + math.exp(rejected - chosen))) + coefficient * (chosen + rejected) ** 2)
        margins.append(chosen - rejected)
    assert line["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert line["margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert line["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))


def test_one_seed_gives_one_model_and_another_gives_another(tmp_path):
    weights = []
    for run, seed in enumerate((1, 1, 2)):
        (tmp_path / str(run)).mkdir()
        config = stage_config(tmp_path / str(run), lora={"r": 2}, num_train_epochs=1, seed=seed)
        train_reward_model(config)
        weights.append(load_file(config.output_dir / "adapter_model.safetensors"))
    first, again, other = weights
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_classifier_keeps_its_head_and_goes_on(full, tmp_path):
    start, _ = full
    config = stage_config(tmp_path, num_train_epochs=0.1, learning_rate=1e-12)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(start.output_dir)})})
    train_reward_model(config)
    before, after = (load_file(c.output_dir / "model.safetensors") for c in (start, config))
    torch.testing.assert_close(after["score.weight"], before["score.weight"])


def test_an_adapter_on_a_classifier_goes_on_with_its_own_head(full, tmp_path):
    start, _ = full
    config = stage_config(tmp_path, lora={"r": 2}, num_train_epochs=1)
    first = config.model_copy(update={"model": config.model.model_copy(update={"path": str(start.output_dir)})})
    train_reward_model(first)
    on = stage_config(tmp_path, lora={"r": 2}, num_train_epochs=0.1, learning_rate=1e-12)
    model = on.model.model_copy(update={"path": str(first.output_dir)})
    on = on.model_copy(update={"model": model, "output_dir": tmp_path / "on"})
    train_reward_model(on)
    before, after = (load_file(c.output_dir / "adapter_model.safetensors") for c in (first, on))
    of_base = load_file(start.output_dir / "model.safetensors")["score.weight"]
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name])
    assert not torch.equal(after["base_model.model.score.weight"], of_base), "the head was trained with the adapter"


def test_held_out_pairs_may_come_from_another_file(tmp_path):
    file = write_pairs(tmp_path / "others.jsonl", PROMPTS[:5])
    config = stage_config(tmp_path, data={"eval_fraction": None, "eval_pairs": file}, num_train_epochs=0.1)
    result = train_reward_model(config)
    assert (result.metrics["pairs/train"], result.metrics["pairs/eval"]) == (len(PROMPTS), 5)
    assert [row["row"] for row in json.loads((config.output_dir / "reward_eval.json").read_text())["pairs"]] == [
        *range(5)
    ]


def test_progress_is_told_each_step_and_nothing_is_told_to_the_hub(tmp_path):
    told, telemetry_off = [], []
    config = stage_config(tmp_path, num_train_epochs=1.5, data={"eval_fraction": 0.0})

    def on_progress(step, total, metrics):
        told.append((step, total))
        telemetry_off.append(hub_constants.HF_HUB_DISABLE_TELEMETRY)
        assert math.isfinite(metrics["loss"])

    before = hub_constants.HF_HUB_DISABLE_TELEMETRY
    result = train_reward_model(config, on_progress=on_progress)
    assert told == [(step, 8) for step in range(1, 9)], "18 pairs in steps of 4, one and a half times"
    assert all(telemetry_off) and before == hub_constants.HF_HUB_DISABLE_TELEMETRY
    assert not any(name.startswith("eval_") for name in result.metrics)


def test_bf16_trains_a_frozen_bf16_base_with_a_float32_head_and_adapter(tmp_path):
    config = stage_config(tmp_path, lora={"r": 4}, bf16=True)
    result = train_reward_model(config)
    assert result.metrics["eval_accuracy"] >= 0.8
    tensors = load_file(config.output_dir / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, None])
def test_trl_is_told_the_type_of_autocast(tmp_path, precision):
    config = stage_config(tmp_path, fp16=precision is torch.float16, bf16=precision is torch.bfloat16)
    run = StageRun(Dist(), config, print, checkpoint=None, is_finished=False)
    given = trainer_arguments(run, 12, evaluates=False, kind=RewardConfig)
    assert (given["fp16"], given["bf16"]) == (precision is torch.float16, precision is torch.bfloat16)


def test_fp16_freezes_a_base_in_float16_beside_a_float32_head_and_adapter(tmp_path):
    """What GradScaler unscales is float32, copies of whole modules too."""
    config = stage_config(tmp_path, lora={"r": 4})
    model = start_model(config.model, None, precision=torch.float16, device=torch.device("cpu"))
    model = adapted(model, config.model, None)
    assert model.get_input_embeddings().weight.dtype == torch.float16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    base = save_model(tmp_path / "base", tied=False)
    start = save_adapter(tmp_path / "start", base, tokenizer=True, modules_to_save=["lm_head"])
    goes_on = SftModelConfig(path=str(start), lora={})
    model = start_of_sft(goes_on, precision=torch.float16, device=torch.device("cpu"))
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32} and any("lm_head" in name for name in trained)


def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_is_saved(tmp_path):
    config = stage_config(tmp_path, learning_rate=1e30, max_grad_norm=None)
    with pytest.raises(TrainingError, match=r"step \d+: the loss is"):
        train_reward_model(config)
    assert {file.name for file in config.output_dir.iterdir()} == {"config.yaml", "fingerprints.json", "metrics.jsonl"}


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tether.stages.reward.start_model", no_model)
    config = stage_config(tmp_path)

    def changed(section, **keys):
        return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "the cat", "chosen": "is", "rejected": "good " * 130}))
    for wrong, error, message in [
        (changed("model", path=str(tmp_path / "none")), ModelError, r"model\.path: .* does not exist"),
        (changed("data", pairs="none.jsonl"), DataError, r"data\.pairs: no such file"),
        (changed("data", eval_pairs="none.jsonl"), DataError, r"data\.eval_pairs: no such file"),
        (changed("data", max_length=3), DataError, r"data\.pairs: no row of .* \(18 rows\) .* 18 are longer"),
        (
            changed("train", lr_scheduler_type="stairs"),
            ConfigError,
            r"train\.lr_scheduler_type: got stairs, wanted one of",
        ),
        (changed("train", fp16=True), ConfigError, r"fp16: got true, wanted false: there is no accelerator"),
        (changed("model", lora=LoraConfig(target_modules=["nope"])), ConfigError, r"\['nope'\] names no module of"),
        (
            changed("model", path=of_kind(tmp_path / "cohere", "cohere", "CohereForCausalLM", num_attention_heads=4)),
            ModelError,
            r"^CohereForCausalLM: there is no sequence classifier of this kind",
        ),
        (changed("data", pairs=str(long)), ConfigError, r"the pair in row 0 has 1\d\d tokens, the model has 128 pos"),
        (config.model_copy(update={"output_dir": tmp_path / "full"}), ConfigError, r"output_dir: .* is not empty"),
        (
            config.model_copy(update={"output_dir": tmp_path / "full" / "file"}),
            ConfigError,
            r"output_dir: .* is a file",
        ),
    ]:
        with pytest.raises(error, match=message):
            train_reward_model(wrong)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"pip install 'tether\[trl\]'"):
        patch.setattr("tether.stages.begin.find_spec", lambda name: None)
        train_reward_model(config)


def test_an_earlier_folder_is_replaced_when_asked(tmp_path):
    config = stage_config(tmp_path, num_train_epochs=0.1)
    config.output_dir.mkdir()
    (config.output_dir / "old.txt").touch()
    config = config.model_copy(update={"overwrite_output_dir": True})
    with pytest.raises(ConfigError, match=r"output_dir: .* holds something other than a run of this command"):
        train_reward_model(config)
    (config.output_dir / "config.yaml").write_text(dump_config(config))
    (config.output_dir / "merged").mkdir()
    train_reward_model(config)
    of_adapter = config.output_dir / "left_over.safetensors"  # by the manifest a file of the run before
    (config.output_dir / "model.safetensors").rename(of_adapter)
    manifest = json.loads((config.output_dir / "manifest.json").read_text())
    manifest["files"][of_adapter.name] = manifest["files"].pop("model.safetensors")
    (config.output_dir / "manifest.json").write_text(json.dumps(manifest))
    (config.output_dir / "checkpoint-99").mkdir()
    place = config.output_dir.stat().st_ino
    train_reward_model(config)
    assert config.output_dir.stat().st_ino == place  # a mounted or linked folder cannot be made anew
    assert (config.output_dir / "old.txt").exists() and (config.output_dir / "merged").exists()
    assert not of_adapter.exists() and not (config.output_dir / "checkpoint-99").exists()
    assert (config.output_dir / "model.safetensors").exists()


def test_one_run_at_a_time_writes_to_a_folder(tmp_path):
    config = stage_config(tmp_path, num_train_epochs=0.1)
    with claimed(config.output_dir), pytest.raises(ConfigError, match="output_dir: another run is writing to"):
        train_reward_model(config)
    assert not any(config.output_dir.iterdir())


def test_copies_of_checkpoints_are_none_of_the_run(tmp_path):
    config = stage_config(tmp_path, max_steps=3, num_train_epochs=None, save_steps=1)
    train_reward_model(config, stop=lambda: "enough" if newest_step(config.output_dir) >= 2 else None)
    newest = max(config.output_dir.glob("checkpoint-*"), key=lambda path: path.name)
    best = newest.rename(newest.with_name("best"))
    (config.output_dir / "checkpoint-1-copy").mkdir()
    result = train_reward_model(config.model_copy(update={"resume": str(best)}))
    assert result.interrupted is None and best.exists() and (config.output_dir / "checkpoint-1-copy").exists()
    steps = [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3]


def test_a_run_goes_on_with_the_pairs_that_it_began_with(tmp_path):
    config = stage_config(tmp_path, max_steps=3, num_train_epochs=None)
    train_reward_model(config, stop=lambda: "SIGTERM")
    resumed, rows = config.model_copy(update={"resume": True}), (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").write_text(rows.replace(" bad", " nice"))
    with pytest.raises(CheckpointError, match=r"resume: data\.pairs and held-out pairs changed since .*checkpoint-1"):
        train_reward_model(resumed)
    (tmp_path / "pairs.jsonl").write_text(rows)
    assert train_reward_model(resumed).interrupted is None


def newest_step(folder):
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)


def test_target_modules_that_fit_nothing_are_a_config_error(tmp_path):
    config = stage_config(tmp_path, lora={"target_modules": ["no_such_layer"]})
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules: .*no_such_layer"):
        train_reward_model(config)


def row(chosen, rejected, chosen_tokens, rejected_tokens):
    return {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_tokens": chosen_tokens,
        "rejected_tokens": rejected_tokens,
    }


def test_metrics_of_pairs_by_hand():
    rows = [row(2.0, 1.0, 5, 3), row(0.0, 1.0, 4, 6), row(1.0, 1.0, 4, 4), row(3.0, -1.0, 9, 2)]
    metrics = pair_metrics(rows)
    assert metrics["accuracy"] == 0.625, "a tie is half a win, as in tether score"
    assert metrics["margin"] == 1.0
    assert metrics["reward_mean"] == 1.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt((1 + 0 + 1 + 0 + 0 + 0 + 4 + 4) / 8))
    assert metrics["accuracy_chosen_longer"] == 1.0
    assert metrics["accuracy_chosen_shorter"] == 0.0
    assert "accuracy_chosen_shorter" not in pair_metrics(rows[:1])
    assert pair_metrics([]) == {}


def test_accuracy_by_length_is_over_groups_of_equal_size_by_the_longer_answer():
    rows = [row(float(n % 3 > 0), 0.0, n, 1) for n in range(8, 0, -1)]
    assert accuracy_by_length(rows) == [
        {"tokens": [1, 2], "pairs": 2, "accuracy": 1.0},
        {"tokens": [3, 4], "pairs": 2, "accuracy": 0.75},
        {"tokens": [5, 6], "pairs": 2, "accuracy": 0.75},
        {"tokens": [7, 8], "pairs": 2, "accuracy": 1.0},
    ]
    assert [group["pairs"] for group in accuracy_by_length(rows[:2])] == [1, 1]
    as_long = [row(1.0, 0.0, tokens, 1) for tokens in (5, 5, 5, 7, 7, 3)]
    assert [(*group["tokens"], group["pairs"]) for group in accuracy_by_length(as_long)] == [(3, 5, 4), (7, 7, 2)]
    assert accuracy_by_length([]) == []


def test_the_spare_token_is_a_special_one_that_no_answer_can_end_with():
    tokenizer = tiny_tokenizer(pad="own")
    names = tokenizer.convert_ids_to_tokens
    size = len(tokenizer)
    assert spare_token(tokenizer, set(), size) == "<pad>"
    assert spare_token(tiny_tokenizer(pad="eos"), set(), size) == "<unk>"
    assert spare_token(tiny_tokenizer(pad=None), {0}, size) == "<bos>", "not a beginning that this tokenizer writes"
    assert spare_token(tiny_tokenizer(pad=None, bos=True), {0}, size) == "<pad>"
    special = set(range(7))
    assert spare_token(tokenizer, special, size) == names(size - 1)
    assert spare_token(tokenizer, special, size - 5) == names(size - 6), "the model has fewer embeddings"
    with pytest.raises(ModelError, match="every token"):
        spare_token(tokenizer, set(range(size)), size)
