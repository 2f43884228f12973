"""Tokenizers and models small enough for any test, built in memory: nothing is downloaded.

Vocabulary: 7 special tokens and 33 words, split at spaces. The chat template ends every turn with the end token, as
Qwen's does, so a prompt holds end tokens that no answer wrote; with ``bos`` both template and tokenizer write one.

AutoTokenizer reads every Qwen2 folder as byte-pair encoding, so ``save_tiny`` gives that kind a tokenizer of its own:
the same ids for the special tokens and for words after a space, plus letters and beginnings of words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)

Kind = Literal["gpt2", "llama", "qwen2"]
KINDS: tuple[Kind, ...] = ("gpt2", "llama", "qwen2")

SPECIAL = ("<unk>", "<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>")
WORDS = (
    *("the", "a", "i", "you", "we", "it", "is", "was", "not", "very", "good", "bad", "nice", "cat", "dog", "sun"),
    *("rain", "day", "night", "sees", "likes", "hates", "eats", "runs", "and", "or", "but", "red", "blue", "green"),
    *("one", "two", "three"),
)
VOCABULARY = SPECIAL + WORDS
VOCAB_SIZE = len(VOCABULARY)
UNK, BOS, EOS, PAD = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_SPACE = "Ġ"  # how byte-level tokenizers write a space
_BPE_WORDS = [_SPACE + word for word in WORDS]
_BPE_BEGINNINGS = {word[:i] for word in _BPE_WORDS for i in range(1, len(word) + 1)}
_BPE_PARTS = sorted((_BPE_BEGINNINGS | set("".join(WORDS))) - set(_BPE_WORDS))
_BPE_VOCABULARY = (*SPECIAL, *_BPE_WORDS, *_BPE_PARTS)
BPE_VOCAB_SIZE = len(_BPE_VOCABULARY)


def tiny_tokenizer(
    *, pad: Literal["own", "eos"] | None = "own", chat_template: bool = True, bos: bool = False
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of ``VOCAB_SIZE`` tokens.

    Args:
        pad: a pad token of its own, the end token in its place, or none.
        chat_template: whether it has one.
        bos: whether tokenizer and chat template each put ``<bos>`` first.
    """
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if bos:
        backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    names = {"unk_token": "<unk>", "eos_token": "<eos>"} | ({"bos_token": "<bos>"} if bos else {})
    if pad is not None:
        names["pad_token"] = "<pad>" if pad == "own" else "<eos>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if chat_template:
        tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + CHAT_TEMPLATE
    return tokenizer


def tiny_bpe_tokenizer(*, pad: Literal["own", "eos"] = "own", chat_template: bool = True) -> Qwen2Tokenizer:
    """A byte-pair tokenizer that knows the same words, ``BPE_VOCAB_SIZE`` tokens; unknown letters are dropped."""
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(_BPE_VOCABULARY)},
        merges=[(token[:-1], token[-1]) for token in sorted(_BPE_BEGINNINGS, key=len) if len(token) > 1],
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>" if pad == "own" else "<eos>",
        extra_special_tokens=["<bos>", "<system>", "<user>", "<assistant>"],
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(
    kind: Kind, *, tied: bool = True, vocab_size: int = VOCAB_SIZE, hidden: int = 16, **overrides
) -> PreTrainedConfig:
    """Two layers, ``max_position_embeddings`` 128, weights spread widely enough that logits are far from flat."""
    shared = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    } | overrides
    if kind == "gpt2":
        return GPT2Config(n_embd=hidden, n_layer=2, n_head=2, n_positions=128, **shared)
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind]
    return config_class(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"max_position_embeddings": 128} | shared,
    )


def tiny_causal_lm(
    kind: Kind = "llama",
    *,
    tied: bool = True,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    hidden: int = 16,
    **overrides,
) -> PreTrainedModel:
    """A random float32 causal language model in train mode; GPT-2's dropout is on as by default."""
    config = tiny_config(kind, tied=tied, vocab_size=vocab_size, hidden=hidden, **overrides)
    return _seeded(AutoModelForCausalLM, config, seed)


def tiny_classifier(
    kind: Kind = "llama",
    *,
    num_labels: int = 1,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    hidden: int = 16,
    **overrides,
) -> PreTrainedModel:
    """A random float32 sequence classifier."""
    config = tiny_config(kind, vocab_size=vocab_size, hidden=hidden, num_labels=num_labels, **overrides)
    return _seeded(AutoModelForSequenceClassification, config, seed)


def save_tiny(
    folder: Path | str,
    kind: Kind = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 16,
    num_labels: int | None = None,
    pad: Literal["own", "eos"] | None = "own",
    chat_template: bool = True,
    bos: bool = False,
) -> Path:
    """Saves model, tokenizer and generation config, to be loaded by ``from_pretrained``; returns the folder.

    Args:
        num_labels: save a sequence classifier of so many labels instead of a causal language model.
        pad, bos: kind qwen2 always has a pad token and never a BOS.
    """
    if kind == "qwen2":
        assert pad is not None and not bos, "Qwen2's tokenizer always has a pad token and never a BOS"
        tokenizer = tiny_bpe_tokenizer(pad=pad, chat_template=chat_template)
    else:
        tokenizer = tiny_tokenizer(pad=pad, chat_template=chat_template, bos=bos)
    shared = {"vocab_size": len(tokenizer), "seed": seed, "hidden": hidden}
    if num_labels is None:
        model = tiny_causal_lm(kind, tied=tied, **shared)
        model.generation_config = GenerationConfig(eos_token_id=EOS, bos_token_id=BOS, pad_token_id=PAD)
    else:
        model = tiny_classifier(kind, num_labels=num_labels, **shared)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _seeded(auto_class: type, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with weights drawn from ``seed``, the global random state left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto_class.from_config(config, dtype=torch.float32)
