"""A reward model of another family drives PPO: python benchmarks/other_family.py [--updates 12] [-o FOLDER]

A BERT-type classifier with its own word pieces learns the demo's preference pairs, and then judges
SmolLM2-135M-Instruct during LoRA training. Prints how many held-out pairs the classifier ranks correctly, and the
held-out answers before and after: reward in standard deviations of the start policy's scores, KL, and VADER sentiment,
which was not used in training. Exits with 1 unless the reward rises by at least half a standard deviation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, set_seed

from tether.cli.display import RunDisplay
from tether.config.load import load_config
from tether.demo import vader
from tether.demo.model import prepare_model
from tether.demo.outcome import Outcome, outcome, result_table
from tether.demo.run import DATA, cache_folder
from tether.metrics.writers import read_jsonl
from tether.train.log import SAMPLES
from tether.train.run import train_policy

PROMISE = 0.5
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
HELD_OUT_PAIRS, HELD_OUT_PROMPTS = 100, 64


def word_pieces(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's, with pieces learned from the texts."""
    backend = Tokenizer(WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    backend.train_from_iterator(
        texts, WordPieceTrainer(vocab_size=3000, special_tokens=list(SPECIAL), show_progress=False)
    )
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def train_classifier(folder: Path, *, epochs: int, seed: int) -> float:
    """Trains a small BERT on the demo's pairs by the Bradley-Terry loss; returns its accuracy on held-out pairs."""
    pairs = read_jsonl(DATA / "pairs.jsonl")
    random.Random(seed).shuffle(pairs)
    held_out, pairs = pairs[:HELD_OUT_PAIRS], pairs[HELD_OUT_PAIRS:]
    tokenizer = word_pieces([row[name] for row in pairs for name in ("chosen", "rejected")])
    set_seed(seed)
    size = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=256, **size)
    )
    steps = epochs * -(-len(pairs) // 32)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=steps)
    for _ in range(epochs):
        random.shuffle(pairs)
        for start in range(0, len(pairs), 32):
            loss = -torch.nn.functional.logsigmoid(margins(model, tokenizer, pairs[start : start + 32])).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        return float((margins(model, tokenizer, held_out) > 0).double().mean())


def margins(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, pairs: list[dict]
) -> torch.Tensor:
    """How much higher each pair's chosen answer scores; answers are read without their prompts."""
    answers = [row["chosen"] for row in pairs] + [row["rejected"] for row in pairs]
    batch = tokenizer(answers, padding=True, return_tensors="pt")
    chosen, rejected = model(**batch).logits.squeeze(-1).chunk(2)
    return chosen - rejected


def train_by(judge: Path, folder: Path, *, model: Path, updates: int, seed: int, display: RunDisplay) -> Outcome:
    """Trains the demo's policy to please the classifier and compares its held-out answers."""
    prompts, rows = folder / "held_out.jsonl", read_jsonl(DATA / "held_out.jsonl")[:HELD_OUT_PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward = {"type": "model", "path": str(judge), "name": "bert", "input_format": "response", "norm": "auto"}
    config = load_config(
        DATA / "ppo.yaml",
        [
            f"--model.path={model}",
            f"--rewards={json.dumps([reward])}",
            f"--data.prompts={DATA / 'prompts.jsonl'}",
            f"--data.eval_prompts={prompts}",
            "--ppo.score_norm=null",
            "--ppo.score_norm_samples=64",
            f"--train.max_steps={updates}",
            f"--train.seed={seed}",
            f"--output_dir={folder / 'policy'}",
            "--overwrite_output_dir=true",
        ],
    )
    run = train_policy(config, display=display)
    if run.interrupted is not None:
        raise SystemExit(130)
    return outcome(read_jsonl(run.output_dir / SAMPLES), reward="bert", judge=vader.compound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6, help="of the classifier")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct (default: made from its package)")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/other_family"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    accuracy = train_classifier(given.output / "bert", epochs=given.epochs, seed=given.seed)
    spent = time.perf_counter() - began
    print(f"classifier: {accuracy:.0%} of {HELD_OUT_PAIRS} held-out pairs, {spent:.0f} s", flush=True)
    with RunDisplay() as display:
        result = train_by(
            given.output / "bert",
            given.output,
            model=given.model or prepare_model(cache_folder()),
            updates=given.updates,
            seed=given.seed,
            display=display,
        )
        display.table(f"{len(result.answers)} held-out answers", *result_table(result))
    print(
        f"reward {result.reward_rise_in_std:+.2f} sd (at least {PROMISE:+.1f}), KL {result.kl.means[1]:.2f} nats, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 0 if result.reward_rise_in_std >= PROMISE else 1


if __name__ == "__main__":
    sys.exit(main())
