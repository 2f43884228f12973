"""Keys that every stage has: what its data is read from, and how conversations become text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from tether.config.base import Section

Sources = str | Annotated[list[str], Field(min_length=1)]
"""One dataset, or several that are joined."""


def sources(given: Sources) -> list[str]:
    """The datasets that a key names."""
    return [given] if isinstance(given, str) else given


class ChatKeys(Section):
    """How conversations become text."""

    chat_template: str = "auto"
    """``auto``: the tokenizer's own template; if it has one, plain text becomes a user turn. ``none``: text is passed
    through unchanged. For models without a template: the name of a built-in one (alpaca, chatml, gemma, llama2, llama3,
    mistral, phi3, qwen, vicuna, zephyr) or a file that ends in .jinja; it is saved with the tokenizer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template: ``{enable_thinking: false}`` for Qwen3."""
    system_prompt: str | None = None
    """System message for prompts that have none of their own; needs a chat template. Must be the same in every
    stage."""

    @property
    def chat(self) -> dict[str, Any]:
        """These keys, as the functions that read data take them."""
        return {name: getattr(self, name) for name in ChatKeys.model_fields}


class DataKeys(ChatKeys):
    """Where the data comes from, and how its conversations become text."""

    dataset_dir: str | None = None
    """Folder with LLaMA-Factory's ``dataset_info.json``. All sources are then names of its entries, which also define
    their splits."""
    max_samples: PositiveInt | None = None
    """Maximum number of rows to use from each source, counted from the first."""

    @property
    def origin(self) -> dict[str, Any]:
        """Where data is from, as the functions that read it take it."""
        return {"dataset_dir": self.dataset_dir, "max_samples": self.max_samples}
