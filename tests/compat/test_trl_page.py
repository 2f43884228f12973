"""docs/from_trl.md: its commands run and its names exist; the phases driven by hand are the run itself."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import tether.compat.trl
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config import keys
from tether.config.load import dump_config, load_config
from tether.config.schema import RunConfig
from tether.errors import ConfigError, RewardResponseError
from tether.metrics.reduce import Metrics
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.models.saving import save_policy
from tether.report.html import write_report
from tether.train.run import open_trainer, train_policy
from tether.train.trainer import PPOTrainer
from tether.types import RewardOutput

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("phases_by_hand", ROOT / "examples" / "phases_by_hand.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timeless(row):
    return {name: value for name, value in row.items() if not re.search("time/|speed/|memory/|^eps$", name)}


def test_the_command_of_the_page_runs(example, tmp_path, capsys):
    assert re.findall(r"^    (python.*)$", PAGE, flags=re.MULTILINE) == ["python examples/phases_by_hand.py run.yaml"]
    config = tiny_run(tmp_path)
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    example.main(str(tmp_path / "run.yaml"))
    assert re.findall(r"update (\d): score", capsys.readouterr().out) == ["1", "2"]
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    for row in rows:
        scores = [float(len(s["response"].split()) >= 4) for s in samples if s["step"] == row["step"]]
        assert row["objective/scores"] == pytest.approx(sum(scores) / 8)
    assert load_causal_lm(str(tmp_path / "out"), dtype=None) is not None
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_launch_converts_to_the_keys_of_the_page(tmp_path, monkeypatch, capsys):
    """With the command of the page; the differing defaults are those of both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text(
        "python ppo.py --sft_model_path m --reward_model_path r --dataset_name d --output_dir o --stop_token eos "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --total_episodes 80 --use_peft\n"
    )
    (command,) = re.findall(r"^    tether (.*)$", PAGE, flags=re.MULTILINE)
    assert main(command.split()) == 0
    made = load_config("run.yaml")
    assert (made.model.path, made.rewards[0].path, made.data.prompts) == ("m", "r", "d")
    assert (made.train.micro_batch_size, made.train.rollout_batch_size, made.train.total_episodes) == (2, 8, 80)
    assert (made.model.lora.r, made.sampling.response_length) == (16, 53)
    sections = {"model": {"path": "m", "lora": {}}, "rewards": [{"type": "model", "path": "r"}]}
    ours = RunConfig.model_validate(sections | {"data": {"prompts": "d"}, "train": {"max_steps": 1}, "output_dir": "o"})
    for cells, theirs, own in (
        ("temperature | .7 | 1", made.sampling.temperature == 0.7, ours.sampling.temperature == 1),
        ("gradient checkpointing | on | off", made.train.gradient_checkpointing, not ours.train.gradient_checkpointing),
        ("checkpoints | every 500 updates | none", made.train.save_steps == 500, ours.train.save_steps is None),
        ("Adam's ε | 1e-8 | 1e-5", made.train.adam_epsilon == 1e-8, ours.train.adam_epsilon == 1e-5),
    ):
        assert f"| {cells}" in PAGE and theirs and own, cells
    assert ours.sampling.stop_token == "eos" and ours.model.lora.target_modules == "all-linear"


def test_phases_by_hand_are_those_of_the_run(example, tmp_path, monkeypatch):
    """Bitwise, where the loop's judge is that of the file."""
    expected = [timeless(row) for row in train_policy(tiny_run(tmp_path)).updates]
    monkeypatch.setattr(example, "scores_of", lambda queries, texts: [len(text) / 10 for text in texts])
    with open_trainer(tiny_run(tmp_path, output_dir=str(tmp_path / "by_hand"))) as trainer:
        values = [example.one_update(trainer) for _ in range(trainer.num_updates)]
    own = [{k: v for k, v in row.items() if k not in ("step", "rewards/letters")} for row in expected]
    assert [timeless(row) for row in values] == own


def test_answers_from_elsewhere_are_like_those_of_a_rollout(example, tmp_path):
    with open_trainer(tiny_run(tmp_path)) as trainer:
        answers, tokenizer = trainer.rollout(Metrics()), trainer.parts.tokenizer
        queries = [prompt.token_ids for prompt in answers.prompts]
        responses = [completion.token_ids for completion in answers.completions]
        made = example.answers_of(queries, responses, tokenizer)
        assert made.texts == answers.texts
        assert made.ended.tolist() == answers.ended.tolist()
        assert [prompt.token_ids for prompt in made.prompts] == queries
        theirs, mine = trainer.micro_batches(answers), trainer.micro_batches(made)
        assert [batch.token_ids.tolist() for batch in mine] == [batch.token_ids.tolist() for batch in theirs]


def test_a_loop_by_hand_need_not_time_its_updates(tmp_path):
    with open_trainer(tiny_run(tmp_path)) as trainer:
        metrics = Metrics()
        answers = trainer.rollout(metrics)
        judged, moments = trainer.score(answers, metrics)
        optimizers = trainer.update(trainer.experience(answers, judged, metrics), answers, metrics)
        values = trainer.finish(metrics, moments, optimizers)
        trainer.record(values)
        assert values.keys().isdisjoint({"eps", "time/step_s", "time/rest_s"})
        assert values.keys() >= {"objective/scores", "time/update_s", "speed/update", "episode"}
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1]
    assert write_report(tmp_path / "out").is_file()


def test_phases_by_hand_share_their_metrics(tmp_path):
    with open_trainer(tiny_run(tmp_path)) as trainer:
        answers = trainer.rollout(Metrics())
        judged, moments = trainer.score(answers, Metrics())
        metrics = Metrics()
        optimizers = trainer.update(trainer.experience(answers, judged, metrics), answers, metrics)
        with pytest.raises(ConfigError, match=r"^finish: got metrics without those of score; wanted the same .*"):
            trainer.finish(metrics, moments, optimizers)


def test_a_policy_is_saved_to_no_file(tmp_path):
    """transformers logs an error and goes on without a model."""
    (tmp_path / "file").write_text("mine")
    with (
        open_trainer(tiny_run(tmp_path)) as trainer,
        pytest.raises(ConfigError, match=r"^output folder: .*file is a file"),
    ):
        save_policy(trainer.roles, trainer.parts.tokenizer, tmp_path / "file")


def test_scores_by_hand_are_checked(tmp_path):
    with open_trainer(tiny_run(tmp_path)) as trainer:
        answers = trainer.rollout(Metrics())
        for scores in ([1.0], [float("nan")] * 8):
            with pytest.raises(RewardResponseError):
                trainer.score(answers, Metrics(), RewardOutput(scores))


def test_names_on_the_page_exist():
    known = {doc.key for doc in keys.describe(RunConfig)}
    for key in re.findall(r"`((?:ppo|value|train|sampling)\.(?!py)\w+)", PAGE):
        assert key in known, key
    for name in re.findall(r"`(?:\w+ = |\w+, \w+ = )?trainer\.(\w+)\(", PAGE):
        assert hasattr(PPOTrainer, name), name
    taken = inspect.signature(tether.compat.trl.PPOTrainer).parameters
    table = PAGE.split("## Arguments of PPOTrainer")[1].split("\n\n")[1]
    for name in re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])):
        assert name in taken, name
    (listed,) = re.findall(r"has these methods and attributes: (.*?)\n\n", PAGE, flags=re.DOTALL)
    source = inspect.getsource(tether.compat.trl.PPOTrainer)
    for name in re.findall(r"`(\w+)`", listed):
        assert re.search(rf"def {name}\(|self\.{name}\b", source), name
