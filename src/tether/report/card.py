"""The model card, README.md of every saved folder: what it holds, what it was trained on, and the result.

It is made from the run's files. Text from datasets and models is escaped; parts of URLs that may be a key are removed.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData

from tether.config.keys import counted
from tether.config.secrets import address_without_keys, without_keys
from tether.report.read import FINISHED, Run, read_run, read_settings
from tether.report.summary import kept, kl_spent, pairs, verdict
from tether.report.text import amount, number, one_line

CARD = "README.md"
ROWS, SAMPLES, SHOWN = 6, 3, 200
PACKAGES = ("tether", "torch", "transformers", "peft", "trl")
CURVES = {
    "objective/scores": "score", "objective/kl": "KL", "rollout/length": "length", "rollout/eos_rate": "ended",
    "loss": "loss", "accuracy": "accuracy", "mean_token_accuracy": "token accuracy",
}  # fmt: skip
"""Metrics in the table of curves, with their headings."""
JUDGES = ("reward", "critic")
ANSWERS = "## Answers"
"""Heading of the section of answers to held-out prompts."""

Kind = Literal["ppo", "sft", "reward", "critic"]


def write_card(
    folder: Path,
    run: Path,
    *,
    role: Literal["critic"] | None = None,
    evaluation: Mapping[str, float] = MappingProxyType({}),
    step: int | None = None,
    command: str | None = None,
) -> None:
    """Writes the card of a saved model; a run without config.yaml gets none.

    Args:
        folder: folder of the saved model.
        run: the run's output folder.
        role: what was saved, if not the run's model.
        evaluation: metrics on held-out data, for a stage before PPO.
        step: for a checkpoint, the number of updates before it; its card is short.
        command: what made it, if not a command of Tether.
    """
    end = folder if (folder / FINISHED).is_file() else run
    read = read_run(run, end=end) if step is None else read_settings(run)
    kind = role or read.kind
    if kind is not None:
        text = card(read, kind, adapter=_adapter(folder), evaluation=evaluation, step=step, command=command)
        (folder / CARD).write_text(text, encoding="utf-8")


def without_answers(text: str) -> str:
    """A card without its section of answers, whose prompts are from the run's held-out data."""
    return re.sub(rf"^{ANSWERS}\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)


def card(
    run: Run,
    kind: Kind,
    *,
    adapter: Mapping[str, Any] | None,
    evaluation: Mapping[str, float] = MappingProxyType({}),
    step: int | None = None,
    command: str | None = None,
) -> str:
    """The text of a card.

    Args:
        adapter: settings of the saved PEFT adapter; None for a full model.
        evaluation, step, command: as in ``write_card``.
    """
    base = adapter.get("base_model_name_or_path") if adapter else run.setting("model.path")
    base = base if isinstance(base, str) else None
    parts = [_title(run, kind, step), _summary(kind, base, adapter, step=step)]
    if step is None and kind != "critic":
        parts += [_result(run, kind, evaluation), _curves(run), _answers(run)]
    parts += [_use(kind, base, is_adapter=adapter is not None), _data(run, kind)]
    if step is None:
        parts += [_command(run, kind, command), _versions()]
    return f"---\n{_metadata(run, kind, base, adapter).to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def _adapter(folder: Path) -> dict[str, Any] | None:
    file = folder / "adapter_config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _metadata(run: Run, kind: Kind, base: str | None, adapter: Mapping[str, Any] | None) -> ModelCardData:
    """The metadata that the hub reads. Naming a license is up to the user."""
    named = [source for source in _sources(run, kind) if _is_hub_id(source)]
    return ModelCardData(
        base_model=base if base and _is_hub_id(base) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if kind in JUDGES else "text-generation",
        datasets=named if named and run.setting("data.dataset_dir") in (None, "ONLINE") else None,
        tags=["tether", {"ppo": "ppo", "sft": "sft", "reward": "reward-model", "critic": "critic"}[kind]]
        + ([] if adapter is None else [_method(adapter).lower()])
        + (["rlhf"] if kind == "ppo" else []),
    )


def _method(adapter: Mapping[str, Any]) -> str:
    """PEFT's name of an adapter's type: LoRA, IA3, LoHa."""
    name = re.sub(r"\W", "", str(adapter.get("peft_type") or "PEFT"))
    return {"LORA": "LoRA", "LOHA": "LoHa", "LOKR": "LoKr", "ADALORA": "AdaLoRA"}.get(name, name)


def _is_hub_id(path: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not Path(path).exists()


def _title(run: Run, kind: Kind, step: int | None) -> str:
    name = _escaped(run.folder.absolute().name, 80)
    what = {"ppo": "", "sft": "", "reward": "", "critic": ": critic"}[kind]
    return f"# {name}{what}" + (f", after {counted(step, 'update')}" if step is not None else "")


def _summary(kind: Kind, base: str | None, adapter: Mapping[str, Any] | None, *, step: int | None) -> str:
    """What this is, in a sentence or two."""
    origin = f"`{_path(base)}`" if base else "a local model"
    method = "" if adapter is None else _method(adapter)
    form = f"{'An' if method[0] in 'AEIO' else 'A'} {method} adapter of" if method else "Made from"
    by = {
        "ppo": "PPO against the rewards below",
        "sft": "supervised fine-tuning",
        "reward": "preference pairs, as a judge",
        "critic": "PPO, as the critic of its policy: it gives the value of a text, and can start another critic",
    }[kind]
    text = f"{form} {origin}, trained by {by}, with Tether."
    if step is not None:
        text += " This is a checkpoint: `tether_state` holds what the run needs to resume from here."
    return text


def _result(run: Run, kind: Kind, evaluation: Mapping[str, float]) -> str:
    """The result."""
    if kind == "ppo":
        found = verdict(run, pairs(run))
        kl = kl_spent(run)
        shown = f"{found.answer} {found.sentence} {found.detail}".strip()
        return f"## Result\n\nIs it better, by its judge? {_escaped(shown, 600)}" + (
            f" KL to the start: {amount(kl, 'nat')} per answer." if kl is not None else ""
        )
    rows = [[_escaped(name, 60), number(value)] for name, value in evaluation.items()]
    table = _table("## Result", ["held out", "value"], rows) if rows else ""
    return "\n\n".join(filter(None, (table, _escaped(kept(run), 600) if kept(run) else "")))


def _curves(run: Run) -> str:
    """A few rows of the metrics, evenly spaced, including the first and the last."""
    steps = sorted(run.updates)
    if not steps:
        return ""
    count = min(ROWS, len(steps))
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    names = [name for name in CURVES if any(name in run.updates[step] for step in chosen)]
    header = ["step", *(CURVES[name] for name in names)]
    rows = [[str(step), *(number(run.updates[step].get(name)) for name in names)] for step in chosen]
    return _table("## Curves", header, rows)


def _answers(run: Run) -> str:
    """A few answers to held-out prompts, before and after."""
    compared = [pair for pair in pairs(run) if pair.after is not None][:SAMPLES]
    texts = [(pair.before.prompt, pair.before.response, pair.after.response) for pair in compared]
    rows = [[_escaped(text, SHOWN) for text in row] for row in texts]
    return _table(ANSWERS, ["prompt", "before", "after"], rows) if rows else ""


def _use(kind: Kind, base: str | None, *, is_adapter: bool) -> str:
    auto = "SequenceClassification" if kind in JUDGES else "CausalLM"
    labels = ", num_labels=1" if auto != "CausalLM" else ""
    if is_adapter:
        lines = [
            "from peft import PeftModel",
            f"from transformers import AutoModelFor{auto}, AutoTokenizer",
            "",
            f'base = AutoModelFor{auto}.from_pretrained("{_path(base) if base else "BASE"}"{labels})',
            "model = PeftModel.from_pretrained(base, PATH)",
        ]
    else:
        lines = [
            f"from transformers import AutoModelFor{auto}, AutoTokenizer",
            "",
            f"model = AutoModelFor{auto}.from_pretrained(PATH)",
        ]
    return "\n".join(["## Use", "", "```python", *lines, "tokenizer = AutoTokenizer.from_pretrained(PATH)", "```"])


def _data(run: Run, kind: Kind) -> str:
    """Data, rewards and KL."""
    data = ", ".join(f"`{_path(source)}`" for source in _sources(run, kind))
    lines = ["## Training", "", f"- data: {data or 'none'}"]
    if kind in ("ppo", "critic"):
        lines += [f"- reward: {line}" for line in _rewards(run.setting("rewards"))]
        coef, estimator, where = (run.setting(f"ppo.{key}") for key in ("kl_coef", "kl_estimator", "kl_in"))
        lines.append(f"- KL: coefficient {coef}, {estimator} in the {where}")
    return "\n".join(lines)


def _sources(run: Run, kind: Kind) -> list[str]:
    key = {"ppo": "prompts", "critic": "prompts", "reward": "pairs", "sft": "demonstrations"}[kind]
    value = run.setting(f"data.{key}")
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]


def _rewards(sources: Any) -> Iterator[str]:
    """One line per reward source."""
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, dict):
            place = next((source[key] for key in ("path", "url", "base_url") if source.get(key)), None)
            inner = "; ".join(_rewards(source.get("members")))
            text = f"{source.get('name') or source.get('type')}, of type {source.get('type')}"
            text += f", `{_path(str(place))}`" if place else ""
            yield text + f", weight {source.get('weight', 1.0):g}" + (f" ({inner})" if inner else "")


def _command(run: Run, kind: Kind, given: str | None) -> str:
    """The command that made it."""
    stage = {"ppo": "ppo", "critic": "ppo", "reward": "reward", "sft": "sft"}[kind]
    command = given or f"tether {stage} config.yaml"
    text = yaml.safe_dump(without_keys(run.config), sort_keys=False, allow_unicode=True, width=100)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"## Command\n\n`{command}` with\n\n{fence}yaml\n{text}{fence}"


def _versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"## Versions\n\n{', '.join(found)}"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([title, "", *lines])


def _path(path: str) -> str:
    """A path or URL, safe between backticks."""
    text = address_without_keys(path) if "://" in path else path
    return one_line(text, 200).replace("`", "'").replace("|", "\\|")


def _escaped(text: str, limit: int) -> str:
    """Text of unknown origin on one line of Markdown, without any markup effect."""
    plain = re.sub(r"([\\`*_{}\[\]#|!~$])", r"\\\1", html.escape(one_line(text, limit), quote=False))
    for sign, entity in (("://", ":&#47;&#47;"), ("www.", "www&#46;"), ("@", "&#64;")):  # nothing becomes a link
        plain = plain.replace(sign, entity)
    return plain or "–"
