"""Tests every causal language model of transformers, tiny and random: python -m benchmarks.architectures [KIND …]

Run from the repository's root. For each type that a small configuration can be made of:

    passes      log-probabilities of a padded micro-batch, as updates read them, against the model's own forward over
                one unpadded text at a time: largest difference, nats
    decoding    how the model is decoded, and the log-probabilities with which its answers were drawn against the same
                forward: largest difference, nats

Promise: at most .001 nats, or the model is refused with a message. Prints a row for every type that differs or is not
decoded in padded batches, then the number of types tested; exits with 1 if the promise is broken. Types without a
working small configuration are listed at the end as untested.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tether.data.collate import collate
from tether.errors import TetherError
from tether.generation.batch import Decoding
from tether.generation.decoding import decoding
from tether.generation.hf import HFGenerator
from tether.models.forward import check_causal, head_matches, response_outputs
from tether.types import Request, Sampling

MOST_DIFFERENCE = 1e-3
VOCABULARY, PAD = 40, 3
QUERIES = ([5, 7, 8, 9], [8], [5, 11, 12, 13, 14, 6, 7])
RESPONSES = ([9, 10, 2], [11, 12, 13, 14, 2], [20, 21, 22, 23])
SAMPLING = Sampling(7, temperature=0.7, stop_token_ids=frozenset({2}))
MOST_PARAMETERS = 80_000_000
SCALE = 4.0
"""Factor on the initialization of matrices, so that logits are far from equal."""

WIDTHS = dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "embedding_dim"), 32)
INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "word_embed_proj_dim"), 32)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_blocks")
HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads")
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
          "qk_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 64}  # fmt: skip
STATES = {
    "state_size": 4, "lru_width": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1,
}  # fmt: skip
OTHERS = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 4, "rotary_dim": 4, "dropout": 0.0,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
OF_TYPES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8, "num_hidden_layers": 2},
    "gemma3n_text": {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None,
                     "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"], "mamba_headdim": 16, "n_mamba_heads": 4},
}  # fmt: skip
"""Keys of individual types, for which those above are not enough."""


@dataclass(frozen=True)
class Finding:
    """The result for one type of model."""

    kind: str
    passes: float
    way: str
    decoded: float

    @property
    def is_kept(self) -> bool:
        """Whether the promise is kept."""
        return self.passes <= MOST_DIFFERENCE and self.decoded <= MOST_DIFFERENCE


# Small models


def small_model(kind: str) -> PreTrainedModel | None:
    """A random model of a type in eval mode, from the first of several small configurations that works; None if none
    works."""
    for changes in candidates(AutoConfig.for_model(kind)):
        try:
            config = AutoConfig.for_model(kind, **changes)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > MOST_PARAMETERS:
                continue
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            model(input_ids=torch.tensor([[1, 4, 5]]), use_cache=False)
        except Exception:  # whatever a model raises for an invalid configuration
            continue
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
        return model
    return None


def candidates(default: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Small configurations of a type, as far as it has keys of these names; wilder ones last."""
    known = vars(default).keys() | default.attribute_map.keys()
    latent = "kv_lora_rank" in known
    for layers, head_dim, groups in (
        *((2, 4, 4), (2, 8, 4)) * latent,
        *((8, 8, 2), (2, 8, 2), (8, None, 2), (2, None, 4), (4, 8, 2), (12, 8, 2)),  # of two, none may be attention
    ):
        wanted: Mapping[str, Any] = WIDTHS | INNER | EXPERTS | LATENT | STATES | OTHERS
        wanted |= dict.fromkeys(LAYERS, layers) | dict.fromkeys(HEADS, 4) | dict.fromkeys(GROUPS, groups)
        wanted |= {} if head_dim is None else {"head_dim": head_dim}
        given = {name: value for name, value in wanted.items() if name in known}
        yield given | OF_TYPES.get(default.model_type, {})
    yield {"num_hidden_layers": 2}
    yield {}


# Comparisons


def whole_logprobs(model: PreTrainedModel, query: list[int], response: list[int]) -> list[float]:
    """Log-probabilities of a response from one forward over one text."""
    logits = model(input_ids=torch.tensor([[*query, *response]]), use_cache=False).logits[0].double()
    scaled = (logits / SAMPLING.temperature).log_softmax(-1)
    return [scaled[len(query) + i - 1, token].item() for i, token in enumerate(response)]


def furthest(got: list[float], wanted: list[float]) -> float:
    """The largest difference; NaN if there is one."""
    return largest(abs(a - b) for a, b in zip(got, wanted, strict=True))


def largest(numbers: Iterable[float]) -> float:
    """The largest number; NaN if there is one, which Python's ``max`` may pass over."""
    return float(torch.tensor([*numbers], dtype=torch.float64).max())


def examined(kind: str, model: PreTrainedModel) -> Finding:
    """Passes and decoding of a model against its own forward."""
    head_matches(model)
    check_causal(model)
    logprobs = response_outputs(model, collate(QUERIES, RESPONSES), temperature=SAMPLING.temperature).logprobs
    passes = largest(
        furthest(got[: len(response)].tolist(), whole_logprobs(model, query, response))
        for got, query, response in zip(logprobs, QUERIES, RESPONSES, strict=True)
    )

    @contextmanager
    def scope() -> Iterator[PreTrainedModel]:
        yield model

    asked = [Request(query, key=i) for i, query in enumerate([*QUERIES, QUERIES[0]])]
    answered = HFGenerator(scope, batch_size=8, device="cpu").generate(asked, SAMPLING)
    decoded = largest(
        furthest(answer.logprobs, whole_logprobs(model, list(asked[i].token_ids), answer.token_ids))
        for i, answer in answered
    )
    return Finding(kind, passes, decoding(model, torch.device("cpu")).name.lower(), decoded)


@torch.no_grad()
def main() -> int:
    """Tests all types, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types (default: all)")
    kinds = parser.parse_args().kinds or sorted(CONFIG_MAPPING_NAMES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("tether").setLevel(logging.ERROR)
    table = Table("type", "passes, nats", "decoding", "nats", title=f"transformers {transformers.__version__}")
    unbuilt, faults, usual, ways = [], [], 0, {}
    for kind in kinds:
        print(f"\r{kind:40}", end="", file=sys.stderr, flush=True)
        try:
            model = small_model(kind)
        except Exception:  # a default configuration that cannot be made, a package that is missing
            model = None
        if model is None:
            unbuilt.append(kind)
            continue
        try:
            found = examined(kind, model)
        except TetherError as error:
            table.add_row(kind, "refused", str(error).split(": ", 1)[-1], "")
            continue
        except Exception as error:  # to be shown together with the others
            table.add_row(kind, f"[red]{type(error).__name__}", str(error)[:80], "")
            faults.append(kind)
            continue
        ways[found.way] = ways.get(found.way, 0) + 1
        if not found.is_kept:
            faults.append(kind)
        if found.is_kept and found.way == Decoding.CUT.name.lower():
            usual += 1
        else:
            colour = "" if found.is_kept else "[red]"
            table.add_row(kind, f"{colour}{found.passes:.0e}", found.way, f"{colour}{found.decoded:.0e}")
    print(f"\r{'':40}\r", end="", file=sys.stderr)
    console = Console()
    console.print(table)
    counts = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
    console.print(f"{len(kinds) - len(unbuilt)} types tried, {counts}; {usual} of them as usual, not in the table")
    console.print(f"not tried: {', '.join(unbuilt) or 'none'}")
    if faults:
        console.print(f"[red]broken:[/] {', '.join(faults)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
