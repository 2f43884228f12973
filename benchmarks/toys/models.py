"""A policy as a table behind the interface of a Hugging Face model. Plain transformers, so that any trainer can use it.

The trunk's hidden state holds what was read: (prompt, text, whether it ended). Heads use it to look up a row of logits
or a value, so that no network's limits stand between a trainer and the optimum.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from benchmarks.toys.language import Language


class Reader(PreTrainedModel):
    """A trunk with nothing to train: its hidden state, of size 3, is what the language reads up to each column."""

    config_class = PreTrainedConfig

    def __init__(self, language: Language) -> None:
        super().__init__(PreTrainedConfig(vocab_size=language.vocab_size))
        self.language = language
        self.tokens = nn.Embedding.from_pretrained(torch.arange(float(language.vocab_size)).unsqueeze(1))

    def get_input_embeddings(self) -> nn.Module:
        """Tokens as their ids."""
        return self.tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        """The reading, wherever padding is. A table has no use for positions and caches."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        reading = self.language.read(self.tokens(input_ids).squeeze(-1).long(), mask.bool())
        hidden = torch.stack(reading, dim=-1).to(self.tokens.weight.dtype)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))


class Rows(nn.Module):
    """A head with one row for each text of each prompt; texts beyond the table share the last row."""

    def __init__(self, table: Float[Tensor, "X texts width"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.float())

    def forward(self, hidden: Float[Tensor, "*columns 3"]) -> Float[Tensor, "*columns width"]:
        """The rows."""
        prompts, texts, _ = hidden.long().unbind(-1)
        return self.weight[prompts, texts.clamp(max=self.weight.shape[1] - 1)]


class TablePolicy(PreTrainedModel):
    """A causal language model that is a table of logits, one row per state. It starts as the language's reference."""

    config_class = PreTrainedConfig
    base_model_prefix = "reader"

    def __init__(self, language: Language) -> None:
        super().__init__(PreTrainedConfig(vocab_size=language.vocab_size))
        self.reader = Reader(language)
        self.rows = Rows(language.ref_logprobs)

    def get_output_embeddings(self) -> nn.Module:
        """The table."""
        return self.rows

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        """The logits after each column."""
        return CausalLMOutput(logits=self.rows(self.reader(input_ids, attention_mask).last_hidden_state))

    def logprobs(self) -> Float[Tensor, "X S V"]:
        """log π of each token in each state."""
        return self.rows.weight.detach().log_softmax(-1)
