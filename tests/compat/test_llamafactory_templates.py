"""LLaMA-Factory's templates: the pieces that it encodes one by one, and ours by the names that its files have."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from tether.compat.llamafactory_keys import OTHER_TEMPLATES, TEMPLATES
from tether.models.chat import LLAMAFACTORY, NAMES, TOKENS, templated

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ZEPHYR = "You are Zephyr, a helpful assistant."
IM, HEADER = "<|im_start|>", "<|start_header_id|>"


def chatml(role, content):
    return f"{IM}{role}\n{content}<|im_end|>\n"


def gemma(content):
    return f"<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n"


def llama3(role, content):
    return f"{HEADER}{role}<|end_header_id|>\n\n{content}<|eot_id|>"


def phi(role, content):
    return f"<|{role}|>\n{content}<|end|>\n"


CHATML, LLAMA3, PHI = f"{IM}assistant\n", f"{HEADER}assistant<|end_header_id|>\n\n", "<|assistant|>\n"
GEMMA = {
    "prefix": ["<bos>"], "user": lambda text: [gemma(text)], "assistant": lambda text: [f"{text}<end_of_turn>\n"],
    "within": "{}\n\n",
}  # fmt: skip
THEIRS = {
    "alpaca": {
        "usual": ALPACA, "system": lambda text: [text],
        "user": lambda text: [f"### Instruction:\n{text}\n\n### Response:\n"],
        "assistant": lambda text: [text, "<eos>", "\n\n"],
    },
    "chatml": {
        "system": lambda text: [chatml("system", text)], "user": lambda text: [chatml("user", text) + CHATML],
        "assistant": lambda text: [f"{text}<|im_end|>\n"],
    },
    "default": {
        "system": lambda text: [f"System: {text}", "<eos>", "\n"],
        "user": lambda text: [f"Human: {text}", "<eos>", "\nAssistant:"],
        "assistant": lambda text: [text, "<eos>", "\n"],
    },
    "empty": {"system": lambda text: [text], "user": lambda text: [text], "assistant": lambda text: [text]},
    "fewshot": {"system": lambda text: [text], "user": lambda text: [text], "assistant": lambda text: [f"{text}\n\n"]},
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "llama2": {
        "user": lambda text: ["<bos>", f"[INST] {text} [/INST]"], "assistant": lambda text: [text, "<eos>"],
        "within": "<<SYS>>\n{}\n<</SYS>>\n\n",
    },
    "llama3": {
        "prefix": ["<bos>"], "system": lambda text: [llama3("system", text)],
        "user": lambda text: [llama3("user", text) + LLAMA3], "assistant": lambda text: [f"{text}<|eot_id|>"],
    },
    "mistral": {
        "prefix": ["<bos>"], "user": lambda text: [f"[INST] {text}[/INST]"],
        "assistant": lambda text: [f" {text}", "<eos>"], "within": "{}\n\n",
    },
    "phi": {
        "system": lambda text: [phi("system", text)], "user": lambda text: [phi("user", text) + PHI],
        "assistant": lambda text: [f"{text}<|end|>\n"],
    },
    "qwen": {
        "usual": QWEN, "system": lambda text: [chatml("system", text)],
        "user": lambda text: [chatml("user", text) + CHATML], "assistant": lambda text: [f"{text}<|im_end|>\n"],
    },
    "vicuna": {
        "usual": VICUNA, "system": lambda text: [text], "user": lambda text: [f"USER: {text} ASSISTANT:"],
        "assistant": lambda text: [text, "<eos>"],
    },
    "zephyr": {
        "usual": ZEPHYR, "system": lambda text: [f"<|system|>\n{text}", "<eos>"],
        "user": lambda text: [f"<|user|>\n{text}", "<eos>", "<|assistant|>\n"],
        "assistant": lambda text: [text, "<eos>"],
    },
}  # fmt: skip
"""Their slots, by register_template's arguments; ``within``: the system prompt is put into the first user turn."""


def pieces(name, turns):
    """What they encode, piece by piece, for the contents of alternating turns, which a system prompt may precede."""
    slots, (system, *contents) = THEIRS[name], turns
    system = system or slots.get("usual")
    made = list(slots.get("prefix", []))
    if system and "within" in slots:
        contents = [slots["within"].format(system) + contents[0], *contents[1:]]
    elif system:
        made += slots["system"](system)
    for i, content in enumerate(contents):
        made += slots["assistant" if i % 2 else "user"](content)
    return made


CASES = [(None, "Hi"), ("Be brief.", "Hi"), (None, "Hi", "Yo", "More"), ("Be brief.", "Hi", "Yo", "More")]


def messages(turns):
    system, *contents = turns
    told = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return told + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def tokenizer_for(kind, name):
    """One token a character.

    Args:
        kind: ``plain`` text is taken as it is; else a blank is put before every text, ``each`` after special tokens
            too, ``first`` not there.
    """
    words = ["<unk>", "\n", "▁", *map(chr, range(32, 127))]
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    if kind == "each":
        backend.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    elif kind == "first":
        backend.pre_tokenizer = Metaspace("▁", "first", split=False)
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    own = TOKENS.get(TEMPLATES[name], ())
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in own])
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", CASES)
def test_the_text_is_theirs(name, turns):
    tokenizer = templated(tokenizer_for("plain", name), TEMPLATES[name])
    text = tokenizer.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
    assert text == "".join(pieces(name, turns))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if TEMPLATES[name] in LLAMAFACTORY])
@pytest.mark.parametrize("turns", CASES)
@pytest.mark.parametrize("kind", ["each", "first"])
def test_the_tokens_are_theirs_where_every_text_begins_with_a_blank(name, turns, kind):
    plain = tokenizer_for(kind, name)
    tokenizer = templated(plain, TEMPLATES[name])
    text = tokenizer.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
    theirs = [plain(piece, add_special_tokens=False)["input_ids"] for piece in pieces(name, turns)]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [token for ids in theirs for token in ids]


def test_by_hand():
    """Three of them in full."""
    expected = {
        "vicuna": f"{VICUNA}USER: Hi ASSISTANT:",
        "alpaca": f"{ALPACA}### Instruction:\nHi\n\n### Response:\n",
        "zephyr": f"<|system|>\n{ZEPHYR}<eos><|user|>\nHi<eos><|assistant|>\n",
    }
    for name, text in expected.items():
        tokenizer = templated(tokenizer_for("plain", name), TEMPLATES[name])
        assert tokenizer.apply_chat_template(messages((None, "Hi")), tokenize=False, add_generation_prompt=True) == text


def test_every_template_has_its_name():
    assert set(TEMPLATES) == set(THEIRS)
    assert set(TEMPLATES.values()) - {*NAMES} == set(LLAMAFACTORY)
    assert not set(TEMPLATES) & {*OTHER_TEMPLATES.split()}
