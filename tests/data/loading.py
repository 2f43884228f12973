"""Loads datasets as token ids, with the keys that a test names and defaults for all others."""

from tests.tiny import EOS, tiny_tokenizer
from tether.config.chat import ChatKeys, DataSource
from tether.data import demonstrations, judged, pairs, prompts
from tether.data.bad_rows import Limit
from tether.data.queries import QueryFormat


def load_prompts(given, tokenizer=None, *, limit=64, **keys):
    return prompts.load_prompts(*_records(given, tokenizer, keys), Limit(limit, "data.max_prompt_length"))


def load_pairs(given, tokenizer=None, *, limit=64, end_ids=(EOS,), **keys):
    return pairs.load_pairs(*_records(given, tokenizer, keys), Limit(limit, "data.max_length"), end_ids=end_ids)


def load_demonstrations(
    given, tokenizer=None, *, limit=64, end_ids=(EOS,), every_turn=False, ends_text=False, **keys
):
    records, limit = _records(given, tokenizer, keys), Limit(limit, "data.max_ptx_length")
    how = {"end_ids": end_ids, "every_turn": every_turn, "ends_text": ends_text}
    return demonstrations.load_demonstrations(*records, limit, **how)


def load_judged(given, *, key="FILE", is_chat=True):
    return judged.load_judged(DataSource(given, key), is_chat=is_chat)


def _records(given, tokenizer, keys):
    """What is read, and how its prompts become queries."""
    chat = {name: value for name, value in keys.items() if name in ChatKeys.model_fields}
    named = {"key": "data.k", "columns_key": "data.columns"}
    source = named | {name: value for name, value in keys.items() if name not in chat}
    return DataSource(given, **source), QueryFormat(tokenizer or tiny_tokenizer(), **chat)
