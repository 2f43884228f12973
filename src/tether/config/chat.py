"""Keys that every stage has: what its data is read from, and how conversations become text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PositiveInt, TypeAdapter, ValidationError, model_validator

from tether.config.base import Section
from tether.config.keys import shown
from tether.errors import ConfigError

Sources = str | Annotated[list[str], Field(min_length=1)]
"""One dataset, or several that are joined."""


COLUMNS = ("prompt", "messages", "completion", "text", "chosen", "rejected", "system", "tools", "chat_template_kwargs")
"""Columns that are read here by their names."""


COLUMNS_OPTION = "--columns"
"""The option of commands for the names of columns."""


def _known(columns: dict[str, str]) -> dict[str, str]:
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ValueError(f"{unknown[0]} is not a column that is read here; wanted {', '.join(COLUMNS)}")
    return columns


Columns = Annotated[dict[str, str], AfterValidator(_known)]
"""Our names of columns, each with the one that a source has for it."""


def check_columns(columns: Any) -> None:
    """Raises ``ConfigError`` unless ``columns`` maps names of ours to names of columns; None leaves them out."""
    try:
        TypeAdapter(Columns | None).validate_python(columns, strict=True)
    except ValidationError as error:
        raise ConfigError(
            f"{COLUMNS_OPTION}: got {shown(columns)}, wanted names of columns by ours ({', '.join(COLUMNS)}), as in "
            "{prompt: question}"
        ) from error


@dataclass(frozen=True)
class DataSource:
    """What is read under a key: one dataset, or several that are joined."""

    given: Sources
    """The value that the user wrote: .jsonl, .json, .csv or .parquet files, folders, or hub ids."""
    key: str
    """The configuration key or the option that it was written under, for messages."""
    split: str = "train"
    """Split to read if a dataset has several, or parts of splits."""
    subset: str | None = None
    """Subset to read if a dataset has several."""
    revision: str | None = None
    """Branch, tag or commit of hub datasets."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The datasets' column names by ours, where they differ; they take precedence over a column with our name."""
    columns_key: str | None = None
    """The configuration key or the option that names columns of this dataset, for messages; None if there is none."""
    has_columns_of_run: bool = False
    """Whether ``columns`` name those of a run's own data, while the dataset is named on the command line: it may lack
    them, and a column with our name takes precedence."""
    dataset_dir: str | None = None
    """Folder of a ``dataset_info.json``, whose entries ``given`` then names; they say split, subset and columns."""
    max_samples: int | None = None
    """Maximum number of rows to read from each dataset."""
    drop_bad_rows: bool = False
    """Whether rows that cannot be used are left out and counted instead of being an error."""

    @property
    def datasets(self) -> list[str]:
        """The datasets, in order."""
        return [self.given] if isinstance(self.given, str) else self.given


def _moment(value: str) -> str:
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is not None:
        raise ValueError("wanted a date, as in 2026-11-30, or a date and a time, as in 2026-11-30T08:00:00")
    return moment.isoformat(timespec="seconds")


Moment = Annotated[str, AfterValidator(_moment)]
"""A date and a time without a time zone, in ISO form."""


class ChatKeys(Section):
    """How conversations become text."""

    chat_template: str = "auto"
    """``auto``: the tokenizer's own template; if it has one, plain text becomes a user turn. ``none``: text is passed
    through unchanged. For models without a template: the name of a built-in one (alpaca, chatml, gemma, llama2, llama3,
    mistral, phi3, qwen, vicuna, zephyr) or a file that ends in .jinja; it is saved with the tokenizer. For models that
    were trained in LLaMA-Factory, ``llamafactory/NAME`` writes what its template of that name writes: alpaca, default,
    empty, fewshot, llama2, vicuna, zephyr."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template: ``{enable_thinking: false}`` for Qwen3."""
    chat_template_now: Moment | None = None
    """Date, or date and time, that chat templates print in place of the present one (``strftime_now``), those of
    reward models too: ``2026-11-30``. Default: when the run started, also after it is resumed."""
    system_prompt: str | None = None
    """System message for prompts that have none of their own, in their conversation or in a column ``system``; needs a
    chat template. Must be the same in every stage."""
    special_tokens: bool = False
    """Treat special tokens typed into the content of a message (``<|im_end|>``) as control tokens. If false, they are
    plain characters, so that no message can end its own turn; an end token that an answer of a dataset ends with is the
    one that closes it. Text that goes through no chat template is passed through unchanged. Must be the same in every
    stage."""

    @property
    def chat(self) -> dict[str, Any]:
        """These keys, as arguments of ``QueryFormat``."""
        return {name: getattr(self, name) for name in ChatKeys.model_fields}


class DataKeys(ChatKeys):
    """Where the data comes from, and how its conversations become text."""

    dataset_dir: str | None = None
    """Folder with LLaMA-Factory's ``dataset_info.json``. All sources are then names of its entries, which also define
    their splits, subsets and columns. ``ONLINE``: all sources are hub ids of datasets in alpaca format, with columns
    ``instruction``, ``input`` and ``output``."""
    max_samples: PositiveInt | None = None
    """Maximum number of rows to read from each source, counted from the first."""
    drop_bad_rows: bool = False
    """Leave out rows that cannot be used (no prompt, an unfinished conversation, a message that is not text, a value
    that a reward cannot compare with, …) and count them, in the log and in the first lines of the run. If false, one
    such row refuses its dataset, and the message names the first five. A file that cannot be parsed, or lacks a column,
    is always refused."""
    columns: Columns = Field(default_factory=dict)
    """Names of columns that the sources call something else: ``{prompt: question}`` reads the column ``question`` as
    the prompt, also where the source has another column ``prompt``, which is then not read. A source without
    ``question`` keeps its own ``prompt``; one with neither is an error."""

    def source(self, name: str) -> DataSource:
        """What is read under the key ``name``."""
        prefix = _prefix(name)
        return DataSource(
            getattr(self, name),
            key=f"data.{name}",
            split=getattr(self, f"{prefix}split"),
            subset=getattr(self, f"{prefix}subset"),
            revision=getattr(self, f"{prefix}revision"),
            columns=self.ptx_columns if prefix == "ptx_" else self.columns,
            columns_key=f"data.{'ptx_' if prefix == 'ptx_' else ''}columns",
            dataset_dir=self.dataset_dir,
            max_samples=self.max_samples,
            drop_bad_rows=self.drop_bad_rows,
        )

    @model_validator(mode="after")
    def _entries_say_it_themselves(self) -> DataKeys:
        if self.dataset_dir is not None:
            for name in type(self).model_fields:
                if name.endswith(("subset", "revision", "columns")) and (value := getattr(self, name)):
                    raise ValueError(
                        f"{name} ({value}) applies only to sources that dataset_dir ({self.dataset_dir}) does not "
                        "describe: set it in the entries of dataset_info.json"
                    )
        return self


ConfigT = TypeVar("ConfigT", bound=Section)


def with_now(config: ConfigT, now: str | None) -> ConfigT:
    """The configuration of a command with ``data.chat_template_now`` filled in, if it was left out."""
    if config.data.chat_template_now is not None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template_now": now})})


def present() -> str:
    """The present date and time, as ``chat_template_now`` has them."""
    return datetime.now().isoformat(timespec="seconds")


def part_key(key: str, part: str) -> str | None:
    """The key that names the ``part`` (``subset``, …) of the dataset under ``key``, or the option if that is an option;
    None for an entry of a ``dataset_info.json``, which names its own."""
    section, _, name = key.rpartition(".")
    if ":" in key:
        return None
    return f"{section}.{_prefix(name)}{part}" if section else f"--{part}"


def _prefix(name: str) -> str:
    """Beginning of the keys that belong to the dataset under the key ``name``."""
    return next((prefix for prefix in ("eval_", "ptx_") if f"{name}_".startswith(prefix)), "")
