"""Arguments of ``PPOTrainer`` that are neither models nor data: their types, and what they mean for a tokenizer."""

from __future__ import annotations

import logging
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.compat.trl.config import PPOConfig
from tether.errors import ConfigError
from tether.models.adapters import DEFAULT
from tether.models.chat import turn_end
from tether.models.layers import num_rows
from tether.models.tokenizer import check_words, configured_ends

logger = logging.getLogger(__name__)


def check_kinds(args: Any, tokenizer: Any, collator: Any) -> None:
    """Raises ``ConfigError`` for arguments of the wrong type that are neither models nor data, and ``ModelError`` for a
    tokenizer without a vocabulary."""
    if not isinstance(args, PPOConfig):
        raise ConfigError(f"args: got {type(args).__name__}, wanted a tether.compat.trl.PPOConfig")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"processing_class: got {type(tokenizer).__name__}, wanted the policy's tokenizer")
    check_words(tokenizer, "processing_class")
    if collator is not None and not callable(collator):
        raise ConfigError(f"data_collator: got {type(collator).__name__}, wanted a function of a list of rows, or None")


def policy_adapter(args: PPOConfig, model: Any) -> str:
    """PEFT's name of the adapter that is trained."""
    if args.model_adapter_name is not None and isinstance(model, PeftModel):
        return args.model_adapter_name
    return model.active_adapter if isinstance(model, PeftModel) else DEFAULT


def stop_of(
    args: PPOConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> tuple[str | None, frozenset[int]]:
    """What ends an answer: as a value of ``sampling.stop_token``, and as token ids.

    Raises:
        ConfigError: the tokenizer has no such token, or the model no embedding for it.
    """
    end = tokenizer.eos_token_id
    if end is None and args.stop_token_id is None and (args.stop_token or args.missing_eos_penalty is not None):
        raise ConfigError("PPOConfig: stop_token eos and missing_eos_penalty need a tokenizer with an end token")
    stop = end if args.stop_token == "eos" else args.stop_token_id
    if stop is None:
        return None, frozenset()
    text = "eos" if stop == end else tokenizer.convert_ids_to_tokens(stop) if stop >= 0 else None
    if not isinstance(text, str):
        raise ConfigError(f"PPOConfig.stop_token_id: the tokenizer has no token {stop}; it has {len(tokenizer)} tokens")
    rows = num_rows(model)
    if stop >= rows:
        raise ConfigError(f"PPOConfig: answers end at token {stop}, {text}, but the model knows only {rows} tokens")
    if text == "eos" and (others := _other_ends(tokenizer, model)):
        told = ", ".join(f"{tokenizer.convert_ids_to_tokens(other)} ({other})" for other in others)
        logger.warning(
            "PPOConfig.stop_token eos: answers end only at %s, as in TRL, but the model also ends its own at %s; set "
            "stop_token_id to choose another end", tokenizer.eos_token, told
        )  # fmt: skip
    return text, frozenset({stop})


def _other_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Tokens other than the end token that end the model's answers by its generation config, or its turns if it has a
    chat template."""
    others = configured_ends(model.generation_config) - {tokenizer.eos_token_id}
    closing = turn_end(tokenizer)
    return sorted(others if closing is None else others & {closing})
