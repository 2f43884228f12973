"""Reward batches for tests."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.types import RewardBatch


def text_batch(*responses: str, prompts: list | None = None, **columns: list) -> RewardBatch:
    """Answers to plain-text prompts, with made-up token ids."""
    prompts = prompts or [f"prompt {i}" for i in range(len(responses))]
    return RewardBatch(
        prompts=prompts,
        queries=[prompt if isinstance(prompt, str) else "<templated>" for prompt in prompts],
        responses=list(responses),
        query_ids=[[1]] * len(responses),
        response_ids=[[2]] * len(responses),
        conversations=[None if isinstance(prompt, str) else prompt for prompt in prompts],
        columns=columns,
    )


def chat_batch(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]]) -> RewardBatch:
    """One-turn conversations as a policy with this tokenizer answers them, the end token included."""
    prompts = [[{"role": "user", "content": prompt}] for prompt, _ in turns]
    queries = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    end = [tokenizer.eos_token_id]
    return RewardBatch(
        prompts=prompts,
        queries=queries,
        responses=[response for _, response in turns],
        query_ids=[tokenizer(query, add_special_tokens=False)["input_ids"] for query in queries],
        response_ids=[tokenizer(response, add_special_tokens=False)["input_ids"] + end for _, response in turns],
        conversations=prompts,
    )
