import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.report.runs import CONFIG, answer, evaluation, healthy, update, write
from tether.errors import DataError
from tether.report import curves, write_report
from tether.report.html import page as page_of
from tether.report.read import read_run

VOID = {"meta", "br", "hr", "path", "rect", "circle", "line"}
ALLOWED = set(
    re.findall(
        "[a-z0-9]+",
        "html head meta title style body main script h1 h2 h3 p b a bdi dl dt dd div ul li span i code pre figure "
        "output svg g path rect circle line text article details summary table thead tbody tr th td footer",
    )
)
HOSTILE = (
    "</title></style></script><script>alert(1)</script><img src='http://evil.example/x.png' onerror=alert(1)>"
    "\x1b[31mred\x1b]8;;http://evil.example\x07 \u202egpj\u202c \ud83d \u200b & \"quoted\" 'single' <!-- ]]> \x00"
)


class Page(HTMLParser):
    """Checks that tags nest, and gathers what a browser would act on and what a reader would see."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.stack == [], f"not closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice: {attrs}"
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID, f"<{tag}/> does not close in HTML"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.scripts.append(data)
        elif self.stack and self.stack[-1] != "style":
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"comment: {data}")


def report(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_bytes().decode("utf-8")
    page = Page(text)
    assert len(page.scripts) == 1
    assert set(page.tags) <= ALLOWED
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "srcset", "action", "style", "data"), (tag, name)
        assert name != "href" or value == "#health"
        assert name == "content" or "://" not in (value or "")
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    assert "url(" not in style and "@import" not in style and "//" not in style
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]", text)
    return page


def test_a_healthy_run(tmp_path):
    page = report(healthy(tmp_path))
    for words in (
        "Did the policy get better? Yes. The held-out score rose by 2 standard deviations",
        "Reward against KL", "Ended by itself", "Explained variance", "Seconds per phase", "brevity",
        "question 0", "answer 0 at 0", "answer 0 at 25",
        "Start policy", "After update 25",
        "Training answers over time", "num_ppo_epochs: 4", "Health: 14 ok",
    ):  # fmt: skip
        assert words in page.text, words


def test_what_is_most_urgent_stands_at_the_top_with_what_to_do(tmp_path):
    metrics = [evaluation(0, 0.0), *(update(i, i / 25, policy__entropy_avg=3.0 * 0.5**i) for i in range(1, 26))]
    text = report(write(tmp_path, [*metrics, evaluation(25, 1.0)])).text
    top = text[: text.index("Curves")]
    assert re.search(r"Health: \d+ to act on", top) and "Entropy went from" in top and "Raise ppo.kl_coef" in top


def test_the_page_may_run_its_own_script_and_load_nothing(tmp_path):
    page = report(healthy(tmp_path))
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


def test_a_folder_without_files_says_what_is_missing(tmp_path):
    page = Page(page_of(read_run(tmp_path)))
    assert "Not known yet." in page.text
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        assert f"{name} is missing" in page.text


def test_a_folder_that_does_not_exist_is_a_readable_error(tmp_path):
    with pytest.raises(DataError, match="not a folder; give the output_dir of a run"):
        write_report(tmp_path / "nowhere")


def test_a_folder_of_no_run_is_left_alone_and_one_in_it_named(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(DataError, match=r"holds none of config\.yaml, .*; give the output_dir of a run"):
        write_report(tmp_path)
    healthy(tmp_path / "ppo")
    with pytest.raises(DataError, match=r"holds none of .*; give .*ppo, which does"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


@pytest.mark.parametrize("config", ["", "rewards: [\n", "- rewards\n", "a: &a [*a]\n", "rewards: !!python/name:os\n"])
def test_the_configuration_is_shown_without_keys_or_not_at_all(tmp_path, config):
    """Whatever else the file holds."""
    own = (
        "judge: {url: 'https://me:s3cret@host/score?key=s3cret', extra_body: {token: s3cret}}  # s3cret\n"
        "ppo: {kl_coef: 0.05}\n"
    )
    page = report(write(tmp_path, [update(1, 0.0)], config=own + config))
    assert "s3cret" not in (tmp_path / "report.html").read_text()
    if config:
        assert "config.yaml cannot be read, so it is not shown" in page.text
    else:
        assert "https://host/score?…" in page.text and "kl_coef: 0.05" in page.text


def test_one_update(tmp_path):
    page = report(write(tmp_path, [update(1, 0.0)], [answer(1, 0, 1.0, split="train")]))
    assert "1 of 25" in page.text and "interrupted or still running" in page.text


def test_start_evaluation_only(tmp_path):
    page = report(write(tmp_path, [evaluation(0, 0.0)], [answer(0, row, 1.0) for row in range(3)]))
    assert "Only one evaluation was finished" in page.text and "answer 2 at 0" in page.text


def test_five_thousand_updates_stay_small(tmp_path):
    metrics = [update(i, i / 5000, **{f"rewards__judge {k}": 0.1 * k for k in range(14)}) for i in range(1, 5001)]
    metrics += [evaluation(i, i / 5000) for i in range(0, 5001, 500)]
    texts = [HOSTILE * 2000, "&" * 100_000, "\u202e" * 100_000]
    rewards = {f"judge {k} {HOSTILE}": 1.0 for k in range(100)}
    samples = [
        answer(step, row, 1.0, prompt=texts[row % 3], response=texts[(row + 1) % 3], rewards=rewards)
        for step in (0, 5000)
        for row in range(60)
    ]
    samples += [answer(step, 0, 1.0, split="train", response=texts[step % 3]) for step in range(1, 5001, 100)]
    folder = write(tmp_path, metrics, samples, config=CONFIG + "# " + "<" * 1_000_000)
    page = report(folder)
    assert (folder / "report.html").stat().st_size < 2_000_000
    assert "mean of about 41.7 neighboring updates" in page.text
    assert "more characters in samples.jsonl" in page.text


def test_hostile_text_anywhere_is_shown_and_does_nothing(tmp_path):
    metrics = [update(i, 0.1 * i) | {f"rewards/{HOSTILE}": 1.0, HOSTILE: 2.0} for i in range(1, 4)]
    metrics += [evaluation(0, 0.0) | {f"eval_rewards/{HOSTILE}": 1.0}, evaluation(3, 1.0)]
    hostile = {"response": HOSTILE, "prompt": [{"role": HOSTILE, "content": HOSTILE}], "rewards": {HOSTILE: 1.0}}
    samples = [answer(step, row, 1.0, **hostile, finish_reason=HOSTILE) for step in (0, 3) for row in range(3)]
    samples.append(answer(1, 0, 1.0, split="train", **hostile))
    config = f"train: {{run_name: {json.dumps(HOSTILE)}}}\nmodel: {{path: {json.dumps(HOSTILE)}}}\n"
    folder = write(tmp_path, metrics, samples, config=config)
    page = report(folder)
    assert r"\x1b[31mred\x1b]8;;http://evil.example\x07 \u202egpj\u202c \ud83d \u200b &" in page.text
    assert "<script>alert(1)</script><img src='http://evil.example/x.png' onerror=alert(1)>" in page.text


def test_gaps_and_numbers_at_the_edge_of_floats(tmp_path):
    odd = [None, float("inf"), 1e99, -1e99, 1e-99, 0.0, 1e308, -1e308]
    metrics = [
        {name: odd[(i + k) % len(odd)] for k, name in enumerate(update(1, 0.1))} | {"step": i} for i in range(1, 30)
    ]
    metrics += [{name: odd[(i + k) % 8] for k, name in enumerate(evaluation(0, 0))} | {"step": i} for i in range(9)]
    assert "Curves" in report(write(tmp_path, metrics, [answer(0, 0, 1e308), answer(9, 0, -1e308)])).text


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, None])
def test_metrics_that_never_change_or_never_are(tmp_path, value):
    same = {name: value for name in update(1, 0.1)}
    metrics = [same | {"step": i} for i in range(1, 31)]
    metrics += [{name: value for name in evaluation(0, 0.0)} | {"step": i} for i in (0, 30)]
    assert report(write(tmp_path, metrics, [])).text


@pytest.mark.parametrize("name", sorted(update(1, 0.1)))
def test_any_metric_may_be_missing_or_alone(tmp_path, name):
    lines = [update(i, i / 12) for i in range(1, 13)]
    for line in lines:
        if name != "step":
            del line[name]
    assert report(write(tmp_path / "without", lines)).text
    alone = [{"step": i, name: 0.5 * i} if name != "step" else {"step": i} for i in range(1, 13)]
    assert report(write(tmp_path / "alone", alone)).text


def test_any_cut_of_the_files_gives_a_report(tmp_path):
    whole = healthy(tmp_path / "whole", updates=3)
    metrics, samples = ((whole / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl"))
    for k in range(0, 12):
        folder = tmp_path / str(k)
        write(folder)
        (folder / "metrics.jsonl").write_bytes(metrics[: len(metrics) * k // 11 - k % 2 * 7])
        (folder / "samples.jsonl").write_bytes(samples[: len(samples) * k // 11 - k % 3 * 5])
        assert report(folder).text


def test_an_earlier_report_is_replaced_and_nothing_else_is_left(tmp_path):
    healthy(tmp_path)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "samples.jsonl",
    ]
    assert oct(os.stat(tmp_path / "report.html").st_mode & 0o777) == "0o644"


def test_long_answers_are_folded(tmp_path):
    samples = [answer(step, 0, 1.0, response="word " * 300) for step in (0, 3)]
    page = report(write(tmp_path, [update(1, 0.1)], samples))
    assert page.text.count("read on") == 2
    assert page.text.count("word") == 600


def test_held_out_answers_are_spread_over_the_file_not_picked(tmp_path):
    samples = [answer(step, row, 1.0) for step in (0, 3) for row in range(100)]
    page = report(write(tmp_path, [update(1, 0.1)], samples))
    assert "24 of 100 prompts, evenly spaced through the file: not picked by score." in page.text
    shown = [int(row) for row in re.findall(r"answer (\d+) at 3", page.text)]
    assert len(shown) == 24 and shown[0] == 0 and shown[-1] == 99
    assert all(4 <= b - a <= 5 for a, b in pairwise(shown))


def test_the_share_that_a_judge_gave_no_score_has_a_curve_of_its_own_beside_the_judge_s(tmp_path):
    scores = {f"rewards/judge_{i}": 1.0 for i in range(curves.MAX_COMPONENTS - 1)}
    metrics = [update(i, 0.1 * i) | scores | {"rewards/brevity/missing": 0.25} for i in range(1, 4)]
    metrics.append(evaluation(3, 1.0) | {"eval_rewards/brevity/missing": 0.5})
    figures = {figure.title: figure for figure in dict(curves.groups(read_run(write(tmp_path, metrics))))["Rewards"]}
    share = figures["brevity/missing"]
    assert list(figures)[:2] == ["brevity", "brevity/missing"] and f"judge_{curves.MAX_COMPONENTS - 2}" in figures
    assert share.caption == "share of answers without a score from this judge" and share.latest == "50 % held-out"
