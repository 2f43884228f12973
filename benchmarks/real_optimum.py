"""PPO on a real model against the best that any policy could do: python benchmarks/real_optimum.py --tokens {1,16}

SmolLM2-135M-Instruct continues eight short texts. A reward of 0 or 1, which the start policy earns with probability .1
to .3 on each of them, has a known optimum, so the distance of the trained policy from the best one can be measured:

    J(π)                = mean over prompts of s − β·KL(π ‖ π_ref)             s: success rate of π
    J*                  = mean over prompts of β·log(1 − p + p·e^{1/β})        p: success rate of π_ref
    fraction of optimum = (J(π) − J(π_ref)) / (J* − J(π_ref))                  1 − regret
    KL efficiency       = least KL that gives the success rates / KL spent

--tokens 1    answers of one token, which should be one of a few words: one forward pass over the prompts gives the
              whole policy, so everything is exact.
              Promise: fraction of optimum at least .95 within 15 minutes on two CPU cores.
--tokens 16   answers of 16 tokens, which should begin with one of a few words and continue as they would have,
              measured on answers to each prompt before and after training.
              Promise: fraction of optimum at least .95, KL efficiency at least .8. 16,000 answers come to .97 ± .01
              and .95 ± .02 in about two hours on one core, where the errors are mostly those of the start policy's
              success rates; 10,880 answers to .93 and .91. (With a critic that is a head on the policy, all layers
              and λ .95, 7,680 answers in two epochs came to .76 ± .02 and .73 ± .03.)

Prints the course and the end, writes both to real_optimum.json in the output folder, and exits with 1 if a promise is
not kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from tether.cli.display import RunDisplay
from tether.config.load import parse_config
from tether.config.schema import RunConfig
from tether.data.collate import pad_left
from tether.data.queries import QueryFormat, encoded_queries
from tether.demo.model import prepare_model
from tether.demo.run import cache_folder
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.models.tokenizer import load_tokenizer
from tether.train.display import Display
from tether.train.inputs import resolved
from tether.train.log import SAMPLES
from tether.train.run import RunResult, train_policy

PROMPTS = (
    *("The old man", "My dog likes", "We went to", "She said that"),
    *("In the morning", "They have been", "You can see", "There was a"),
)
"""Prompts of three SmolLM2 tokens each, so that nothing is padded."""
LEAST, MOST = 0.1, 0.3
"""Bounds of the start policy's success rate on every prompt."""
LEAST_OF_FIRST = 0.15
"""Minimum share of first tokens that are a wanted word if answers continue: some of them begin another word."""
RESULT = "real_optimum.json"
RESAMPLES = 500
"""Number of bootstrap samples."""
ROWS = 13
"""Number of rows in the table of a run's course."""

RECIPES = {
    1: """
model: {path: SmolLM2-135M-Instruct, lora: {r: 16, alpha: 32}}
value: {kind: head}
rewards: [{type: function, path: real_optimum.py, name: is_wanted}]
data: {prompts: prompts.jsonl, chat_template: none}
sampling: {response_length: 1, batch_size: 128}
ppo:
  kl_coef: 0.1
  num_ppo_epochs: 2
  num_mini_batches: 4
  whiten_advantages: false    # at the optimum every advantage is 0, and with it the noise of the gradient
  cliprange_value: null
train:
  max_steps: 50
  rollout_batch_size: 128     # a word that no answer tries is not learned: small batches end on a few of the words
  micro_batch_size: 32
  learning_rate: 1.0e-4
  adam_beta2: 0.95            # advantages shrink on the way to the optimum, and steps should not
  log_samples: 0
output_dir: runs/real-optimum
overwrite_output_dir: true
""",
    16: """
model:
  path: SmolLM2-135M-Instruct
  lora: {r: 16, alpha: 32, target_modules: '.*layers[.]2[0-9][.].*_proj'}    # the last ten of thirty: a short way back
value: {kind: adapter, learning_rate: 1.0e-3}    # the noise of the gradient is mostly that of the critic
rewards: [{type: function, path: real_optimum.py, name: begins_well}]
data: {prompts: prompts.jsonl, eval_prompts: eval_prompts.jsonl, chat_template: none}
sampling: {response_length: 16, batch_size: 128}
ppo:
  kl_coef: 0.2
  num_ppo_epochs: 1
  num_mini_batches: 4
  lam: 0.7                    # a token's own KL counts, and that of later ones is mostly noise
  whiten_advantages: false
  cliprange_value: null
train:
  max_steps: 125
  rollout_batch_size: 128
  micro_batch_size: 32
  learning_rate: 3.0e-4
  warmup_ratio: 0.03
  adam_beta2: 0.95
  adam_epsilon: 1.0e-8        # a mean over sixteen tokens, most of which are of no account, has small gradients
  log_samples: 0
output_dir: runs/real-optimum
overwrite_output_dir: true
""",
}
"""Settings of the runs, by the length of the answers; paths are filled in."""


# The optimum


@dataclass(frozen=True)
class Standing:
    """Where a policy stands between the reference and the optimum; rates and nats are means over prompts."""

    success: float
    """Success rate, E[r]."""
    kl: float
    """KL(π ‖ π_ref), nats per answer."""
    objective: float
    """E[r] − β·KL."""
    fraction: float
    """Share of the possible gain over the reference, 1 − regret."""
    kl_efficiency: float
    """Least KL for these success rates over the KL spent; NaN where none is spent."""


def optimum(p: Float[Tensor, " X"], beta: float) -> Float[Tensor, " X"]:
    """The largest E[r] − β·KL(π ‖ π_ref) of any policy, for a reward of 0 or 1 that the reference earns with rate p.

        J* = β·log(1 − p + p·e^{1/β})

    Source: Donsker and Varadhan 1975; Rafailov et al. 2023, eq. 4, https://arxiv.org/abs/2305.18290
    """
    return beta * torch.log1p(p * math.expm1(1 / beta))


def least_kl(s: Float[Tensor, " X"], p: Float[Tensor, " X"]) -> Float[Tensor, " X"]:
    """The least KL(π ‖ π_ref) of a policy with success rate s where the reference has p, in nats.

        s·log(s/p) + (1 − s)·log((1 − s)/(1 − p))

    The KL between two coins: success or failure carries no more information than the whole answer.
    """
    return torch.special.xlogy(s, s / p) + torch.special.xlogy(1 - s, (1 - s) / (1 - p))


def standing(
    s: Float[Tensor, " X"], kl: Float[Tensor, " X"], p: Float[Tensor, " X"], *, beta: float
) -> Standing:
    """Where a policy with these success rates and KLs stands.

    Args:
        p: success rates of the reference.
    """
    objective, start, best = (float(x.mean()) for x in (s - beta * kl, p, optimum(p, beta)))
    spent = float(kl.mean())
    efficiency = float(least_kl(s, p).mean()) / spent if spent > 0 else math.nan
    return Standing(float(s.mean()), spent, objective, (objective - start) / (best - start), efficiency)


# Runs


@dataclass(frozen=True)
class Point:
    """How far a run had come."""

    episodes: int
    """Number of answers trained on."""
    seconds: float
    """Seconds since the first update began."""
    success: float
    """Success rate."""
    kl: float
    """KL(π ‖ π_ref), nats per answer."""
    fraction: float
    """Fraction of optimum."""


@dataclass(frozen=True)
class Trial:
    """The result of a run."""

    course: list[Point]
    """From the start policy to the trained one; for 16 tokens measured on the answers of each update, and so
    noisier."""
    end: Standing
    """The trained policy."""
    errors: Standing | None
    """Standard errors of ``end``; None if it is exact."""
    start_rates: list[float]
    """Success rate of the start policy on each prompt."""
    seconds: float
    """Wall time of the run, loading and measuring included."""


def recipe(tokens: int, model: Path, output: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings for answers of ``tokens`` tokens, with the paths of this machine and any changes."""
    own = [
        f"--model.path={model}",
        f"--rewards.0.path={Path(__file__)}",
        f"--data.prompts={output / 'prompts.jsonl'}",
        f"--output_dir={output / 'run'}",
    ]
    if tokens > 1:
        own.append(f"--data.eval_prompts={output / 'eval_prompts.jsonl'}")
    return parse_config(RECIPES[tokens], RunConfig, overrides=[*own, *overrides])


def write_prompts(file: str, prompts: Sequence[str], words: Sequence[Sequence[str]], *, times: int = 1) -> None:
    """Writes every prompt ``times`` times, with the words that its answers are judged by, to a file of prompts."""
    rows = [
        json.dumps({"prompt": prompt, "words": each}) + "\n"
        for prompt, each in zip(prompts, words, strict=True)
        for _ in range(times)
    ]
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(rows), encoding="utf-8")


def timed_run(
    config: RunConfig, display: Display, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[RunResult, float]:
    """The finished run and its wall time; ends the program if the run was interrupted."""
    began = time.perf_counter()
    result = train_policy(config, display=display, callbacks=callbacks)
    if result.interrupted is not None:
        sys.exit(130)
    return result, time.perf_counter() - began


# Answers of one token


def is_wanted(prompts: Sequence[str], completions: Sequence[str], words: Sequence[Sequence[str]]) -> list[float]:
    """1 for an answer that is, apart from surrounding spaces, one of the words of its prompt."""
    return [float(text.strip() in own) for text, own in zip(completions, words, strict=True)]


def drawn_words(
    probabilities: Sequence[float], texts: Sequence[str], rng: random.Random, least: float = LEAST
) -> list[str]:
    """Words that make up ``least`` to ``MOST`` of the first tokens.

    They are drawn from the reference; one that would raise the sum above ``MOST`` is skipped.

    Args:
        probabilities: probability of each token of the vocabulary under the reference.
        texts: the tokens as text.

    Raises:
        ValueError: there are no such words.
    """
    shares: dict[str, float] = {}
    for probability, text in zip(probabilities, texts, strict=True):
        if word := text.strip():
            shares[word] = shares.get(word, 0.0) + probability
    drawn, total = [], 0.0
    while total < least:
        fitting = {word: share for word, share in shares.items() if 0 < share <= MOST - total}
        if not fitting:
            raise ValueError(f"no words are between {least:.0%} and {MOST:.0%} of the first tokens")
        (word,) = rng.choices(list(fitting), list(fitting.values()))
        drawn.append(word)
        total += shares.pop(word)
    return drawn


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, queries: Sequence[Sequence[int]], *, bf16: bool) -> Float[Tensor, "X V"]:
    """log π of every token after each query, the softmax in float64.

    Args:
        bf16: whether the forward is under bfloat16 autocast, as in the run.
    """
    device = model.get_input_embeddings().weight.device
    ids, mask, positions = (x.to(device) for x in pad_left(queries))
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    return logits[:, -1].double().log_softmax(dim=-1).cpu()


def success_and_kl(
    logprobs: Float[Tensor, "X V"], ref_logprobs: Float[Tensor, "X V"], rewarded: Bool[Tensor, "X V"]
) -> tuple[Float[Tensor, " X"], Float[Tensor, " X"]]:
    """Success rate and KL(π ‖ π_ref) of one-token answers, for each prompt."""
    probabilities = logprobs.exp()
    return (probabilities * rewarded).sum(dim=1), (probabilities * (logprobs - ref_logprobs)).sum(dim=1)


class OptimumMeter(TrainerCallback):
    """Measures the policy exactly before training, every few updates and after it.

    Args:
        queries: the prompts as token ids.
        rewarded: True on the tokens that are a success after each prompt.
        every: updates between two measurements.
        bf16: whether the run's forwards are under bfloat16 autocast.
    """

    def __init__(
        self,
        queries: Sequence[Sequence[int]],
        rewarded: Bool[Tensor, "X V"],
        *,
        beta: float,
        every: int,
        bf16: bool,
    ) -> None:
        self._queries, self._rewarded, self._beta, self._every, self._bf16 = queries, rewarded, beta, every, bf16
        self.course: list[tuple[int, float, Standing]] = []
        """Number of updates, seconds since the first one began, and the policy's standing."""
        self.start_rates: Float[Tensor, " X"] | None = None
        """Success rate of the start policy, which is the reference, on each prompt."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Remembers the reference."""
        self._ref_logprobs = next_logprobs(model, self._queries, bf16=self._bf16)
        self.start_rates, _ = success_and_kl(self._ref_logprobs, self._ref_logprobs, self._rewarded)
        self._began = time.perf_counter()
        self._measure(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Measures, if due."""
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._measure(model, state.global_step)

    def _measure(self, model: Any, updates: int) -> None:
        seconds = time.perf_counter() - self._began
        s, kl = success_and_kl(
            next_logprobs(model, self._queries, bf16=self._bf16), self._ref_logprobs, self._rewarded
        )
        self.course.append((updates, seconds, standing(s, kl, self.start_rates, beta=self._beta)))


@dataclass(frozen=True)
class Task:
    """What the answers should be."""

    queries: list[list[int]]
    """The prompts as token ids."""
    texts: list[str]
    """The tokens of the vocabulary as text."""
    words: list[list[str]]
    """The words wanted for each prompt."""


def drawn_task(config: RunConfig) -> Task:
    """The prompts, with words drawn from the start policy's first tokens."""
    model, tokenizer = load_causal_lm(config.model.path, dtype=torch.float32), load_tokenizer(config.model.path)
    _, queries = encoded_queries(PROMPTS, QueryFormat(tokenizer, chat_template="none"), PROMPTS, [{}] * len(PROMPTS))
    reference = next_logprobs(model, queries, bf16=False).exp()
    texts = tokenizer.batch_decode([[token] for token in range(reference.shape[1])], skip_special_tokens=True)
    least = LEAST if config.sampling.response_length == 1 else LEAST_OF_FIRST
    words = [
        drawn_words(row, texts, random.Random(f"{config.train.seed}/{text}"), least)
        for row, text in zip(reference.tolist(), PROMPTS, strict=True)
    ]
    return Task(queries, texts, words)


def one_token(config: RunConfig, display: Display) -> Trial:
    """Trains on answers of one token and measures the policy exactly along the way."""
    task = drawn_task(config)
    write_prompts(config.data.prompts, PROMPTS, task.words)
    rewarded = torch.tensor([is_wanted(task.texts, task.texts, [own] * len(task.texts)) for own in task.words]) == 1
    bf16 = bool(resolved(config).train.bf16)
    meter = OptimumMeter(task.queries, rewarded, beta=config.ppo.kl_coef, every=5, bf16=bf16)
    _, seconds = timed_run(config, display, [meter])
    course = [
        Point(updates * config.train.rollout_batch_size, at, now.success, now.kl, now.fraction)
        for updates, at, now in meter.course
    ]
    return Trial(course, meter.course[-1][2], None, meter.start_rates.tolist(), seconds)


# Answers of 16 tokens


def begins_well(
    prompts: Sequence[str], completions: Sequence[str], words: Sequence[Sequence[str]]
) -> list[list[list[float]]]:
    """1 for an answer whose first word, or run of other signs, is one of the words of its prompt.

    The score falls on the token that writes the first character after the word, since no earlier token determines the
    word: ``[[end, score]]``, a step of the answer.
    """
    firsts = [re.match(r"\s*(\w+|[^\w\s]+)?", text) for text in completions]
    return [
        [[min(first.end() + 1, len(text)), float(first[1] in own)]]
        for text, first, own in zip(completions, firsts, words, strict=True)
    ]


def measured(
    before: Float[Tensor, "X N"], after: Float[Tensor, "X N"], kl: Float[Tensor, "X N"], *, beta: float
) -> Standing:
    """Where a policy stands, by N answers to each prompt.

    Args:
        before: 1 for each success of the reference.
        after: 1 for each success of the policy.
        kl: log π(y) − log π_ref(y) of the policy's answers.
    """
    return standing(after.mean(dim=1), kl.mean(dim=1), before.mean(dim=1), beta=beta)


def standard_errors(
    before: Float[Tensor, "X N"], after: Float[Tensor, "X N"], kl: Float[Tensor, "X N"], *, beta: float, seed: int
) -> Standing:
    """Standard errors of ``measured``, by bootstrap over each prompt's answers.

    Answers with the same index are drawn together: before and after, they were sampled with the same noise.

    Source: Efron 1979, https://doi.org/10.1214/aos/1176344552
    """
    generator = torch.Generator().manual_seed(seed)
    standings = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(before.shape[1], before.shape, generator=generator)
        resampled = (x.gather(1, drawn) for x in (before, after, kl))
        standings.append(list(asdict(measured(*resampled, beta=beta)).values()))
    return Standing(*torch.tensor(standings, dtype=torch.float64).std(dim=0).tolist())


def sixteen_tokens(config: RunConfig, display: Display, *, samples: int) -> Trial:
    """Trains on answers of 16 tokens and measures the start policy and the trained one by ``samples`` per prompt."""
    prompts, words = PROMPTS, drawn_task(config).words
    write_prompts(config.data.prompts, prompts, words)
    write_prompts(config.data.eval_prompts, prompts, words, times=samples)
    result, seconds = timed_run(config, display)
    rows = [row for row in read_jsonl(config.output_dir / SAMPLES) if row["split"] == "eval"]

    def of(key: str, step: int) -> Float[Tensor, "X N"]:
        values = {row["row"]: row[key] for row in rows if row["step"] == step}
        return torch.tensor([values[i] for i in sorted(values)], dtype=torch.float64).view(len(prompts), samples)

    beta, last = config.ppo.kl_coef, len(result.updates)
    before, after, kl = of("score", 0), of("score", last), of("kl", last)
    rates, end = before.mean(dim=1), measured(before, after, kl, beta=beta)
    start, best = float(rates.mean()), float(optimum(rates, beta).mean())
    at, course = 0.0, []
    for update in result.updates:  # its answers are those of the policy before it
        success, spent = update["objective/scores"], update["objective/kl"]
        fraction = (success - beta * spent - start) / (best - start)
        course.append(Point(len(course) * config.train.rollout_batch_size, at, success, spent, fraction))
        at += update["time/step_s"]
    course.append(Point(len(course) * config.train.rollout_batch_size, at, end.success, end.kl, end.fraction))
    errors = standard_errors(before, after, kl, beta=beta, seed=config.train.seed)
    return Trial(course, end, errors, rates.tolist(), seconds)


# The promises


def promises(trial: Trial, tokens: int) -> dict[str, tuple[str, bool]]:
    """Each promise: what was measured, and whether it was kept."""
    end, errors = trial.end, trial.errors
    kept = {"fraction of optimum": (_number(end.fraction, errors and errors.fraction), end.fraction >= 0.95)}
    if tokens == 1:
        kept["minutes"] = (f"{trial.seconds / 60:.1f}", trial.seconds <= 900)
    else:
        efficiency = _number(end.kl_efficiency, errors and errors.kl_efficiency)
        kept["KL efficiency"] = (efficiency, end.kl_efficiency >= 0.8)
    return kept


def tell(trial: Trial, tokens: int, console: Console) -> None:
    """Prints the course, the end and the promises."""
    table = Table("answers", "seconds", "success", "KL", "fraction of optimum", title=f"answers of {tokens} tokens")
    last = len(trial.course) - 1
    for i in sorted({round(last * k / (ROWS - 1)) for k in range(ROWS)}):
        point = trial.course[i]
        numbers = (point.success, point.kl, point.fraction)
        table.add_row(str(point.episodes), f"{point.seconds:.0f}", *(f"{number:.3f}" for number in numbers))
    console.print(table)
    low, high = min(trial.start_rates), max(trial.start_rates)
    console.print(f"success rate of the start policy on each prompt: {low:.3f} to {high:.3f}")
    for name, value in asdict(trial.end).items():
        console.print(f"{name}: {_number(value, trial.errors and getattr(trial.errors, name))}")
    for name, (value, is_kept) in promises(trial, tokens).items():
        console.print(f"promise on {name}: {value}, {'kept' if is_kept else 'not kept'}")


def _number(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def main() -> int:
    """Runs one of the two; unknown arguments override the run's settings, as on Tether's command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, choices=sorted(RECIPES), required=True)
    parser.add_argument("--model", type=Path, help="folder of the start policy (default: the demo's model)")
    parser.add_argument("--samples", type=int, default=512, help="answers per prompt for measuring 16 tokens")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/real-optimum"))
    given, overrides = parser.parse_known_args()

    model = given.model or prepare_model(cache_folder())
    config = recipe(given.tokens, model, given.output / f"tokens-{given.tokens}", overrides)
    with RunDisplay() as display:
        if given.tokens == 1:
            trial = one_token(config, display)
        else:
            trial = sixteen_tokens(config, display, samples=given.samples)
    tell(trial, given.tokens, Console())
    kept = promises(trial, given.tokens)
    report = {"tokens": given.tokens, "promises": {name: ok for name, (_, ok) in kept.items()}, **asdict(trial)}
    file = given.output / f"tokens-{given.tokens}" / RESULT
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(report["promises"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
