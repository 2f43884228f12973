"""Help of the commands that read a configuration: every key, from the strings under the fields."""

from __future__ import annotations

import textwrap

from tether.config.base import Section
from tether.config.keys import KeyDoc, describe

_WIDTH = 80
_HEAD = """\
usage: tether {command} FILE.yaml [--KEY=VALUE …]

{does}

Every key below can be set in the file, nested at its dots, and on the command
line, which takes precedence: --train.seed=7, or --rewards.0.path=DIR for the
first of a list. Values are YAML. Relative paths start at the current folder.
{options}  --debug      full traceback on failure
"""
_SHORTCUTS = {
    "resume": "  --resume     short for --resume=true; --resume=DIR names the checkpoint,\n"
    "               --resume=auto starts a new run if there is none to resume, and\n"
    "               leaves a finished run as it is\n",
    "overwrite_output_dir": "  --overwrite  short for --overwrite_output_dir=true\n",
}


def config_help(command: str, does: str, section: type[Section], options: str | None = None) -> str:
    """What ``tether COMMAND --help`` prints, at most 80 columns wide: usage, then every key with type, default and
    meaning.

    Args:
        does: what the command does, a sentence.
        options: lines about the command's own options; None for those of commands that train.
    """
    if options is None:
        options = "".join(line for key, line in _SHORTCUTS.items() if key in section.model_fields)
    parts = [_HEAD.format(command=command, does=textwrap.fill(does, _WIDTH), options=options)]
    group = ""
    for doc in describe(section):
        if doc.group != group:
            group = doc.group
            parts.append(f"\n{textwrap.fill(group.replace('``', '`'), _WIDTH)}\n")
        parts.append(_entry(doc))
    return "".join(parts)


def _entry(doc: KeyDoc) -> str:
    default = "required" if doc.default == "required" else f"default {doc.default}"
    head = textwrap.fill(f"--{doc.key}  {doc.type}; {default}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    body = textwrap.fill(doc.help.replace("``", "`"), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"{head}\n{body}\n"
