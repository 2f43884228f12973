"""Tables in Tether's roles, and a generator that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from benchmarks.toys.language import Language
from benchmarks.toys.models import Reader, TablePolicy
from tether.data.collate import pad_left
from tether.models.heads import ScalarHead
from tether.models.roles import POLICY, REFERENCE, VALUE, ModelRoles, Role
from tether.types import Completion, Request, Sampling


class TableCritic(ScalarHead):
    """One value per state: a scalar head on one-hot states, which are never materialized. It starts at 0."""

    def __init__(self, language: Language) -> None:
        super().__init__(language.num_prompts * language.num_prefixes)
        self._num_prefixes = language.num_prefixes

    def forward(self, hidden: Float[Tensor, "*columns 3"]) -> Float[Tensor, "*columns 1"]:
        """The value of each state."""
        prompts, texts, _ = hidden.long().unbind(-1)
        return self.weight[0, prompts * self._num_prefixes + texts].unsqueeze(-1)


def table_roles(
    language: Language, tokenizer: PreTrainedTokenizerBase, *, with_reference: bool, with_critic: bool
) -> ModelRoles:
    """Policy and critic as tables, with the start policy as reference."""
    policy, critic = TablePolicy(language), TableCritic(language)
    roles = [Role(POLICY, policy, "table", "own table", trained={"rows.weight": policy.rows.weight})]
    if with_reference:
        roles.append(Role(REFERENCE, TablePolicy(language), "table", "own table"))
    if with_critic:
        own = {"head.weight": critic.weight}
        roles.append(Role(VALUE, Reader(language), "table", "own table", head=critic, trained=own))
    return ModelRoles(
        roles,
        adapted=None,
        base_source="table",
        tokenizer=tokenizer,
        device="cpu",
        autocast_dtype=None,
        detach_value=False,
    )


class TableGenerator:
    """Answers all requests side by side, by Gumbel-max with noise that depends only on request and position.

    Args:
        policy: the policy; its table is read at each call, so that it is always the trained one.
    """

    batch_size = 2**20

    def __init__(self, policy: TablePolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer), in order."""
        language = self._policy.reader.language
        logits = self._policy.rows.weight / sampling.temperature
        ids, mask, _ = pad_left([request.token_ids for request in requests])
        prompts = language.read(ids, mask).prompts[:, -1]
        prefixes = torch.zeros_like(prompts)
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        columns = []
        for position in range(sampling.max_new_tokens):
            noise = gumbel_noise(keys, position, language.vocab_size)
            columns.append((logits[prompts, prefixes] + noise).argmax(dim=1))
            prefixes = language.extended(prefixes, columns[-1]).clamp(max=language.num_prefixes - 1)
        for i, answer in enumerate(torch.stack(columns, dim=1).tolist()):
            ends = [t for t, token in enumerate(answer) if token in sampling.stop_token_ids]
            yield i, Completion(answer[: ends[0] + 1], "stop") if ends else Completion(answer, "length")

    def sync_weights(self, policy: nn.Module) -> None:
        """Nothing to do: the table being trained is the one that answers."""

    def close(self) -> None:
        """Nothing to free."""


def gumbel_noise(keys: np.ndarray, position: int, size: int) -> Float[Tensor, "N size"]:
    """Gumbel noise in float64, one row per key, that depends only on key and position.

        z = mix(key + (position · size + v + 1) · ⌊2⁶⁴ / golden ratio⌋)
        noise_v = −log(−log((⌊z / 2¹¹⌋ + ½) / 2⁵³))

    Args:
        keys: uint64.

    Source: the generator SplitMix64, Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195
    """
    counters = np.arange(position * size + 1, (position + 1) * size + 1, dtype=np.uint64)
    z = keys[:, None] + counters * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(uniform)))
