"""Answers to prompts and what the reward sources say of them, in training and in evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether import algo
from tether.config.schema import PPOConfig
from tether.train.parts import Parts
from tether.types import Completion, Prompt, Request, RewardBatch

PhaseReport = Callable[[str, int, int], None]
"""Told the name of a phase, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Answers:
    """B prompts with their answers, and both as text."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    texts: Sequence[str]
    """The answers without special tokens."""

    def reward_batch(self) -> RewardBatch:
        """What the reward sources are given."""
        columns = {name: [p.columns.get(name) for p in self.prompts] for name in self.prompts[0].columns}
        return RewardBatch(
            prompts=[p.source for p in self.prompts],
            queries=[p.text for p in self.prompts],
            responses=list(self.texts),
            query_ids=[list(p.token_ids) for p in self.prompts],
            response_ids=[list(c.token_ids) for c in self.completions],
            columns=columns,
        )


@dataclass(frozen=True)
class Judged:
    """Scores of B answers."""

    scores: Float[Tensor, " B"]
    """The sources' score with the rule for answers that did not end applied: what is trained on."""
    components: Mapping[str, list[float]]
    """The sources' own scores by name, unweighted."""

    def sample(self, i: int, answers: Answers) -> dict[str, Any]:
        """Answer ``i`` as one row of samples.jsonl."""
        prompt, completion = answers.prompts[i], answers.completions[i]
        return {
            "row": prompt.row,
            "prompt": prompt.source,
            "query": prompt.text,
            "response": answers.texts[i],
            "length": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "score": float(self.scores[i]),
            "rewards": {name: values[i] for name, values in self.components.items()},
        }


def answer(
    parts: Parts,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    *,
    phase: PhaseReport,
    check: Callable[[], None],
    name: str = "rollout",
) -> Answers:
    """Answers every prompt. ``check`` is called as answers finish and may raise to stop."""
    completions: list[Completion | None] = [None] * len(requests)
    phase(name, 0, len(requests))
    for done, (position, completion) in enumerate(parts.generator.generate(requests, parts.sampling), start=1):
        completions[position] = completion
        phase(name, done, len(requests))
        check()
    assert all(c is not None for c in completions), "a generator yields every request once"
    texts = [parts.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    return Answers(prompts, completions, texts)


def judge(parts: Parts, answers: Answers, ppo: PPOConfig) -> Judged:
    """Scores every answer; the rule for one that did not end by itself is ``ppo.missing_eos_*``."""
    output = parts.rewards.score(answers.reward_batch())
    ended = torch.tensor([c.finish_reason == "stop" for c in answers.completions])
    scores = algo.missing_eos_scores(
        torch.tensor(output.scores, dtype=torch.float32),
        ended,
        penalty=ppo.missing_eos_penalty,
        replacement=ppo.missing_eos_score,
    )
    return Judged(scores, output.components)
