"""What a model is and which texts fit it, determined from its configuration before its weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tether.errors import ConfigError, ModelError


def is_classifier(shape: PreTrainedConfig) -> bool:
    """Whether a model is a sequence classifier, according to its configuration."""
    return any(name.endswith("ForSequenceClassification") for name in shape.architectures or ())


def check_language_model(path: str, shape: PreTrainedConfig) -> None:
    """Raises ``ModelError`` if ``model.path`` holds a sequence classifier."""
    if is_classifier(shape):
        raise ModelError(f"model.path: {path} is a sequence classifier; wanted a causal language model")


def has_few_bits(shape: PreTrainedConfig) -> bool:
    """Whether a checkpoint itself holds quantized weights, according to its configuration."""
    return getattr(shape, "quantization_config", None) is not None


def check_trainable(path: str, shape: PreTrainedConfig, *, with_lora: bool) -> None:
    """Raises ``ConfigError`` if ``model.path`` holds quantized weights that are to be trained without an adapter."""
    if has_few_bits(shape) and not with_lora:
        raise ConfigError(
            f"model.path: {path} holds quantized weights, which cannot be trained themselves; add `lora: {{}}` under "
            "model"
        )


def check_tokens(
    path: str,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[tuple[str, int, Sequence[int]]],
) -> None:
    """Raises ``ConfigError`` if a text has a token for which the model in ``model.path`` has no embedding.

    Args:
        texts: kind, row and token ids of each.
    """
    size = shape.get_text_config().vocab_size
    for kind, row, ids in texts:
        if (highest := max(ids)) >= size:
            raise ConfigError(
                f"model.path: {path} has embeddings for {size} tokens, but its tokenizer has more: token {highest}, "
                f"{tokenizer.decode([highest])!r}, of the {kind} in row {row} has no embedding. One of the two belongs "
                "to another model"
            )


def without_row(tokenizer: PreTrainedTokenizerBase, rows: int, policy_rows: int) -> str | None:
    """What a model of ``rows`` embeddings lacks to read every token of the tokenizer that the policy can write, in
    words; None if it can. Ids of the policy that belong to no token do not count.

    Args:
        policy_rows: number of the policy's embeddings.
    """
    lacking = [token for token in tokenizer.get_vocab().values() if rows <= token < policy_rows]
    if not lacking:
        return None
    return (
        f"embeddings for {rows} tokens, but the policy has {policy_rows}, and may write token {min(lacking)}, "
        f"{tokenizer.convert_ids_to_tokens(min(lacking))!r}"
    )


def ids_with_rows(ids: Sequence[int], rows: int, known: Collection[int]) -> list[int]:
    """``ids`` without those that a model of ``rows`` embeddings does not have and that belong to no token: they have no
    text either.

    Args:
        known: ids of the tokenizer's tokens.
    """
    return [token for token in ids if token < rows or token in known]


def positions(shape: PreTrainedConfig) -> int | None:
    """Maximum number of tokens that the model has positions for, None if its configuration names no limit."""
    limit = getattr(shape.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def steady_positions(shape: PreTrainedConfig) -> int | None:
    """Maximum number of tokens of a text at which outputs do not depend on the batch, None if there is no limit.

    Under longrope (Phi-3, Phi-4-mini, …), a text that is longer than in pretraining changes the rotary frequencies of
    all texts of its batch, and of its own beginning.
    """
    rope = getattr(shape.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    limits = [each.get("original_max_position_embeddings") for each in kinds if each.get("rope_type") == "longrope"]
    return min((limit for limit in (positions(shape), *limits) if limit is not None), default=None)


def steady_positions_told(shape: PreTrainedConfig) -> str:
    """``steady_positions`` as text for messages."""
    limit = steady_positions(shape)
    return f"{limit}" if limit == positions(shape) else f"{limit} before longrope changes how a whole batch is read"


def check_positions(
    shape: PreTrainedConfig, longest: int, answer: int, *, key: str, way_out: str, model: str = "the model"
) -> None:
    """Raises ``ConfigError`` if the longest query and an answer do not fit into a model's positions.

    Args:
        longest: number of tokens of the longest query.
        answer: maximum number of tokens of an answer.
        key: the configuration key of ``answer``.
        way_out: what the user can do, for the message.
        model: name of the model in the message.
    """
    limit = steady_positions(shape)
    if limit is not None and longest + answer > limit:
        raise ConfigError(
            f"{key} {answer} after the longest query of {longest} tokens needs {longest + answer} positions, but "
            f"{model} has {steady_positions_told(shape)}: {way_out}"
        )
