"""Answers to prompts, and their scores by the reward sources, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether import algo
from tether.config.schema import RunConfig
from tether.errors import DataError
from tether.models.stop_strings import answer_text, continued
from tether.rewards.base import checked, checked_output
from tether.rewards.early import Begun, begun
from tether.rewards.tokens import check_token_scores
from tether.train.display import PhaseReport
from tether.train.parts import Parts
from tether.types import Completion, Prompt, Request, RewardBatch, RewardOutput, TextEnds


@dataclass(frozen=True)
class Answers:
    """B prompts with their answers, and both as text."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    texts: Sequence[str]
    """The answers without special tokens, each up to the token or string that ended it."""
    text_ends: TextEnds | None = field(default=None, compare=False, repr=False)
    """What ended answers by their text; None if nothing could."""
    asked: Begun | None = field(default=None, compare=False, repr=False)
    """Requests made to the reward sources while answers were being generated; None if there were none."""

    @property
    def ended(self) -> Bool[Tensor, " B"]:
        """True for answers that a stop token or a stop string ended."""
        return torch.tensor([completion.finish_reason == "stop" for completion in self.completions])

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Number of tokens of each answer, including what ended it."""
        return torch.tensor([len(completion.token_ids) for completion in self.completions])

    def reward_batch(self, tokenizer: PreTrainedTokenizerBase) -> RewardBatch:
        """The input of the reward sources.

        Args:
            tokenizer: the policy's.
        """
        ids = [list(completion.token_ids) for completion in self.completions]
        return reward_batch(self.prompts, list(self.texts), ids, tokenizer, self.text_ends)


@dataclass(frozen=True)
class Judged:
    """Scores of B answers."""

    scores: Float[Tensor, " B"]
    """Scores to train on: the sources' scores, normalized and clipped, with the rules for ends and lengths applied."""
    components: Mapping[str, list[float]]
    """Unweighted scores of each source, by name."""
    early_scores: Sequence[Sequence[float]] | None = None
    """One number per token: the part of the score assigned to each token before the last, which gets the rest. None:
    the last token gets all of it."""

    def sample(self, i: int, answers: Answers) -> dict[str, Any]:
        """Answer ``i`` as one row of samples.jsonl."""
        return answer_row(answers.prompts[i], answers.completions[i], answers.texts[i]) | {
            "score": float(self.scores[i]),
            "rewards": {name: values[i] for name, values in self.components.items()},
        }


def answer_row(prompt: Prompt, completion: Completion, text: str) -> dict[str, Any]:
    """What a row of samples.jsonl says of an answer before it is scored."""
    return {
        "row": prompt.row,
        "prompt": prompt.source,
        "query": prompt.text,
        "response": text,
        "length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }


def answer(
    parts: Parts,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    *,
    phase: PhaseReport,
    check: Callable[[], None],
    name: str = "rollout",
    ask: bool = False,
    finished: Callable[[int, Completion, str], None] = lambda i, completion, text: None,
) -> Answers:
    """Generates an answer to every prompt.

    Args:
        check: called as answers finish; may raise to stop.
        ask: whether reward sources that support it are asked about each answer as it finishes, for ``raw_scores``.
        finished: called with the position, tokens and text of each answer as it finishes.
    """
    completions: list[Completion | None] = [None] * len(requests)
    texts, ids = [""] * len(requests), [[] for _ in requests]
    ends = parts.sampling.text_ends
    asked = begun(parts.rewards, reward_batch(prompts, texts, ids, parts.tokenizer, ends)) if ask else None
    phase(name, 0, len(requests))
    try:
        for done, (position, completion) in enumerate(parts.generator.generate(requests, parts.sampling), start=1):
            completions[position] = completion
            before = prompts[position].before
            texts[position] = answer_text(completion.token_ids, parts.tokenizer, parts.sampling, before)
            ids[position] += completion.token_ids
            finished(position, completion, texts[position])
            if asked is not None:
                asked.finished([position])
            phase(name, done, len(requests))
            check()
    except BaseException:
        if asked is not None:
            asked.give_up()
        raise
    assert all(c is not None for c in completions), "a generator yields every request once"
    return Answers(prompts, completions, texts, ends, asked)


def check_answers(answers: Answers, config: RunConfig, *, num_rows: int, positions: int | None) -> None:
    """Raises ``DataError`` unless the answers, which a caller may have made, are a rollout batch of the run: one that
    the policy can read, and that divides into mini-batches and groups as planned.

    Args:
        num_rows: number of tokens that the policy has embeddings for.
        positions: maximum number of tokens of a text, None if there is no limit.
    """
    size, each, longest = (
        config.train.rollout_batch_size, config.sampling.num_generations, config.sampling.response_length
    )  # fmt: skip
    counts = {"prompts": answers.prompts, "completions": answers.completions, "texts": answers.texts}
    for name, values in counts.items():
        if len(values) != size:
            raise DataError(f"answers: got {len(values)} {name}, wanted train.rollout_batch_size, {size}")
    for i, (prompt, completion) in enumerate(zip(answers.prompts, answers.completions, strict=True)):
        where = f"answers, row {i}"
        for name, ids in {"query": prompt.token_ids, "response": completion.token_ids}.items():
            if len(ids) == 0:
                raise DataError(f"{where}: the {name} has no tokens, wanted at least one")
            if wrong := [token for token in ids if not (hasattr(token, "__index__") and 0 <= token < num_rows)]:
                raise DataError(
                    f"{where}: the {name} holds {wrong[0]!r}, wanted whole numbers from 0 to {num_rows - 1}, the "
                    "policy's token ids"
                )
        if len(completion.token_ids) > longest:
            raise DataError(
                f"{where}: the response has {len(completion.token_ids)} tokens, wanted at most "
                f"sampling.response_length, {longest}"
            )
        total = len(prompt.token_ids) + len(completion.token_ids)
        if positions is not None and total > positions:
            raise DataError(
                f"{where}: query and response have {total} tokens, but the policy has {positions} positions"
            )
        if completion.finish_reason not in ("stop", "length"):
            raise DataError(f"{where}: got finish_reason {completion.finish_reason!r}, wanted stop or length")
        if prompt.token_ids != answers.prompts[i - i % each].token_ids:
            raise DataError(
                f"{where}: its query is not that of row {i - i % each}; wanted the {each} answers to a prompt "
                "(sampling.num_generations) in neighboring rows"
            )


def reward_batch(
    prompts: Sequence[Prompt],
    texts: list[str],
    ids: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    text_ends: TextEnds | None,
) -> RewardBatch:
    """The input of the reward sources; the lists of answers are not copied and may still be filled."""
    return RewardBatch(
        prompts=[p.source for p in prompts],
        queries=[p.text for p in prompts],
        responses=texts,
        query_ids=[list(p.token_ids) for p in prompts],
        response_ids=ids,
        conversations=[p.conversation for p in prompts],
        columns={name: [p.columns.get(name) for p in prompts] for name in prompts[0].columns},
        decode=partial(continued, tokenizer=tokenizer),
        closed=None if text_ends is None else text_ends.closed,
    )


def raw_scores(
    parts: Parts, answers: Answers, output: RewardOutput | None = None
) -> tuple[Float[Tensor, " B"], RewardOutput]:
    """The sources' weighted sum for every answer, and their complete output.

    Args:
        output: used instead of calling the sources.

    Raises:
        RewardError: an answer could not be scored.
    """
    if output is None and answers.asked is not None:
        output = answers.asked.output()
    elif output is None:
        output = parts.rewards.score(answers.reward_batch(parts.tokenizer))
    checked_output(output)
    scores = checked(output.scores, len(answers.texts), "the reward")
    check_token_scores(output, answers.lengths.tolist(), "the reward")
    return torch.tensor(scores, dtype=torch.float32), output


def shaped_scores(
    raw: Float[Tensor, " B"], answers: Answers, config: RunConfig, moments: algo.ScoreMoments
) -> Float[Tensor, " B"]:
    """The scores to train on: normalized, clipped, then adjusted for answers that did not end or are too long."""
    ppo, scores = config.ppo, raw
    if ppo.score_norm is not None:
        scores = algo.normalised_scores(scores, moments)
    if ppo.reward_clip is not None:
        scores = scores.clamp(-ppo.reward_clip, ppo.reward_clip)
    scores = algo.missing_eos_scores(
        scores, answers.ended, penalty=ppo.missing_eos_penalty, replacement=ppo.missing_eos_score
    )
    if ppo.overlong_buffer is not None:
        lengths, longest = answers.lengths, config.sampling.response_length
        penalties = algo.overlong_penalties(lengths, max_length=longest, buffer=ppo.overlong_buffer)
        scores = scores + ppo.overlong_penalty * penalties
    return scores


def early_scores(
    output: RewardOutput, answers: Answers, config: RunConfig, moments: algo.ScoreMoments
) -> list[list[float]] | None:
    """The parts of each answer's shaped score assigned to its tokens before the last: the sources' token scores divided
    by the standard deviation of ``ppo.score_norm``, or 0 if the score was replaced because the answer did not end."""
    if output.token_scores is None:
        return None
    ppo = config.ppo
    factor = 1.0 if ppo.score_norm is None else 1 / algo.score_std(moments)
    is_replaced = ~answers.ended if ppo.missing_eos_score is not None else torch.zeros(len(answers.texts), dtype=bool)
    return [
        [0.0 if drop else factor * score for score in row]
        for row, drop in zip(output.token_scores, is_replaced.tolist(), strict=True)
    ]
