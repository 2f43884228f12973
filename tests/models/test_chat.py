"""Chat templates by name: the exact text of each, and where an answer ends."""

import pytest
from tokenizers import AddedToken

from tests.tiny import EOS, tiny_tokenizer
from tether.errors import ConfigError
from tether.models.chat import NAMES, TOKENS, check_template, check_template_kwargs, templated, turn_end
from tether.models.tokenizer import stop_token_ids

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "More"},
]
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
TEXTS = {
    "alpaca": "<bos>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYo<eos>\n\n### Instruction:\nMore\n\n"
    "### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"
    "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n"
    "<start_of_turn>user\nMore<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<bos>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yo <eos><bos>[INST] More [/INST]",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nMore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<bos>[INST] Be brief.\n\nHi[/INST] Yo<eos>[INST] More[/INST]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYo<|end|>\n<|user|>\nMore<|end|>\n"
    "<|assistant|>\n",
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"
    "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n",
    "vicuna": "<bos>Be brief. USER: Hi ASSISTANT: Yo<eos>USER: More ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.<eos>\n<|user|>\nHi<eos>\n<|assistant|>\nYo<eos>\n<|user|>\nMore<eos>\n"
    "<|assistant|>\n",
}
ALONE = {
    "alpaca": f"<bos>{ALPACA}\n\n### Instruction:\nHi\n\n### Response:\n",
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<bos>[INST] Hi [/INST]",
    "llama3": "<bos><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n",
    "mistral": "<bos>[INST] Hi[/INST]",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\n",
    "qwen": f"<|im_start|>system\n{QWEN}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "vicuna": f"<bos>{VICUNA} USER: Hi ASSISTANT:",
    "zephyr": "<|user|>\nHi<eos>\n<|assistant|>\n",
}
ENDS = {
    "chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi3": "<|end|>", "qwen": "<|im_end|>",
}  # fmt: skip


def tokenizer_for(name):
    """A tokenizer without a template of its own that has the tokens of the named one."""
    tokenizer = tiny_tokenizer(bos=True, chat_template=False)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS.get(name, ())])
    return tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_conversation_and_of_a_lone_question(name):
    tokenizer = templated(tokenizer_for(name), name)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == TEXTS[name]
    alone = tokenizer.apply_chat_template(TURNS[1:2], tokenize=False, add_generation_prompt=True)
    assert alone == ALONE[name]


@pytest.mark.parametrize("name", NAMES)
def test_answers_end_at_the_templates_own_token(name, tmp_path):
    given = tokenizer_for(name)
    tokenizer = templated(given, name)
    end = ENDS.get(name, "<eos>")
    assert (tokenizer.eos_token, given.eos_token, given.chat_template) == (end, "<eos>", None)
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert (again.eos_token, again.chat_template) == (end, tokenizer.chat_template)
    assert stop_token_ids(again, None, "eos") == {again.convert_tokens_to_ids(end)}


def test_every_template_is_tested():
    assert set(NAMES) == set(TEXTS) == set(ALONE)


def test_the_tokenizers_own_template_ends_answers_too():
    """Where neither the tokenizer's end token nor the generation config knows of it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "<system>")
    system = tokenizer.convert_tokens_to_ids("<system>")
    assert templated(tokenizer, "auto") is tokenizer
    assert stop_token_ids(tokenizer, None, "eos") == {EOS, system}


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, None),
        ("{% for m in messages %}{{ m.content }} cat {% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{% for m in messages %}{{ m.content }}\n<assistant> <eos>{% endfor %}", "<assistant>"),
    ],
)
def test_a_turn_ends_at_a_special_token_right_after_it(template, end):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert turn_end(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_a_file_may_hold_the_template(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}")
    check_template(str(tmp_path / "own.jinja"))
    tokenizer = templated(tiny_tokenizer(chat_template=False), str(tmp_path / "own.jinja"))
    assert tokenizer.apply_chat_template(TURNS[1:2], tokenize=False) == "user: Hi<eos>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatmal", "got chatmal, wanted auto, none, a file that ends in .jinja, or one of alpaca, chatml"),
        ("none.jinja", "none.jinja cannot be read"),
    ],
)
def test_what_is_no_template(template, message):
    with pytest.raises(ConfigError, match=rf"^data\.chat_template: {message}"):
        check_template(template)


def test_a_template_needs_its_tokens():
    with pytest.raises(ConfigError, match=r"llama3 needs <\|start_header_id\|> and .* as tokens, which the tokenizer"):
        templated(tiny_tokenizer(), "llama3")


def test_arguments_that_the_template_makes_no_use_of_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking %}<system>{% endif %}" + tokenizer.chat_template
    check_template_kwargs(tokenizer, {"enable_thinking": True})
    with pytest.raises(ConfigError, match=r"^data\.chat_template_kwargs\.thinking: the chat template does not use"):
        check_template_kwargs(tokenizer, {"thinking": True})
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        check_template_kwargs(tiny_tokenizer(chat_template=False), {"enable_thinking": True})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }", r"odd\.jinja refuses a lone user turn: unexpected '}'"),
        ("{{ raise_exception('a system message first') }}", "refuses a lone user turn: a system message first"),
        ("<user> {{ eos_token }}", r"odd\.jinja writes '<user> <eos>' for a user turn, without the user's text"),
        ("", "writes '' for a user turn"),
    ],
)
def test_a_file_that_is_no_template_for_a_lone_question(tmp_path, template, message):
    (tmp_path / "odd.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"^data.chat_template: .*{message}"):
        templated(tiny_tokenizer(), str(tmp_path / "odd.jinja"))
