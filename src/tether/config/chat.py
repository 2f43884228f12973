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
    """``auto``: the tokenizer's own; text for a tokenizer that has one becomes a user turn. ``none``: text is taken as
    it is. Else a template for models without one, which is saved with the tokenizer: alpaca, chatml, gemma, llama2,
    llama3, mistral, phi3, qwen, vicuna, zephyr, or a file that ends in .jinja."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template: ``{enable_thinking: false}`` for Qwen3."""
    system_prompt: str | None = None
    """System message put before prompts that bring none; needs a chat template. The same in every stage."""
    special_tokens: bool = False
    """Special tokens that are typed into the content of a message (``<|im_end|>``) are control tokens. Left off they
    are the characters that they are written with, so that no prompt can end its turn. Text that goes through no chat
    template is taken as it is. The same in every stage."""

    @property
    def chat(self) -> dict[str, Any]:
        """These keys, as the functions that read data take them."""
        return {name: getattr(self, name) for name in ChatKeys.model_fields}


class DataKeys(ChatKeys):
    """Where data is from, and how its conversations become text."""

    dataset_dir: str | None = None
    """Folder of a LLaMA-Factory ``dataset_info.json``. All sources are then names of its entries, and their splits are
    what the entries say."""
    max_samples: PositiveInt | None = None
    """Rows of each source that are used at most, the first ones."""

    @property
    def origin(self) -> dict[str, Any]:
        """Where data is from, as the functions that read it take it."""
        return {"dataset_dir": self.dataset_dir, "max_samples": self.max_samples}
