"""From a padded batch to log-probabilities, values and scores: the only place with a shift by one.

The model's output at column j predicts the token at column j + 1. A response token was thus sampled in the state one
column before it, and both its log-probability and its value are read there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.algo import LinearHead, linear_logprobs, logits_at_once, logprobs_from_logits, selected_logprobs
from tether.errors import ModelError
from tether.models.attention import wide_gradients
from tether.models.compiled import compiled_layers
from tether.models.fit import positions
from tether.models.products import QuickLinear, product_of_many
from tether.types import MicroBatch

_HEAD_MATCHES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
MOST_OF_WHAT_FOLLOWS, IN_HALF = 1e-4, 0.05
"""How much states may change with the tokens after them, relative to their norm without the mean, in float32 and in
half precision. Experts round differently depending on which tokens share one."""


class LogprobOutput(NamedTuple):
    """Outputs of a pass over a micro-batch for its response tokens; exactly 0 outside the response mask."""

    logprobs: Float[Tensor, "M R"] | None
    """log π of each response token, or None if the pass does not compute it."""
    entropy: Float[Tensor, "M R"] | None
    """Entropy of the distribution that each response token was drawn from, in nats."""
    values: Float[Tensor, "M R"] | None
    """Value of the state that each response token was sampled in."""

    def or_else(self, other: LogprobOutput) -> LogprobOutput:
        """The same outputs, with those of ``other`` in place of None."""
        return LogprobOutput(*(theirs if own is None else own for own, theirs in zip(self, other, strict=True)))


def response_outputs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float,
    head: nn.Module | None = None,
    detach_head: bool = False,
    with_entropy: bool = False,
) -> LogprobOutput:
    """Log-probabilities, and optionally entropy and values, of the response tokens, from one pass of the trunk.

        states_t = hidden[:, P + t − 1]        for a query of P tokens
        log π(response_t) = log_softmax(lm_head(states_t) / temperature)[response_t]
        V_t = head(states_t)

    Logits are computed for response tokens only, in chunks, unless the model changes its logits after the head.

    Args:
        model: a causal language model.
        head: hidden states → [..., 1]; if given, values are computed, too.
        detach_head: keeps the gradient of the values out of the trunk.
        with_entropy: whether the entropy is computed, too.
    """
    if head_matches(model):
        states, output = _response_states(model.base_model, batch), model.get_output_embeddings()
        chunk_size = max(1, logits_at_once(states.device) // model.config.get_text_config().vocab_size)
        how = {"temperature": temperature, "chunk_size": chunk_size, "with_entropy": with_entropy}
        if (linear := _as_linear(output)) is None:
            logprobs, entropy = selected_logprobs(states, output, _targets(batch), **how)
        else:
            logprobs, entropy = linear_logprobs(states, linear, _targets(batch), **how)
    else:
        states, logits = _response_logits(model, batch)
        logprobs, entropy = logprobs_from_logits(
            logits, _targets(batch), temperature=temperature, with_entropy=with_entropy
        )
    values = None if head is None else head(states.detach() if detach_head else states).squeeze(-1)
    return LogprobOutput(*(None if x is None else _on_response(x, batch) for x in (logprobs, entropy, values)))


def _as_linear(head: nn.Module) -> LinearHead | None:
    """The head as a plain matrix product; None if it is more than that or its weights are not all available: with
    adapters on it, 4-bit weights, or weights that an engine gathers when the head is called."""
    if type(head) not in (nn.Linear, QuickLinear) or type(head.weight) is not nn.Parameter:
        return None
    has_hooks = any(hooks for name, hooks in vars(head).items() if name.endswith("_hooks"))
    if has_hooks or "forward" in vars(head) or hasattr(head.weight, "ds_id"):
        return None
    kind = head.weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    is_quick = isinstance(head, QuickLinear) and kind == "cpu"
    return LinearHead(head.weight, head.bias, product_of_many(dtype) if is_quick else nn.functional.linear)


def response_values(backbone: PreTrainedModel, head: nn.Module, batch: MicroBatch) -> Float[Tensor, "M R"]:
    """Value of the state that each response token was sampled in, V_t = head(hidden[:, P + t − 1]); 0 on padding.

    Args:
        backbone: a model without its language or classifier head.
        head: hidden states → [..., 1].
    """
    return _on_response(head(_response_states(backbone, batch)).squeeze(-1), batch)


def last_token_scores(
    backbone: PreTrainedModel,
    head: nn.Module,
    ids: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    position_ids: Int[Tensor, "M T"],
    *,
    causal: bool,
) -> Float[Tensor, " M"]:
    """The head's output at the last real token of each row, whichever side the padding is on.

    Args:
        backbone: a model without its language or classifier head.
        head: hidden states → [..., 1].
        causal: whether no token sees the tokens after it, as ``is_causal`` returns it.
        mask: True on real tokens, at least one in each row.
        position_ids: position of each real token in its row, from 0.
    """
    needs_mask = not (causal and bool(mask[:, 0].all()))
    hidden = _hidden_states(backbone, ids, mask, position_ids, needs_mask=needs_mask)
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = (mask * columns).argmax(dim=1)
    return head(hidden[torch.arange(len(ids), device=ids.device), last]).squeeze(-1)


def head_matches(model: PreTrainedModel) -> bool:
    """Whether the model's logits are exactly its output embedding applied to the trunk's last hidden states.

    False for models that scale or cap their logits afterwards (Cohere, Gemma, Granite, …). Tested once for each model
    on a few tokens, and compared bitwise: while logits are small, the effect of a cap can be far below any tolerance.
    """
    if model not in _HEAD_MATCHES:
        _HEAD_MATCHES[model] = _try_head(model)
    return _HEAD_MATCHES[model]


@torch.no_grad()
def _try_head(model: PreTrainedModel) -> bool:
    ids, used = few_tokens(model), []
    with without_cached_casts(ids.device), _heard(model.base_model, used):
        logits = model(input_ids=ids, use_cache=False).logits
    if model.base_model is not model:
        head = model.get_output_embeddings()
        with without_cached_casts(ids.device):
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            fits = getattr(head, "in_features", states.shape[-1]) == states.shape[-1]
            if fits and torch.equal(logits.float(), head(states).float()):
                return True
        if used:
            return False
    raise ModelError(
        f"{_named(model)} does not declare by base_model_prefix which part computes the hidden states; wanted a "
        "transformers language model that does"
    )


@torch.no_grad()
def state_size(model: PreTrainedModel) -> int:
    """Size of the trunk's last hidden states, which value and reward heads read, of a causal language model.

    Usually the output embedding reads them, too. Where its width is not the hidden size, either the trunk projects its
    states (OPT) or the language model does (RemBERT, Electra), and a few tokens tell; also on the meta device, where no
    model could look for pads among ids.
    """
    size = model.get_output_embeddings().weight.shape[-1]
    if size == model.config.get_text_config().hidden_size:
        return size
    embedded = model.get_input_embeddings()(few_tokens(model))
    return model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state.shape[-1]


def check_causal(model: PreTrainedModel) -> None:
    """Raises ``ModelError`` if the trunk is not causal: during generation, there are no later tokens to read."""
    if not is_causal(model.base_model):
        raise ModelError(
            f"{_named(model)} also reads what comes after a token; wanted a causal language model. BERT and similar "
            "models are causal with is_decoder: true in config.json"
        )


@torch.no_grad()
def is_causal(backbone: PreTrainedModel) -> bool:
    """Whether the model's output at a token is independent of what comes after it, text or padding. Tested on a few
    tokens, some of which are then replaced by padding."""
    ids = few_tokens(backbone)
    width, kept = ids.shape[1], ids.shape[1] // 2
    padded = torch.cat([ids[:, :kept], torch.zeros_like(ids[:, kept:])], dim=1)
    with without_cached_casts(ids.device):
        states, changed = (backbone(input_ids=x, use_cache=False).last_hidden_state for x in (ids, padded))
    most = IN_HALF if is_half(states) else MOST_OF_WHAT_FOLLOWS
    states_before = states[:, :kept].float()
    difference = states_before - changed[:, :kept].float()
    differs = difference.norm() > most * (states_before - states_before.mean(dim=1, keepdim=True)).norm()
    return states.shape[1] == width and not differs  # NaN does not count as a difference; it is reported elsewhere


def few_tokens(model: PreTrainedModel) -> Int[Tensor, "1 T"]:
    """Eleven tokens to test a model with, or as many as it has positions for: the midpoints of equal parts of the
    vocabulary, as the tokens at its ends may never occur in a text."""
    few, size = min(11, positions(model.config) or 11), model.config.get_text_config().vocab_size
    return (torch.arange(1, 2 * few, 2, device=model.device) * size // (2 * few)).unsqueeze(0)


def is_half(x: Tensor) -> bool:
    """Whether the forward that computed ``x`` ran in half precision."""
    return x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)


def without_cached_casts(device: torch.device) -> torch.autocast:
    """Autocast as it is, without its cache: a cast cached here without gradients would be reused by a later forward."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _hidden_states(
    backbone: PreTrainedModel,
    ids: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    position_ids: Int[Tensor, "M T"],
    *,
    needs_mask: bool,
) -> Float[Tensor, "M T D"]:
    """The trunk's last hidden states."""
    with compiled_layers(backbone), wide_gradients(backbone):
        return backbone(**_inputs(backbone, ids, mask, position_ids, needs_mask=needs_mask)).last_hidden_state


def _inputs(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, position_ids: Tensor, *, needs_mask: bool
) -> dict[str, Tensor | bool]:
    """Arguments of a forward without cache. Models that take no position ids count real tokens by the mask.

    If no row begins with padding, a causal model is given neither mask nor positions: later tokens are hidden from it
    anyway, purely causal attention has faster kernels, and a model knows its own first position (RoBERTa's is not 0).
    """
    inputs = {"input_ids": ids, "use_cache": False}
    if not needs_mask:
        return inputs
    placed = "position_ids" in inspect.signature(model.forward).parameters
    return inputs | {"attention_mask": mask.long()} | ({"position_ids": position_ids} if placed else {})


def _response_states(backbone: PreTrainedModel, batch: MicroBatch) -> Float[Tensor, "N D"]:
    """The state that each response token was sampled in, with the rows of the batch concatenated, without padding."""
    ids, mask, position_ids = batch.token_ids, batch.attention_mask, batch.position_ids
    hidden = _hidden_states(backbone, ids, mask, position_ids, needs_mask=batch.has_padding_before)
    return hidden.flatten(0, 1).index_select(0, batch.response_index - 1)


def _targets(batch: MicroBatch) -> Int[Tensor, " N"]:
    """The response tokens, with the rows of the batch concatenated, without padding."""
    return batch.token_ids.flatten().index_select(0, batch.response_index)


def _response_logits(model: PreTrainedModel, batch: MicroBatch) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N V"]]:
    """States and logits of response tokens from the model's own forward, for models that post-process their logits."""
    seen: list[Tensor] = []
    ids, mask, position_ids = batch.token_ids, batch.attention_mask, batch.position_ids
    inputs = _inputs(model, ids, mask, position_ids, needs_mask=batch.has_padding_before)
    sampled_in, kept = batch.response_index - 1, batch.sampled_columns
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = kept
    with compiled_layers(model.base_model), wide_gradients(model.base_model), _heard(model.base_model, seen):
        logits = model(**inputs).logits
    if logits.shape[1] > len(kept):  # the model takes no logits_to_keep and returned them for every token
        logits = logits[:, kept]
    rows, columns = sampled_in // ids.shape[1], sampled_in % ids.shape[1]
    of_kept = rows * len(kept) + torch.searchsorted(kept, columns)
    return seen[0].flatten(0, 1).index_select(0, sampled_in), logits.flatten(0, 1).index_select(0, of_kept)


@contextmanager
def _heard(backbone: PreTrainedModel, seen: list[Tensor]) -> Iterator[None]:
    """Appends the last hidden states of every forward of the trunk to ``seen``."""
    handle = backbone.register_forward_hook(lambda *call: seen.append(getattr(call[-1], "last_hidden_state", None)))
    try:
        yield
    finally:
        handle.remove()


def _named(model: PreTrainedModel) -> str:
    """The model's source and class, for messages."""
    kind = type(model).__name__
    return f"{model.config.name_or_path or kind}: {kind}"


def _on_response(flat: Float[Tensor, " N"], batch: MicroBatch) -> Float[Tensor, "M R"]:
    """Scatters one value per response token to its position, 0 on padding."""
    shape = batch.response_mask.shape
    return flat.new_zeros(shape.numel()).index_copy(0, batch.response_places, flat).view(shape)
