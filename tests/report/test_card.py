"""Model cards: what they say, what they never say, and that every saved folder has one."""

import json
import re

import pytest
import yaml

from tests.report.runs import CONFIG, evaluation, sft_run, update, write
from tests.stages.test_reward_stage import stage_config
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.report.card import CARD, card, write_card
from tether.report.read import read_run
from tether.stages.reward import train_reward_model
from tether.train.run import train_policy


def write_run(folder, *, config=CONFIG, samples=(), updates=12):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    lines = [evaluation(0, 0.0), *(update(i, i / updates) for i in range(1, updates + 1)), evaluation(updates, 1.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples), encoding="utf-8")
    return folder


def sample(step, response, prompt="how?", row=0):
    return {"step": step, "split": "eval", "row": row, "prompt": prompt, "response": response, "score": 1.0,
            "rewards": {"brevity": 1.0}, "length": 3, "finish_reason": "stop", "kl": 0.1}  # fmt: skip


def head(text):
    """The metadata of a card as the hub reads it."""
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])


CONFIGURED = CONFIG.replace("sampling:", "data: {prompts: [org/prompts, mine.jsonl]}\nsampling:").replace(
    "{path: tiny, lora: {r: 16}}", "{path: org/start}"
)


KEPT_SCORES = {0: 0.0, 5: 2.0, 10: -1.0}


class TestText:
    def test_holds_data_rewards_kl_curves_and_the_command(self, tmp_path):
        run = read_run(write_run(tmp_path / "run", config=CONFIGURED))
        text = card(run, "ppo", adapter=None)
        assert head(text) == {
            "base_model": "org/start", "library_name": "transformers", "pipeline_tag": "text-generation",
            "datasets": ["org/prompts"], "tags": ["tether", "ppo", "rlhf"],
        }  # fmt: skip
        assert "- data: `org/prompts`, `mine.jsonl`" in text
        assert "- reward: brevity, of type function, `my_rewards.py`, weight 1" in text
        assert "- KL: coefficient 0.05" in text and "`tether ppo config.yaml` with" in text
        assert "The held-out score rose by 2 standard deviations" in text
        table = [line.split("|")[1:-1] for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
        assert [int(row[0]) for row in table] == [1, 3, 5, 8, 10, 12]  # evenly spaced, both ends
        assert [cell.strip() for cell in table[-1][1:3]] == ["1.99", "4.01"]  # score and KL of the last update
        assert re.search(r"tether [\d.]+, torch [\d.]+", text)

    @pytest.mark.parametrize(("kl", "shown"), [([0.0, 4.0], "4"), ([3.0, 0.0], "0"), ([2.5], "2.5")])
    def test_kl_is_that_of_the_policy_which_the_run_left(self, tmp_path, kl, shown):
        lines = [evaluation(i, i / 2, eval_kl=value) for i, value in enumerate(kl)]
        run = read_run(write(tmp_path, [*lines, update(1, 1.0, objective__kl=9.0)], config=CONFIGURED))
        assert f"KL to the start: {shown} nats per answer." in card(run, "ppo", adapter=None)

    def test_of_a_run_that_kept_its_best_policy_speaks_of_that_one(self, tmp_path):
        config = CONFIGURED.replace(
            "train: {", "train: {metric_for_best_model: eval_scores, load_best_model_at_end: true, "
        )
        lines = [evaluation(step, 0.0, eval_scores=score, eval_kl=step / 10) for step, score in KEPT_SCORES.items()]
        lines += [update(step, step / 10) for step in range(1, 11)]
        samples = [sample(step, f"said at {step}", row=row) for step in KEPT_SCORES for row in range(8)]
        folder = write(tmp_path, lines, samples, config=config, finished={"step": 10, "kept_step": 5})
        text = card(read_run(folder), "ppo", adapter=None)
        assert "The held-out score rose by 2 standard deviations" in text
        assert r"the policy after update 5 of 10, the best by eval\_scores" in text and "0.5 nats per answer" in text
        assert "said at 5" in text and "said at 10" not in text

    def test_of_an_adapter_names_its_base_and_loads_by_peft(self, tmp_path):
        run = read_run(write_run(tmp_path / "run"))
        text = card(run, "ppo", adapter={"base_model_name_or_path": "org/base"})
        assert head(text)["base_model"] == "org/base" and head(text)["library_name"] == "peft"
        assert 'AutoModelForCausalLM.from_pretrained("org/base")' in text and "PeftModel.from_pretrained" in text

    @pytest.mark.parametrize(("method", "said"), [("LORA", "A LoRA adapter of"), ("IA3", "An IA3 adapter of")])
    def test_of_an_adapter_names_its_method(self, tmp_path, method, said):
        adapter = {"base_model_name_or_path": "org/base", "peft_type": method}
        text = card(read_run(write_run(tmp_path / "run")), "ppo", adapter=adapter)
        assert f"{said} `org/base`" in text and head(text)["tags"] == ["tether", "ppo", method.lower(), "rlhf"]

    def test_of_a_stage_shows_the_last_step_also_where_an_evaluation_followed(self, tmp_path):
        run = read_run(sft_run(tmp_path))
        table = [line.split("|")[1:-1] for line in card(run, "sft", adapter=None).splitlines() if "| 20 |" in line]
        assert [[cell.strip() for cell in row] for row in table] == [["20", "2", "0.6"]]

    def test_local_models_and_datasets_are_no_hub_ids(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "org").mkdir()
        (tmp_path / "org" / "start").mkdir()
        config = CONFIGURED.replace("org/prompts", "/home/me/prompts.jsonl")
        metadata = head(card(read_run(write_run(tmp_path / "run", config=config)), "ppo", adapter=None))
        assert "base_model" not in metadata and "datasets" not in metadata and "license" not in metadata

    def test_text_of_models_and_datasets_does_nothing(self, tmp_path):
        prompt = "# head | [a](http://evil/x) ![i](y) <script>alert(1)</script>\n---\n\x1b[31m"
        samples = [sample(0, "`code` **bold** www.evil.example $x$"), sample(12, "me@evil.example _u_ &lt;", prompt)]
        samples[0]["prompt"] = prompt
        text = card(read_run(write_run(tmp_path / "run", config=CONFIGURED, samples=samples)), "ppo", adapter=None)
        (row,) = [line for line in text.splitlines() if "evil" in line]
        bare = re.sub(r"\\.|&#?\w+;", "", row)  # without what is escaped
        assert bare.count("|") == 4
        assert not re.search(r"[`*_\[\]#!<>$@\x1b]|://|www\.", bare)
        assert "&lt;script&gt;" in row and "&amp;lt;" in row

    def test_keys_of_services_are_not_in_it(self, tmp_path):
        config = CONFIGURED.replace(
            "- {type: function, path: my_rewards.py, name: brevity, weight: 1.0}",
            "- {type: http, url: 'https://host/score?token=s3cret', api_key_env: REWARD_KEY}\n"
            "- {type: judge, base_url: 'https://host/v1?key=s3cret', model: m, rubric: r, extra_body: {k: s3cret}}",
        )
        text = card(read_run(write_run(tmp_path / "run", config=config)), "ppo", adapter=None)
        assert "https://host/score" in text and "api_key_env: REWARD_KEY" in text and "s3cret" not in text

    def test_a_fence_in_the_configuration_does_not_end_it(self, tmp_path):
        config = f"{CONFIGURED}note: 'a ``` b'\n"
        text = card(read_run(write_run(tmp_path / "run", config=config)), "ppo", adapter=None)
        assert "````yaml\n" in text and text.count("\n````") == 2

    def test_of_a_checkpoint_is_short(self, tmp_path):
        run = write_run(tmp_path / "run", config=CONFIGURED)
        saved = tmp_path / "saved"
        saved.mkdir()
        write_card(saved, run, step=7)
        text = (saved / CARD).read_text()
        assert "after 7 updates" in text and "## Curves" not in text and "## Command" not in text

    def test_a_folder_of_no_run_gets_none(self, tmp_path):
        write_card(tmp_path, tmp_path)
        assert not (tmp_path / CARD).exists()


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_run_writes_one_into_every_folder(tmp_path, lora):
    config = tiny_run(tmp_path, model__lora=lora, train__save_steps=1, value__save=True)
    out = train_policy(config).output_dir
    texts = {name: (out / name / CARD).read_text() for name in (".", "checkpoint-1", "checkpoint-2", "critic")}
    library = "peft" if lora else "transformers"
    assert {head(text)["library_name"] for text in texts.values()} == {library}
    assert head(texts["critic"])["pipeline_tag"] == "text-classification"
    assert "after 1 update" in texts["checkpoint-1"] and "## Curves" in texts["."]
    for folder in (out, out / "checkpoint-1", out / "critic"):
        assert CARD in json.loads((folder / "manifest.json").read_text())["files"]


def test_a_merged_adapter_keeps_that_of_its_run(tmp_path):
    out = train_policy(tiny_run(tmp_path, model__lora={"r": 2}, train__max_steps=1)).output_dir
    assert main(["merge", str(out), "-o", str(tmp_path / "merged")]) == 0
    merged, own = ((folder / CARD).read_text() for folder in (tmp_path / "merged", out))
    assert head(merged)["library_name"] == "transformers" and "lora" not in head(merged)["tags"]
    assert "PeftModel" in own and "PeftModel" not in merged
    assert "## Curves" in merged and "trained by PPO" in merged
    assert CARD in json.loads((tmp_path / "merged" / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_reward_model_has_one_with_its_accuracy(tmp_path, lora):
    out = train_reward_model(stage_config(tmp_path, lora=lora, num_train_epochs=1)).path
    text = (out / CARD).read_text()
    accuracy = json.loads((out / "reward_eval.json").read_text())["metrics"]["accuracy"]
    assert head(text)["tags"][:2] == ["tether", "reward-model"]
    assert f"| accuracy | {accuracy:.3g} |" in text
    assert ("num_labels=1" in text) == bool(lora) and "AutoModelForSequenceClassification" in text
