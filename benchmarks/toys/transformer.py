"""A toy language in a small transformer, through everything that a real run goes through.

The transformer is first fitted to the language's reference. Its output then becomes the reference, so that the optimum
and every regret are exact again: one pass over all prefixes gives the whole policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig

from benchmarks.toys.language import END, Language, toy
from benchmarks.toys.run import AfterUpdates, Course, toy_config, toy_prompts, toy_tokenizer
from benchmarks.whole import whole_run
from tether.data.collate import collate
from tether.models.loading import load_causal_lm


def transformer_config(language: Language, kind: str, hidden: int) -> LlamaConfig | GPT2Config:
    """Two layers with the language's vocabulary and tied embeddings.

    Args:
        kind: ``llama`` or ``gpt2``.
    """
    shared = {
        "vocab_size": language.vocab_size,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "tie_word_embeddings": False,
    }
    if kind == "gpt2":
        return GPT2Config(n_embd=hidden, n_layer=2, n_head=4, n_positions=64, **shared)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **shared,
    )


def fit_transformer(
    language: Language, folder: Path, *, kind: str = "llama", hidden: int = 64, steps: int = 1000, seed: int = 0
) -> float:
    """Saves a transformer fitted to the reference; returns its distance from it.

        loss = mean over all states of KL(π_ref(·|s) ‖ π(·|s)),      Adam, learning rate 3e-3 falling to 0

    Args:
        kind: ``llama`` or ``gpt2``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(transformer_config(language, kind, hidden), dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(bos_token_id=END, eos_token_id=END, pad_token_id=END)
    wanted = language.ref_logprobs.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (wanted.exp() * (wanted - prefix_logprobs(model, language))).sum(-1).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    toy_tokenizer(language).save_pretrained(folder)
    return loss.item()


def prefix_logprobs(model: nn.Module, language: Language) -> Float[Tensor, "X S V"]:
    """log π of every token after every prefix, from one pass over the longest prefixes, which hold all others."""
    branches, longest = language.vocab_size - 1, language.max_length - 1
    leaves = range(language.num_prefixes - branches**longest, language.num_prefixes)
    queries = [language.query(x) for x in range(language.num_prompts) for _ in leaves]
    batch = collate(queries, [language.letters(leaf) for leaf in leaves] * language.num_prompts)
    inputs = {"attention_mask": batch.attention_mask.long(), "position_ids": batch.position_ids, "use_cache": False}
    told = batch.response_columns
    told[:, :-1] |= batch.response_columns[:, 1:]  # and the query's last token, after which nothing has been read yet
    logits = model(input_ids=batch.token_ids, **inputs).logits[told]
    logits = logits.view(language.num_prompts, len(leaves), longest + 1, -1)
    levels = [logits[:, :: branches ** (longest - k), k] for k in range(longest + 1)]
    return torch.cat(levels, dim=1).log_softmax(-1)


def train_transformer(name: str, model: Path, folder: Path, changes: Mapping[str, Any]) -> Course:
    """Trains a transformer on a toy by ``train_policy``, from the configuration to the saved policy.

    Args:
        name: name of the toy.
        model: folder that ``fit_transformer`` saved for it.
        folder: folder of the run.
        changes: changes of the configuration, by dotted key.
    """
    with torch.no_grad():
        start = prefix_logprobs(load_causal_lm(str(model), dtype=torch.float32), toy(name)).double()
    language = replace(toy(name), ref_logprobs=start.log_softmax(-1))
    prompts = folder.with_name(f"{folder.name}-prompts.jsonl")
    rows = [json.dumps({"prompt": prompt.text, "language": name}) + "\n" for prompt in toy_prompts(language)]
    prompts.write_text("".join(rows), encoding="utf-8")
    regrets: list[float] = []

    @torch.no_grad()
    def measure(policy: nn.Module) -> None:
        regrets.append(language.regret(prefix_logprobs(policy, language)))

    own = {"model.path": str(model), "data.prompts": str(prompts)}
    config = toy_config(language, folder, own | dict(changes))
    whole_run(config, callbacks=[AfterUpdates(measure)])
    return Course(config.train.rollout_batch_size, regrets)
