"""Languages small enough to enumerate, so that the best reachable objective is known exactly.

With π*(y|x) = π_ref(y|x) · exp(r(x, y) / β) / Z(x), every policy π obeys

    J(π) = E[r] − β KL(π ‖ π_ref) = J* − β KL(π ‖ π*),      J* = β E_x[log Z(x)]
    regret(π) = (J* − J(π)) / (J* − J(π_ref))                0 is perfect, 1 has learned nothing

A language has V tokens. Token 0 ends an answer, the others are letters; an answer without token 0 is cut after L
tokens. Prompts are equally likely. The letters written so far, without the end token, form a prefix. Prefixes are
numbered breadth first, letters in order, so that with d = V − 1

    0 is the empty prefix,      prefix s followed by letter a is prefix d · s + a

Prompt x is written with the letters of prefix x + 1, an end token and a letter that opens the answer, so that queries
have unequal lengths and contain an end token that no answer wrote.

    X  prompts      S  prefixes of fewer than L letters, in which a token is drawn      W  prefixes of up to L letters
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Numbers = TypeVar("Numbers", int, Tensor)
END = 0
"""The token that ends an answer."""
OPEN = 1
"""The letter that ends a query."""


@dataclass(frozen=True)
class Figures:
    """Exact figures of a policy, means over prompts and answers; tensors, so that they can be differentiated."""

    objective: Tensor
    """J = E[r] − β KL."""
    reward: Tensor
    """E[r]."""
    kl: Tensor
    """KL to the reference, nats per answer."""
    length: Tensor
    """Number of tokens in an answer, including the end token."""
    ended: Tensor
    """Share of answers that end by themselves."""


class Reading(NamedTuple):
    """What was read, after each column."""

    prompts: Int[Tensor, "M T"]
    """x; meaningless before the query is over."""
    texts: Int[Tensor, "M T"]
    """Index of the prefix of letters answered so far; the empty prefix before the answer begins."""
    ended: Bool[Tensor, "M T"]
    """Whether the answer's end token has been read."""


@dataclass(frozen=True)
class Language:
    """A language with its reference policy, its judge, and the price of leaving the reference for the judge; in
    float64."""

    max_length: int
    """L: maximum number of tokens in an answer, including its end token."""
    ref_logprobs: Float[Tensor, "X S V"]
    """log π_ref of each token after each prefix."""
    scores: Float[Tensor, "X W"]
    """The judge's score of each answer, whether it ended there or was cut."""
    cut_score: float | None
    """Score of an answer that was cut, in place of the judge's; None keeps the judge's."""
    beta: float = 0.3
    """β, the coefficient of the KL."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.ref_logprobs.shape[2]

    @property
    def num_prompts(self) -> int:
        """X."""
        return self.ref_logprobs.shape[0]

    @property
    def num_prefixes(self) -> int:
        """S."""
        return self.ref_logprobs.shape[1]

    @property
    def answer_scores(self) -> Float[Tensor, "X W"]:
        """Score of each answer, with the rule for cut ones applied."""
        if self.cut_score is None:
            return self.scores
        return torch.cat(
            [self.scores[:, : self.num_prefixes], torch.full_like(self.scores[:, self.num_prefixes :], self.cut_score)],
            dim=1,
        )

    def query(self, prompt: int) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return (*self.letters(prompt + 1), END, OPEN)

    def read(self, token_ids: Int[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> Reading:
        """What was read after each column of queries followed by answers, wherever padding is."""
        is_end = mask & (token_ids == END)
        ends = is_end.cumsum(dim=1)
        opens = torch.zeros_like(mask)
        opens[:, 1:] = is_end[:, :-1] & (ends[:, :-1] == 1)
        asks, tells = mask & (ends == 0), mask & (ends == 1) & ~is_end & ~opens
        query, text = torch.zeros_like(token_ids[:, 0]), torch.zeros_like(token_ids[:, 0])
        queries, texts = [], []
        for j, letter in enumerate(token_ids.unbind(dim=1)):
            query = torch.where(asks[:, j], self.extended(query, letter), query)
            text = torch.where(tells[:, j], self.extended(text, letter), text)
            queries.append(query)
            texts.append(text)
        prompts = torch.stack(queries, dim=1).clamp(1, self.num_prompts) - 1
        return Reading(prompts, torch.stack(texts, dim=1), ends > 1)

    def number(self, letters: Iterable[int]) -> int:
        """Index of a text, by its letters."""
        text = 0
        for letter in letters:
            text = self.extended(text, letter)
        return text

    def letters(self, text: int) -> tuple[int, ...]:
        """Letters of a text, by its index."""
        before, last = divmod(text - 1, self.vocab_size - 1)
        return (*self.letters(before), last + 1) if text > 0 else ()

    def extended(self, text: Numbers, letter: Numbers) -> Numbers:
        """Index of a text with one more letter."""
        return (self.vocab_size - 1) * text + letter

    # Exact figures

    def figures(self, logprobs: Float[Tensor, "X S V"]) -> Figures:
        """E[r], KL, J and more of the policy with these log-probabilities, summed over every answer.

            p(s·a) = p(s) π(a|s)
            E[r] = Σ_s p(s) π(end|s) r(s) + Σ_{|w| = L} p(w) r(w)
            KL = Σ_s p(s) Σ_a π(a|s) log(π(a|s) / π_ref(a|s))
        """
        probabilities = logprobs.exp()
        divergence = (probabilities * (logprobs - self.ref_logprobs)).sum(-1)
        reach = logprobs.new_ones(self.num_prompts, 1)
        reward = kl = length = ended = logprobs.new_zeros(self.num_prompts)
        for level in self._levels():
            after = reach.unsqueeze(-1) * probabilities[:, level]
            reward = reward + (after[..., END] * self.scores[:, level]).sum(1)
            kl = kl + (reach * divergence[:, level]).sum(1)
            length = length + reach.sum(1)
            ended = ended + after[..., END].sum(1)
            reach = after[..., 1:].flatten(1)
        reward = reward + (reach * self.answer_scores[:, self.num_prefixes :]).sum(1)
        return Figures((reward - self.beta * kl).mean(), reward.mean(), kl.mean(), length.mean(), ended.mean())

    def optimum(self) -> Float[Tensor, "X S V"]:
        """log π*, by backward recursion. Its objective is J*, exactly.

            Q*(s, end) = r(s)      Q*(s, a) = V*(s·a)      V*(s) = β log Σ_a π_ref(a|s) exp(Q*(s, a) / β)
            log π*(a|s) = log π_ref(a|s) + (Q*(s, a) − V*(s)) / β

        Source: Rafailov et al. 2023, eq. 4, https://arxiv.org/abs/2305.18290, taken token by token
        """
        best = torch.empty_like(self.ref_logprobs)
        value = self.answer_scores[:, self.num_prefixes :]
        for level in reversed(self._levels()):
            after = value.unflatten(1, (-1, self.vocab_size - 1))
            q = torch.cat([self.scores[:, level].unsqueeze(-1), after], dim=-1)
            unnormalised = self.ref_logprobs[:, level] + q / self.beta
            best[:, level] = unnormalised.log_softmax(-1)
            value = self.beta * unnormalised.logsumexp(-1)
        return best

    @cached_property
    def start(self) -> float:
        """J of the reference."""
        return float(self.figures(self.ref_logprobs).objective)

    @cached_property
    def best(self) -> float:
        """J*, the highest objective there is."""
        return float(self.figures(self.optimum()).objective)

    def regret(self, logprobs: Float[Tensor, "X S V"]) -> float:
        """Share of the reachable gain over the reference that the policy misses."""
        return (self.best - float(self.figures(logprobs.double()).objective)) / (self.best - self.start)

    def _levels(self) -> list[slice]:
        """Positions of the prefixes of 0, 1, … L − 1 letters."""
        branches = self.vocab_size - 1
        firsts = [(branches**k - 1) // (branches - 1) for k in range(self.max_length + 1)]
        return [slice(a, b) for a, b in pairwise(firsts)]


def random_language(vocab_size: int, max_length: int, num_prompts: int, *, seed: int, end_bias: float) -> Language:
    """A language with a random reference and a judge that likes one letter, and no letter twice in a row.

        r(x, y) = 0.6 · (how often y has the letter of x) − 0.5 · (equal neighbors in y) − 0.1 · |y| + offset of x

    An answer that is cut scores −1.

    Args:
        end_bias: added to the reference's logits of the end token.
    """
    random = np.random.default_rng(seed)
    texts = [text for n in range(max_length + 1) for text in product(range(1, vocab_size), repeat=n)]
    num_prefixes = sum(len(text) < max_length for text in texts)
    offsets, liked = random.normal(size=num_prompts), random.integers(1, vocab_size, size=num_prompts)
    logits = random.normal(size=(num_prompts, num_prefixes, vocab_size))
    logits[:, :, END] += end_bias
    scores = [
        [
            0.6 * text.count(letter) - 0.5 * sum(u == v for u, v in pairwise(text)) + offset - 0.1 * len(text)
            for text in texts
        ]
        for letter, offset in zip(liked.tolist(), offsets.tolist(), strict=True)
    ]
    return Language(
        max_length=max_length,
        ref_logprobs=torch.from_numpy(logits).log_softmax(-1),
        scores=torch.tensor(scores, dtype=torch.float64),
        cut_score=-1.0,
    )


@cache
def toy(name: str) -> Language:
    """Toy ``A``: 4 tokens, answers of up to 5, 4 prompts. Toy ``B``: 3 tokens, answers of up to 12, 2 prompts."""
    if name == "A":
        return random_language(4, 5, 4, seed=0, end_bias=-0.5)
    assert name == "B", f"no toy {name}"
    return random_language(3, 12, 2, seed=1, end_bias=-1.5)
