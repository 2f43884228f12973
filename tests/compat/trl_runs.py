"""Models, datasets and trainers for the tests of ``tether.compat.trl``."""

from __future__ import annotations

import copy
from functools import cache

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny import save_tiny, tiny_tokenizer
from tether.compat.trl import PPOConfig, PPOTrainer

TEXTS = ("the cat sees", "i hates the dog", "you runs and", "it is a good day", "the sun is red", "a nice night")


@cache
def loaded(folder, kind, num_labels):
    """A model saved and loaded once; tests take copies."""
    path = folder / f"{kind}-{num_labels}"
    save_tiny(path, kind, num_labels=num_labels, seed=num_labels or 0)
    if num_labels is None:
        return AutoModelForCausalLM.from_pretrained(path)
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=num_labels)


def policy(folder, kind="llama"):
    return copy.deepcopy(loaded(folder, kind, None))


def classifier(folder, kind="llama", num_labels=1):
    return copy.deepcopy(loaded(folder, kind, num_labels))


def rows(tokenizer, texts=TEXTS):
    """Pre-tokenized prompts."""
    return [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]


def arguments(folder, **changes):
    """Two updates of eight answers."""
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 16, "num_ppo_epochs": 2,
        "response_length": 6, "learning_rate": 1e-3, "report_to": "none", "num_sample_generations": 0,
        "disable_tqdm": True, "stop_token": "eos", "use_cpu": True, "seed": 0,
    }  # fmt: skip
    return PPOConfig(output_dir=str(folder / "out"), **given | changes)


def trainer(folder, *, args=None, **changes):
    """A trainer on tiny models with full fine-tuning; ``changes`` are arguments of ``PPOTrainer``."""
    tokenizer = tiny_tokenizer()
    given = {
        "processing_class": tokenizer, "model": policy(folder), "ref_model": None, "reward_model": classifier(folder),
        "train_dataset": rows(tokenizer), "value_model": classifier(folder),
    }  # fmt: skip
    return PPOTrainer(args or arguments(folder), **given | changes)
