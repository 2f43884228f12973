"""What a file of scores says of a judge, against the same counted by hand."""

import json
import math
import signal

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.models.build import edit_json
from tests.rewards.encoders import save_encoder
from tests.rewards.services import Reply, local_service
from tests.rewards.test_judge_source import says
from tests.tiny import save_tiny
from tether import __version__
from tether.config.source import SourceConfig
from tether.errors import ConfigError, DataError, RewardError, RewardResponseError
from tether.inference.scoring import accuracy, answer_tables, correlation, pair_tables, score_file, thirds
from tether.metrics.writers import read_jsonl
from tether.rewards.http import WANTED

FUNCTION = """
def letters(prompts, completions, bonus=None, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(text) + 10 * (b or 0) for text, b in zip(texts, bonus or [0] * len(texts))]
"""


def config(folder, *more, **keys):
    (folder / "judge.py").write_text(FUNCTION, encoding="utf-8")
    letters = {"type": "function", "path": str(folder / "judge.py"), "name": "letters"}
    return SourceConfig.model_validate({"rewards": [letters, *more], **keys})


def written(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_pairs_by_hand():
    scores = {"score": [2.0, 1.0, 0.0, 3.0, 5.0, 5.0, 4.0, 1.0], "other": [1.0] * 8}
    lengths = [5, 3, 4, 9, 7, 7, 2, 8]
    summary, by_length = pair_tables(scores, lengths, "pairs.jsonl")
    assert summary.title == "4 pairs of pairs.jsonl: accuracy and mean scores"
    error = math.sqrt(0.625 * 0.375 / 4)
    xs, ys = scores["score"], lengths
    mx, my = sum(xs) / 8, sum(ys) / 8
    r = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / math.sqrt(
        sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys)
    )
    # right, wrong, tied, right
    assert summary.rows[0] == ["score", 0.625, pytest.approx(error), 1, 2.75, 2.5, 0.25, pytest.approx(r)]
    assert summary.rows[1] == ["other", 0.5, 0.25, 4, 1.0, 1.0, 0.0, None]
    assert [row[:3] for row in by_length.rows] == [
        ["the chosen answer is longer", 1, 1.0],
        ["the chosen answer is shorter", 2, 0.5],
        ["both are equally long", 1, 0.5],
        ["the longer one has 0 to 7 characters", 2, 0.75],
        ["the longer one has 8 characters", 1, 1.0],
        ["the longer one has 9 characters", 1, 0.0],
    ]


def test_answers_by_hand():
    summary, by_length = answer_tables({"score": [1.0, 2.0, 6.0]}, [3, 1, 2], "answers.jsonl")
    assert summary.rows == [["score", 3.0, pytest.approx(math.sqrt(14 / 3)), 1.0, 6.0, pytest.approx(-0.1889822)]]
    assert by_length.rows == [["0 to 1 characters", 1, 2.0], ["2 characters", 1, 6.0], ["3 characters", 1, 1.0]]


def test_accuracy_counts_ties_half():
    assert accuracy([1.0, -2.0, 0.0, 0.0, 3.0]) == (0.6, pytest.approx(math.sqrt(0.24 / 5)))
    assert accuracy([1.0]) == (1.0, 0.0)


@pytest.mark.parametrize("lengths", [[1], [1, 2], [5, 5, 5, 5], [3, 1, 2, 9, 4, 4, 7], [0] * 9 + [1000]])
def test_thirds_hold_every_length_once(lengths):
    groups = thirds(lengths)
    assert sorted(i for rows in groups.values() for i in rows) == list(range(len(lengths)))
    tops = [max(lengths[i] for i in rows) for rows in groups.values()]
    assert tops == sorted(set(tops))
    assert all(label.split()[-2] == str(top) for label, top in zip(groups, tops, strict=True))
    for rows, above in zip(list(groups.values()), list(groups.values())[1:], strict=False):
        assert max(lengths[i] for i in rows) < min(lengths[i] for i in above)


def test_no_spread_no_correlation():
    assert correlation([1.0, 1.0], [1.0, 2.0]) is None
    assert correlation([1.0, 3.0], [5, 4]) == pytest.approx(-1.0)
    assert correlation([1e-200, 3e-200], [5, 4]) is None


def test_rows_keep_their_scores_and_columns_reach_the_sources(tmp_path):
    file = written(
        tmp_path,
        {"prompt": "p", "chosen": "aaa", "rejected": "b", "bonus": 1},
        {"prompt": [{"role": "user", "content": "p"}], "chosen": "a", "rejected": "bb", "bonus": None},
    )
    scored = score_file(config(tmp_path), file, output=tmp_path / "out.jsonl")
    assert scored.rows == read_jsonl(tmp_path / "out.jsonl")
    assert [(row["chosen_score"], row["rejected_score"]) for row in scored.rows] == [(13.0, 11.0), (1.0, 2.0)]
    assert scored.rows[0] == {
        "row": 0,
        "prompt": "p",
        "chosen": "aaa",
        "chosen_score": 13.0,
        "chosen_rewards": {"letters": 13.0},
        "rejected": "b",
        "rejected_score": 11.0,
        "rejected_rewards": {"letters": 11.0},
    }
    assert scored.tables[0].rows[0][:4] == ["score", 0.5, pytest.approx(math.sqrt(0.125)), 0]
    assert scored.seen == []


def test_answers_of_a_run_can_be_scored_again(tmp_path):
    rows = [{"row": 0, "prompt": "p", "response": "a" * n, "score": 7.0, "rewards": {"x": 1}} for n in range(1, 150)]
    scored = score_file(config(tmp_path), written(tmp_path, *rows))
    assert [row["score"] for row in scored.rows] == [float(n) for n in range(1, 150)]
    assert scored.tables[0].rows == [["score", 75.0, pytest.approx(math.sqrt((149**2 - 1) / 12)), 1.0, 149.0, 1.0]]


def test_a_judge_of_whole_conversations_reads_what_the_template_writes_behind_the_end(tmp_path):
    """As ChatML writes a newline there, and a reward model was trained to be read at; the policy never samples it."""
    for name, labels in (("policy", None), ("judge", 1)):
        save_tiny(tmp_path / name, num_labels=labels)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> and {% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        tokenizer.save_pretrained(tmp_path / name)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge").eval()

    def plain(ids):
        with torch.no_grad():
            return pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-5)

    def score(prompt, form):
        judge = {"type": "model", "path": str(tmp_path / "judge"), "input_format": form}
        sources = SourceConfig.model_validate({"rewards": [judge], "model": {"path": str(tmp_path / "policy")}})
        return score_file(sources, written(tmp_path, {"prompt": prompt, "response": "very good"})).rows[0]["score"]

    user, answer = {"role": "user", "content": "the cat sees"}, {"role": "assistant", "content": "very good"}
    text = tokenizer.apply_chat_template([user, answer], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text.endswith("very good <eos> and ") and ids[-1] != tokenizer.eos_token_id
    assert score([user], "chat") == score("the cat sees", "chat") == plain(ids)
    assert score([user], "auto") == plain(ids[:-1]) != plain(ids)


@pytest.mark.parametrize("reads", ["ids", "text"])
def test_a_row_that_no_model_can_read_is_told_before_any_loads(tmp_path, monkeypatch, reads):
    monkeypatch.setattr("tether.inference.scoring.load_judges", None)
    monkeypatch.setattr("tether.inference.scoring.BATCH", 3)
    save_tiny(tmp_path / "policy")
    judge = {"type": "model", "path": str(save_tiny(tmp_path / "judge", num_labels=1)), "max_length": 16}
    keys = {"rewards": [judge | {"input_format": "auto" if reads == "ids" else "joined"}]}
    sources = SourceConfig.model_validate(keys | {"model": {"path": str(tmp_path / "policy")}})
    row = {"prompt": "the cat", "chosen": "good", "rejected": "bad " * (11 if reads == "ids" else 15)}
    file = written(tmp_path, {**row, "rejected": "bad"}, row)
    message = r"FILE: .*row 1 \(line 2\), for rewards\.0: prompt and answer have 17 .*judge reads at most 16: .*"
    with pytest.raises(DataError, match=rf"{message} raise rewards\.0\.max_length, or set rewards\.0\.missing to"):
        score_file(sources, file)


def test_a_row_that_no_model_can_read_may_have_a_score(tmp_path):
    judge = {"type": "model", "path": str(save_tiny(tmp_path / "judge", num_labels=1)), "name": "judge"}
    sources = SourceConfig.model_validate({"rewards": [judge | {"max_length": 12, "missing": -3.0}]})
    rows = [{"prompt": "the cat", "response": text} for text in ("good", "bad " * 20)]
    (short, long) = score_file(sources, written(tmp_path, *rows)).rows
    assert long["rewards"] == {"judge": -3.0, "judge/missing": 1.0} and short["rewards"]["judge/missing"] == 0.0


def test_services_and_functions_are_tried_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.inference.scoring.load_judges", None)
    file = written(tmp_path, {"prompt": "p", "response": "a"}, {"prompt": "p", "response": "b"})
    with local_service(lambda payload: Reply({}, 404)) as local:
        sources = config(tmp_path, {"type": "http", "url": local.url})
        with pytest.raises(ConfigError, match=r"rewards\.1: the service failed to score a test answer: .*status 404"):
            score_file(sources, file)
    assert [payload["responses"] for payload in local.seen] == [["a"]]
    (tmp_path / "judge.py").write_text("def letters(prompts, completions):\n    return [nothing]\n")
    broken = {"type": "function", "path": str(tmp_path / "judge.py"), "name": "letters"}
    with pytest.raises(ConfigError, match=r"rewards\.0: the function failed to score a test answer: .*NameError"):
        score_file(SourceConfig.model_validate({"rewards": [broken]}), file)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_label_of_a_sentiment_model_scores_answers(tmp_path, kind):
    judge = tmp_path / "judge"
    save_tiny(judge, num_labels=2) if kind == "decoder" else save_encoder(judge, num_labels=2)
    edit_json(judge / "config.json", lambda saved: saved.update(id2label={0: "NEGATIVE", 1: "POSITIVE"}))
    section = {"type": "model", "path": str(judge), "label": "POSITIVE", "input_format": "response"}
    answers = ["very good", "bad"]
    file = written(tmp_path, *({"prompt": "the cat", "response": answer} for answer in answers))
    rows = score_file(SourceConfig.model_validate({"rewards": [section]}), file).rows
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    with torch.no_grad():
        wanted = [model(**tokenizer(answer, return_tensors="pt")).logits[0, 1].item() for answer in answers]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-5)


def test_several_sources_are_told_apart(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    sources = config(tmp_path, {"type": "model", "path": str(tmp_path / "judge"), "weight": -1.0})
    file = written(tmp_path, {"prompt": "the cat", "chosen": "good", "rejected": "bad day"})
    scored = score_file(sources, file)
    assert [row[0] for row in scored.tables[0].rows] == ["score", "letters", "model_1"]
    row = scored.rows[0]
    assert row["chosen_score"] == row["chosen_rewards"]["letters"] - row["chosen_rewards"]["model_1"]
    assert scored.seen == [
        "row 0, chosen, as model_1 reads it: '<user> the cat <eos> <assistant> good <eos>'",
        "row 0, rejected, as model_1 reads it: '<user> the cat <eos> <assistant> bad day <eos>'",
    ]


def test_members_of_an_ensemble_are_sources_too(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    judge = {"type": "model", "path": str(tmp_path / "judge")}
    ensemble = {"type": "ensemble", "members": [judge, judge | {"weight": 2.0}]}
    scored = score_file(config(tmp_path, ensemble), written(tmp_path, {"prompt": "the cat", "response": "good"}))
    assert list(scored.rows[0]["rewards"]) == ["letters", "ensemble_1", "ensemble_1/model_0", "ensemble_1/model_1"]
    text = "'<user> the cat <eos> <assistant> good <eos>'"
    assert scored.seen == [f"row 0, answer, as ensemble_1/model_{i} reads it: {text}" for i in (0, 1)]


def test_the_policy_says_how_prompts_become_queries(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1, bos=True)
    save_tiny(tmp_path / "policy", bos=True)
    judge = {"type": "model", "path": str(tmp_path / "judge")}
    file = written(tmp_path, {"prompt": "the cat", "response": "sees"}, {"prompt": "you", "response": "not"})
    seen = {}
    for template in ("auto", "none"):
        keys = {"model": {"path": str(tmp_path / "policy")}, "data": {"chat_template": template}}
        sources = SourceConfig.model_validate({"rewards": [judge], **keys})
        seen[template] = score_file(sources, file).seen[0].partition("reads it: ")[2]
    assert seen["auto"] == "'<bos> <user> the cat <eos> <assistant> sees <eos>'"
    assert seen["none"] == "'<bos> the cat sees <eos>'"


def test_transcripts_and_template_arguments_are_read_as_the_other_stages_read_them(tmp_path):
    folder = save_tiny(tmp_path / "judge", num_labels=1)
    template = "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<assistant> ' }}{{ m['content'] }}"
    template += "{% if mood is defined %} {{ mood }}{% endif %} <eos> {% endfor %}"
    template += "{% if add_generation_prompt %}<assistant> {% endif %}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    texts = {"chosen": "\n\nHuman: the cat\n\nAssistant: sees", "rejected": "\n\nHuman: the cat\n\nAssistant: not"}
    keys = {"model": {"path": str(folder)}, "data": {"chat_template_kwargs": {"mood": "good"}}}
    sources = SourceConfig.model_validate({"rewards": [{"type": "model", "path": str(folder)}], **keys})
    rows = texts, texts | {"chat_template_kwargs": {"mood": "bad"}}
    seen = [text.partition("reads it: ")[2] for text in score_file(sources, written(tmp_path, *rows)).seen]
    for shown, mood in zip(seen[::2], ("good", "bad"), strict=True):
        assert shown == f"'<user> the cat {mood} <eos> <assistant> sees <eos>'"


def test_a_column_system_is_read_as_the_other_stages_read_it(tmp_path):
    folder = str(save_tiny(tmp_path / "judge", num_labels=1))
    sources = SourceConfig.model_validate({"rewards": [{"type": "model", "path": folder}], "model": {"path": folder}})
    rows = [{"prompt": "the cat", "response": "sees", "system": text} for text in ("we", "")]
    seen = [text.partition("reads it: ")[2] for text in score_file(sources, written(tmp_path, *rows)).seen]
    query = "<user> the cat <eos> <assistant> sees <eos>"
    assert seen == [f"'<system> we <eos> {query}'", f"'{query}'"]


def test_a_tokenizer_that_stands_in_is_named_where_it_will_not_do(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1, chat_template=False)
    sources = SourceConfig.model_validate({"rewards": [{"type": "model", "path": str(tmp_path / "judge")}]})
    file = written(tmp_path, {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]})
    with pytest.raises(DataError, match="has no chat template") as caught:
        score_file(sources, file)
    assert "set model.path to the policy" in caught.value.__notes__[0]


def test_long_texts_are_shown_by_their_ends(tmp_path):
    judge = {"type": "judge", "model": "m", "rubric": "{response}"}
    file = written(tmp_path, {"prompt": "p", "response": "a" * 700 + "b" * 700 + "c" * 700})
    with local_service(lambda payload: says("5")) as local:
        sources = SourceConfig.model_validate({"rewards": [judge | {"base_url": local.url}]})
        (shown,) = score_file(sources, file).seen
    assert shown == f"row 0, answer, as judge reads it: '{'a' * 600} […] {'c' * 600}'"


def test_a_source_that_cannot_score_is_an_error(tmp_path):
    file = written(tmp_path, {"prompt": "p", "response": "a"})
    with local_service(lambda payload: Reply({})) as local, pytest.raises(ConfigError, match=WANTED[:4]):
        score_file(config(tmp_path, {"type": "http", "url": local.url}), file)


def test_mistakes_are_told_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.inference.scoring.load_judges", None)
    file = written(tmp_path, {"prompt": "p", "response": "a"})
    with pytest.raises(DataError, match=r"FILE: no such file or folder: none\.jsonl"):
        score_file(config(tmp_path), "none.jsonl")
    with pytest.raises(ConfigError, match=r"--output: .* exists"):
        score_file(config(tmp_path), file, output=tmp_path / "rows.jsonl")
    sent = {"type": "http", "url": "http://127.0.0.1:1/", "columns": ["gone"]}
    with pytest.raises(ConfigError, match=r"rewards\.1\.columns: the dataset has no column gone"):
        score_file(config(tmp_path, sent), file)


def test_rows_that_are_scored_are_kept_when_the_rest_fails(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(
        "def picky(prompts, completions):\n"
        "    assert 'no' not in completions\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    source = {"type": "function", "path": str(tmp_path / "picky.py"), "name": "picky"}
    sources, out = SourceConfig.model_validate({"rewards": [source]}), tmp_path / "out.jsonl"
    rows = [{"prompt": "p", "chosen": text, "rejected": "b"} for text in ("aaa", "aa", "a", "no")]
    monkeypatch.setattr("tether.inference.scoring.BATCH", 5)
    with pytest.raises(RewardError, match="picky"):
        score_file(sources, written(tmp_path, *rows), output=out)
    assert [(row["row"], row["chosen_score"], row["rejected_score"]) for row in read_jsonl(out)] == [
        (0, 3.0, 1.0),
        (1, 2.0, 1.0),
    ]


@pytest.mark.parametrize("is_pairs", [False, True])
def test_metrics_are_written_with_what_was_measured(tmp_path, is_pairs):
    rows = [{"prompt": "p", "chosen": "aaa", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "bb"}]
    rows = rows if is_pairs else [{"prompt": "p", "response": row["chosen"]} for row in rows]
    sources, file = config(tmp_path), written(tmp_path, *rows)
    scored = score_file(sources, file, metrics=tmp_path / "new" / "metrics.json")
    record = json.loads((tmp_path / "new" / "metrics.json").read_text())
    assert (record["tether"], record["command"], record["file"]) == (__version__, "score", str(file))
    assert record["num_answers"] == (4 if is_pairs else 2) and record["config"]["rewards"][0]["name"] == "letters"
    shown = dict(zip(scored.tables[0].columns[1:], scored.tables[0].rows[0][1:], strict=True))
    assert record["metrics"]["score"] == shown and (shown["accuracy"] if is_pairs else shown["mean"] / 4) == 0.5
    assert sum(each["pairs" if is_pairs else "answers"] for each in record["by_length"].values()) in (2, 4)
    with pytest.raises(ConfigError, match=r"--metrics: .*metrics\.json exists; name a new file"):
        score_file(sources, file, metrics=tmp_path / "new" / "metrics.json")
    with pytest.raises(ConfigError, match=r"--output and --metrics: both are .*one\.json, .*; name two files"):
        score_file(sources, file, output=tmp_path / "one.json", metrics=tmp_path / "one.json")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_rows_that_are_scored_are_kept_when_the_process_is_told_to_end(tmp_path, monkeypatch, name):
    number = getattr(signal, name)
    monkeypatch.setattr("tether.inference.scoring.BATCH", 2)
    (tmp_path / "told.py").write_text(
        "import os\n"
        "def told(prompts, completions):\n"
        f"    'stop' in completions and os.kill(os.getpid(), {int(number)})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    source = {"type": "function", "path": str(tmp_path / "told.py"), "name": "told"}
    file = written(tmp_path, *({"prompt": "p", "response": text} for text in ("a", "bb", "stop", "c")))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt, match=name):
            score_file(config(tmp_path, source), file, output=tmp_path / "out.jsonl")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert [row["response"] for row in read_jsonl(tmp_path / "out.jsonl")] == ["a", "bb"]


def test_components_that_only_some_batches_have_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.inference.scoring.BATCH", 2)

    def answer(payload):
        more = {"components": {"b": [9.0, 9.5]}} if "late" in payload["responses"] else {}
        return Reply({"scores": [1.0] * len(payload["responses"]), **more})

    with local_service(answer) as local:
        file = written(tmp_path, *({"prompt": "p", "response": text} for text in ("a", "bb", "late", "c")))
        source = {"type": "http", "url": local.url}
        with pytest.raises(RewardResponseError, match=r"components .* for answers 2 to 3 \(counted from 0\)"):
            score_file(config(tmp_path, source), file, output=tmp_path / "out.jsonl")
    assert [row["response"] for row in read_jsonl(tmp_path / "out.jsonl")] == ["a", "bb"]


def test_answers_that_a_source_gave_no_score_are_counted_in_rows_and_are_no_source_of_the_tables(tmp_path):
    (tmp_path / "short.py").write_text(
        "def short(prompts, completions, **columns):\n"
        "    return [None if len(text) > 3 else float(len(text)) for text in completions]\n"
    )
    source = {"type": "function", "path": str(tmp_path / "short.py"), "name": "short", "missing": -1.0}
    file = written(tmp_path, *({"prompt": "a", "response": text} for text in ("ab", "abcdef")))
    scored = score_file(config(tmp_path, source), file)
    assert [row["rewards"]["short/missing"] for row in scored.rows] == [0.0, 1.0]
    assert [row[0] for row in scored.tables[0].rows] == ["score", "letters", "short"]
