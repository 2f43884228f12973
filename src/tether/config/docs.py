"""The page ``docs/config.md``: ``python -m tether.config.docs > docs/config.md``."""

from __future__ import annotations

from collections.abc import Iterator

from tether.config.base import Section
from tether.config.keys import KeyDoc, describe
from tether.config.pipeline import PipelineConfig
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.config.source import SourceConfig

_HEAD = """\
# Configuration

<!-- Written by `python -m tether.config.docs > docs/config.md` from the strings under the fields; edit those. -->

A run is configured by one YAML file. You can override any key on the command line: `--ppo.kl_coef=0.02`,
`--rewards.0.weight=2`. Relative paths are relative to the folder in which you start the command, not to the file.
Unknown keys, duplicate keys, and YAML's tags, anchors and aliases are errors. So is a key of `tether ppo` that would
have no effect beside the others, such as `ppo.kl_horizon` without `ppo.kl_target`; the message says what to set. From
files of other frameworks such keys are left out, and listed.

`N` in a key is a position in a list, counted from 0. A default of `null` means that the key is not set; if Tether then
derives a value, the description says which.
"""


def page() -> str:
    """The whole page as Markdown."""
    tables = [
        *_tables("`tether ppo`", RunConfig),
        *_tables("`tether sft`", SftStageConfig),
        *_tables("`tether reward`", RewardStageConfig),
        *_tables("`tether pipeline`", PipelineConfig, but=("model.", "data.")),
        *_tables("`tether score` and `tether serve-reward`", SourceConfig, but=("rewards.N.", "model.")),
    ]
    return "\n".join([_HEAD, *tables])


def _tables(title: str, section: type[Section], *, but: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys of a section.

    Args:
        but: beginnings of keys that an earlier section has.
    """
    yield f"## {title}"
    group = ""
    for doc in describe(section):
        if doc.key.startswith(but):
            continue
        if doc.group != group:
            group = doc.group
            yield f"\n### {group.replace('``', '`')}\n\n| key | takes | default | meaning |\n|---|---|---|---|"
        yield _row(doc)
    yield ""


def _row(doc: KeyDoc) -> str:
    cells = (f"`{doc.key}`", doc.type, f"`{doc.default}`", doc.help.replace("``", "`"))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
