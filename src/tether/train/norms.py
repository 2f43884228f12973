"""What scores are normalised by where that is measured once, on answers of the start policy."""

from __future__ import annotations

from collections.abc import Callable

from tether import algo
from tether.config.schema import RunConfig
from tether.data.stream import PromptStream
from tether.errors import TrainingError
from tether.machine.distributed import met_by_all
from tether.train.parts import Parts
from tether.train.rollout import Answers, PhaseReport, answer
from tether.types import Request, noise_key


def start_answers(parts: Parts, config: RunConfig, *, phase: PhaseReport, check: Callable[[], None]) -> Answers:
    """``ppo.score_norm_samples`` answers of the policy as it is, with noise of their own.

    Args:
        phase: told of progress.
        check: called between answers; raises where the run is to stop.
    """
    seed, count = config.train.seed, config.ppo.score_norm_samples
    draws = PromptStream(len(parts.prompts), count, seed).batch(0)
    prompts = [parts.prompts[i] for i, _ in draws]
    requests = [
        Request(prompt.token_ids, noise_key(seed, "score_norm", prompt.row, sample))
        for prompt, (_, sample) in zip(prompts, draws, strict=True)
    ]
    return answer(parts, prompts, requests, phase=phase, check=check, name="score statistics")


def spread(moments: algo.ScoreMoments, what: str, key: str) -> str:
    """A line that says what scores are normalised by.

    Args:
        what: is normalised.
        key: that asks for it.

    Raises:
        TrainingError: the scores have no spread to normalise by.
    """
    count = f"{moments.count:g} answers of the start policy"
    if moments.var == 0:
        told = (
            f"{what}: all {count} have the score {moments.mean:g}, so there is no spread to measure scores by. "
            f"Leave {key} out, or give rewards that tell answers apart"
        )
        raise met_by_all(TrainingError(told))
    return (
        f"{what}: scores are normalised by those of {count}: mean {moments.mean:.3g}, standard deviation "
        f"{moments.var**0.5:.3g}"
    )
