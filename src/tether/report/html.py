"""A run as one self-contained HTML file: readable without network, other files or scripts."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tether import __version__
from tether.config.keys import counted
from tether.config.secrets import without_keys
from tether.config.text import TextError, dump, parse
from tether.errors import DataError
from tether.report import curves, health, stage
from tether.report.limits import STRETCH
from tether.report.markup import Html, element, join
from tether.report.read import CONFIG, METRICS, SAMPLES, STAGES, Run, Sample, read_run
from tether.report.style import CSS, SCRIPT
from tether.report.summary import Pair, Tile, Verdict, pairs, tiles, verdict
from tether.report.svg import MAX_POINTS
from tether.report.text import amount, number, one_line, signed

REPORT = "report.html"
MAX_PAIRS, OPEN_PAIRS = 24, 6
MAX_TRAINING_STEPS, SAMPLES_A_STEP = 8, 2
CONFIG_LIMIT = 60_000
"""Maximum number of characters of the configuration shown."""
MAX_METRICS, MAX_REWARDS, MAX_NOTES = 120, 12, 12
HEAD, TEXT = 480, 2_400
"""Maximum number of characters of a text shown at once, and in total."""
QUESTIONS = {
    "ppo": "Did the policy get better?",
    None: "Did the policy get better?",
    "sft": "Did the model learn from the demonstrations?",
    "reward": "Does the model rank answers as the pairs do?",
}
"""The question that the page answers, by kind of run."""
WORDS = {"ok": "✓ ok", "warn": "▲ warn", "act": "■ act", "info": "– info"}


def write_report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` into the folder of a run; returns its path.

    Reads config.yaml, metrics.jsonl and samples.jsonl. Each may be missing, torn, or from a run that was interrupted or
    is still running: the page then states what is missing. An earlier report is replaced atomically.

    Raises:
        DataError: ``run_dir`` is not a folder, or holds none of the three files.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder; give the output_dir of a run")
    if not _holds_run(folder):
        runs = sorted(path for path in folder.iterdir() if path.is_dir() and _holds_run(path))
        hint = f"give {runs[0]}, which does" if runs else "give the output_dir of a run"
        raise DataError(f"{folder} holds none of {CONFIG}, {METRICS} and {SAMPLES}; {hint}")
    text = page(read_run(folder))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{REPORT}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / REPORT)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder / REPORT


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, SAMPLES))


def page(run: Run) -> str:
    """The complete report of a run."""
    name = _name(run)
    findings = health.diagnose(run)
    if run.kind in STAGES:
        result, shown, answers = stage.verdict(run), stage.tiles(run), []
    else:
        compared = pairs(run)
        result, shown = verdict(run, compared), tiles(run, compared)
        answers = [_comparison(run, compared), _training_samples(run)]
    body = element(
        "main",
        _headline(run, name, result, shown, findings),
        _curves(run),
        _health(run, findings),
        *answers,
        _all_metrics(run),
        _config(run),
        element("footer", f"Written by Tether {__version__} from the files of this run."),
    )
    return "<!DOCTYPE html>\n" + element(
        "html", _head(f"Tether report: {name}"), element("body", body, element("script", Html(SCRIPT))), lang="en"
    )


def _head(title: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=Html(policy)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(CSS)),
    )


# Headline


def _name(run: Run) -> str:
    name = run.setting("train.run_name")
    return one_line(name if isinstance(name, str) and name.strip() else run.folder.resolve().name, 80) or "run"


def _headline(run: Run, name: str, result: Verdict, shown: list[Tile], findings: list[health.Finding]) -> Html:
    answer = element("b", result.answer, class_=result.level)
    return join(
        element("h1", element("bdi", name)),
        element("p", _setup(run), class_="setup"),
        element("p", f"{QUESTIONS[run.kind]} ", answer, " ", result.sentence, class_="verdict"),
        element("p", result.detail, class_="lead") if result.detail else None,
        element("dl", *(_tile(tile) for tile in shown), class_="tiles"),
        _status(findings),
        _notes(run),
    )


def _tile(tile: Tile) -> Html:
    detail = element("dd", tile.detail, class_="detail")
    return element("div", element("dt", tile.label), element("dd", tile.value), detail, class_="tile")


def _setup(run: Run) -> str:
    """A line on what was trained."""
    if not run.config:
        return "settings unknown"
    rewards = run.setting("rewards")
    named = [r for r in rewards if isinstance(r, dict)] if isinstance(rewards, list) else []
    judges = [str(r.get("name") or r.get("path") or r.get("type")) for r in named]
    facts = [
        run.setting("model.path") and f"{run.setting('model.path')}",
        "all weights" if run.setting("model.lora") is None else "LoRA",
        judges and f"judged by {', '.join(judges)}",
        (beta := run.count("ppo.kl_coef")) is not None and f"kl_coef {number(beta)}",
        (batch := run.count("train.rollout_batch_size")) is not None and f"{amount(batch, 'answer')} per update",
        run.kind in STAGES and stage.data_sources(run),
        (rows := run.count("train.batch_size")) is not None and f"{amount(rows, 'row')} per step",
    ]
    return one_line(" · ".join(fact for fact in facts if fact), 300)


def _status(findings: list[health.Finding]) -> Html | None:
    counts = Counter(f.level for f in findings)
    if not findings:
        return None
    names = {"act": "to act on", "warn": "to watch", "ok": "ok"}
    words = ", ".join(f"{counts[level]} {name}" for level, name in names.items() if counts[level])
    status = element("p", element("a", f"Health: {words or 'too early to judge'}", href="#health"), class_="status")
    first = findings[0]  # they come in order of urgency
    if first.level not in ("act", "warn"):
        return status
    level = element("span", WORDS[first.level], class_=f"level {first.level}")
    return join(status, element("p", level, f" {first.sentence} {first.advice}", class_="first"))


def _notes(run: Run) -> Html | None:
    notes = run.notes[:MAX_NOTES]
    return element("ul", *(element("li", note) for note in notes), class_="notes") if notes else None


# Curves and health


def _curves(run: Run) -> Html:
    groups = curves.groups(run)
    if not groups:
        return join(element("h2", "Curves"), element("p", "No metrics to draw.", class_="lead"))
    parts = [element("h2", "Curves")]
    if (count := len(run.updates)) > MAX_POINTS:
        size = number(round(count / MAX_POINTS, 1))
        note = f"Each point is the mean of about {size} neighboring {run.unit}s, the faint band their range."
        parts.append(element("p", note, class_="lead"))
    for title, figures in groups:
        parts += [element("h3", title), element("div", *(_figure(f) for f in figures), class_="charts")]
    return join(*parts)


def _figure(figure: curves.Figure) -> Html:
    legend = [element("span", element("i", class_=f"c{color}"), label) for label, color in figure.legend]
    return element(
        "figure",
        element("div", element("b", figure.title), element("span", figure.latest), class_="top"),
        element("p", figure.caption, class_="caption"),
        element("div", *legend, class_="legend"),
        figure.chart,
        element("output"),
    )


def _health(run: Run, findings: list[health.Finding]) -> Html:
    title = element("h2", "Health", id="health")
    if not findings:
        return join(title, element("p", "No metrics to judge.", class_="lead"))
    lead = (
        f"Unless stated otherwise, stretches of {STRETCH} updates are judged, not single ones. ok: nothing to do, also "
        "between the healthy range and the value from which to watch."
    )
    return join(
        title,
        element("p", lead, class_="lead") if run.kind not in STAGES else None,
        element("ul", *(_finding(f) for f in findings), class_="findings"),
    )


def _finding(finding: health.Finding) -> Html:
    advice = element("p", element("b", "What to do: "), finding.advice, class_="advice") if finding.advice else None
    text = element("p", finding.sentence, " ", element("code", finding.metric, class_="metric"))
    level = element("span", WORDS[finding.level], class_=f"level {finding.level}")
    return element("li", level, element("div", text, advice))


# Answers


def _comparison(run: Run, compared: list[Pair]) -> Html:
    title = element("h2", "Held-out answers, before and after")
    if not compared:
        return join(title, element("p", "No answers to held-out prompts in samples.jsonl.", class_="lead"))
    shown = _spaced(compared, MAX_PAIRS)
    lead = f"{len(shown)} of {counted(len(compared), 'prompt')}, evenly spaced through the file: not picked by score."
    if compared[0].after is None:
        lead += " Only one evaluation was finished." if run.kept_step is None else " The start policy was kept."
    cards = [_pair(pair) for pair in shown]
    return join(title, element("p", lead, class_="lead"), *_folded(cards, OPEN_PAIRS))


def _pair(pair: Pair) -> Html:
    sides = [_side(pair.before, _policy(pair.before.step))]
    if pair.after is not None:
        sides.append(_side(pair.after, _policy(pair.after.step), before=pair.before))
    return _card(f"Prompt {pair.before.row}", pair.before.prompt, sides)


def _card(head: str, prompt: str, sides: list[Html]) -> Html:
    """A prompt with one or two answers under it."""
    top = element("div", element("p", head, class_="who"), _text(prompt), class_="prompt")
    return element("article", top, element("div", *sides, class_="sides"), class_="pair")


def _side(sample: Sample, who: str, before: Sample | None = None) -> Html:
    return element(
        "div",
        element("p", who, class_="who"),
        _text(sample.response, left_out=sample.cut),
        _facts(sample, before),
        class_="side",
    )


def _facts(sample: Sample, before: Sample | None) -> Html:
    """Score, change in score, reward components, length and ending of an answer."""
    change = None
    if before is not None and sample.score is not None and before.score is not None:
        gain = sample.score - before.score
        change = element("b", f" {signed(gain)}", class_="up" if gain > 0 else "down" if gain < 0 else None)
    ending = {"stop": "ended by itself", "length": "cut at the limit"}.get(sample.finish_reason)
    parts = [element("span", "score ", element("b", number(sample.score)), change)]
    parts += [
        element("span", element("bdi", one_line(name, 40)), f" {number(value)}")
        for name, value in list(sample.rewards.items())[:MAX_REWARDS]
    ]
    parts += [element("span", f"KL {number(sample.kl)}")] if sample.kl is not None else []
    parts += [element("span", amount(sample.length, "token") + (f", {ending}" if ending else ""))]
    return element("div", *parts, class_="facts")


def _policy(step: int) -> str:
    return "Start policy" if step == 0 else f"After update {step:,}"


def _text(text: str, *, left_out: int = 0) -> Html:
    """Text of unknown origin; long text is folded, huge text is cut and the rest counted."""
    if not text.strip():
        return element("p", "(empty)" if not text else "(white space only)", class_="text empty")
    head, tail = text[:HEAD], text[HEAD:TEXT]
    missing = len(text) - len(head) - len(tail) + left_out
    if not tail and not missing:
        return element("p", head, class_="text", dir="auto")
    end = f" … and {counted(missing, 'more character')} in {SAMPLES}" if missing else ""
    return join(
        element("p", head, "…", class_="text", dir="auto"),
        element("details", element("summary", "read on"), element("p", tail, end, class_="text", dir="auto")),
    )


def _training_samples(run: Run) -> Html | None:
    by_step: dict[int, list[Sample]] = {}
    for sample in run.samples:
        if sample.split == "train":
            by_step.setdefault(sample.step, []).append(sample)
    if not by_step:
        return None
    cards = [
        _card(f"Update {step:,}", sample.prompt, [_side(sample, "Answer")])
        for step in _spaced(sorted(by_step), MAX_TRAINING_STEPS)
        for sample in by_step[step][:SAMPLES_A_STEP]
    ]
    shown = counted(min(len(by_step), MAX_TRAINING_STEPS), "update")
    return join(
        element("h2", "Training answers over time"),
        element("p", f"The first answers of the batch at {shown}, evenly spaced over the run.", class_="lead"),
        *_folded(cards, SAMPLES_A_STEP),
    )


# Numbers and settings


def _all_metrics(run: Run) -> Html | None:
    names = [name for name in run.names() if run.series(name)]
    if not names:
        return None
    rows = []
    for name in names[:MAX_METRICS]:
        values = run.series(name).finite
        cells = (values[0], values[-1], min(values), max(values))
        head = element("td", element("code", one_line(name, 60)))
        rows.append(element("tr", head, *(element("td", number(v)) for v in cells)))
    heads = element("tr", *(element("th", text) for text in ("metric", "first", "last", "lowest", "highest")))
    table = element("div", element("table", element("thead", heads), element("tbody", *rows)), class_="wide")
    return join(
        element("h2", "Numbers and settings"),
        element("details", element("summary", f"All {len(names)} metrics of the {run.unit}s"), table, class_="block"),
    )


def _config(run: Run) -> Html | None:
    if run.config_text is None:
        return None
    text = _without_keys(run.config_text)
    if text is None:
        return element("p", f"{CONFIG} cannot be read, so it is not shown: it may contain API keys.", class_="lead")
    shown = element("pre", text[:CONFIG_LIMIT] + ("\n…" if len(text) > CONFIG_LIMIT else ""))
    return element("details", element("summary", f"{CONFIG}, as resolved"), shown, class_="block")


def _without_keys(content: str) -> str | None:
    """A configuration without anything that may hold a key; None if that cannot be determined."""
    try:
        config = parse(content).data
        return dump(without_keys(config)) if isinstance(config, dict) else None
    except (TextError, ValueError):  # a malformed URL
        return None


def _folded(cards: list[Html], count: int) -> list[Html]:
    """The first cards, and the others folded behind one line."""
    rest = cards[count:]
    more = [element("details", element("summary", f"{len(rest)} more"), *rest, class_="block")] if rest else []
    return cards[:count] + more


def _spaced(items: Sequence, limit: int) -> list:
    """At most ``limit`` of the items, evenly spaced, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    return [items[i * (len(items) - 1) // (limit - 1)] for i in range(limit)]
