"""Tiny encoder classifiers with tokenizers of their own kind: right padding, special tokens around the text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from tests.tiny import WORDS

Encoder = Literal["bert", "roberta", "deberta", "bart"]
ENCODERS: tuple[Encoder, ...] = ("bert", "roberta", "deberta")
WITH_DECODER: tuple[Encoder, ...] = (*ENCODERS, "bart")
POSITIONS = 40
BART = ("vocab_size", "max_position_embeddings", "num_labels")
"""Sizes that BART's configuration calls as the others' do."""

_SPECIAL = {"bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]"), "roberta": ("<s>", "<pad>", "</s>", "<unk>")}
_PAIR = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "<s> $A </s> </s> $B </s>"}


def encoder_tokenizer(kind: Encoder) -> PreTrainedTokenizerBase:
    """The words of ``tests.tiny`` in reverse order after the family's special tokens; BERT's also types two texts."""
    family = "roberta" if kind in ("roberta", "bart") else "bert"
    special = _SPECIAL[family]
    first, last = (special[0], special[2]) if family == "roberta" else special[2:]
    vocabulary = {token: i for i, token in enumerate((*special, *reversed(WORDS)))}
    unknown = "<unk>" if family == "roberta" else "[UNK]"
    backend = Tokenizer(WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=_PAIR[family],
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=unknown,
        pad_token="<pad>" if family == "roberta" else "[PAD]",
        cls_token=first,
        sep_token=last,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"][:: 2 if family == "roberta" else 1],
    )


def encoder_config(kind: Encoder, *, num_labels: int = 1) -> PreTrainedConfig:
    """Two layers, weights spread widely enough that scores differ."""
    shared = {
        "vocab_size": len(encoder_tokenizer(kind)),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "num_labels": num_labels,
    }
    if kind == "bert":
        return BertConfig(**shared)
    if kind == "bart":
        layers = {name: 2 for name in ("encoder_layers", "decoder_layers")}
        heads = {name: 2 for name in ("encoder_attention_heads", "decoder_attention_heads")}
        sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.3}
        return BartConfig(**layers, **heads, **sizes, **{k: v for k, v in shared.items() if k in BART})
    if kind == "roberta":
        return RobertaConfig(pad_token_id=1, type_vocab_size=1, **shared)
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return DebertaV2Config(type_vocab_size=0, **relative, **shared)


def save_encoder(folder: Path | str, kind: Encoder = "bert", *, num_labels: int = 1, seed: int = 0) -> Path:
    """Saves classifier and tokenizer, to be loaded by ``from_pretrained``; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(encoder_config(kind, num_labels=num_labels))
    model.save_pretrained(folder)
    encoder_tokenizer(kind).save_pretrained(folder)
    return Path(folder)


@torch.no_grad()
def plain_score(folder: Path | str, *texts: str) -> float:
    """What transformers alone gives for one text, or for a pair of texts."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model(**AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")).logits.item()
