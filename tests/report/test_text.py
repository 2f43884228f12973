import json

import pytest

from tether.report.text import (
    amount,
    byte_size,
    duration,
    json_line,
    number,
    one_line,
    percent,
    prompt_text,
    signed,
    visible,
)


def test_a_line_of_json_is_the_same_value_and_acts_on_nothing():
    value = {"a": ["é漢🙂", "\x1b[2J\x9b\u202e\x7f", json.loads(r'"\ud83d"'), "\U000e0041\n"]}
    line = json_line(value)
    assert json.loads(line) == value and line == visible(line)
    assert "é漢🙂" in line and r"\u009b\u202e\u007f" in line
    plain = json_line(value, as_ascii=True)
    assert json.loads(plain) == value and plain.isascii() and plain == visible(plain)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b2J \x07 \x00 \x7f", r"\x9b2J \x07 \x00 \x7f"),
        ("a\rb", r"a\x0db"),
        ("a\r\nb\tc\n", "a\nb\tc\n"),
        (json.loads(r'"\ud83d"'), r"\ud83d"),
        ("user\u202egpj.exe\u202c", r"user\u202egpj.exe\u202c"),
        ("\u2066x\u2069\u200e\u200f\u061c", r"\u2066x\u2069\u200e\u200f\u061c"),
        ("in\u200bvis\ufeffible\xad", r"in\u200bvis\ufeffible\xad"),
        ("line\u2028end\u2029", r"line\u2028end\u2029"),
        ("\U000e0041\ufffe", r"\U000e0041\ufffe"),
    ],
)
def test_what_acts_or_hides_becomes_a_visible_escape(text, shown):
    assert visible(text) == shown
    assert visible(text).encode("utf-8")


def test_ordinary_text_of_any_script_stays_as_it_is():
    text = "naïve 日本語 עברית العربية हिन्दी 👩\u200d👩\u200d👧 \ufffd <b>&\"'[bold]"
    assert visible(text) == text


def test_one_line_collapses_white_space_and_says_that_it_cut():
    assert one_line("  a\n\n b\t c ", 20) == "a b c"
    assert one_line("abcdefghij", 10) == "abcdefghij"
    assert one_line("abcdefghijk", 10) == "abcdefghi…"
    assert len(one_line("word " * 10_000_000, 30)) <= 30
    assert one_line(" " * 1000 + "late", 10).endswith("…")


def test_prompt_text_of_messages_names_the_roles_unless_there_is_one_user_turn():
    assert prompt_text("plain") == "plain"
    assert prompt_text([{"role": "user", "content": "hi"}]) == "hi"
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert prompt_text(turns) == "system: be kind\nuser: hi"
    assert prompt_text(None) == ""
    assert prompt_text(["odd", {"content": 3}]) == "?: odd\n?: 3"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (1.2345, "1.23"), (-0.05, "−0.05"), (0.00123, "0.00123"), (123.4, "123"), (999.7, "1,000"),
        (12345.6, "12,346"), (3.14e-6, "3.1e−6"), (2e7, "2e7"), (float("nan"), "–"), (float("-inf"), "–"), (None, "–"),
    ],
)  # fmt: skip
def test_number(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(1.0, "1 nat"), (0.9999, "1 nat"), (1.01, "1.01 nats"), (0.0, "0 nats"), (None, "– nats")]
)
def test_amount(value, shown):
    assert amount(value, "nat") == shown


def test_signed_and_percent():
    assert [signed(1.5), signed(-1.5), signed(0.0)] == ["+1.5", "−1.5", "0"]
    assert [percent(0.0), percent(0.051), percent(0.5), percent(-0.3), percent(float("nan"))] == [
        "0 %", "5.1 %", "50 %", "−30 %", "–",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0 s"), (42.4, "42 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (100_000, "1 d 3 h")],
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536 * 1024, "1.5 MiB"), (1020 * 2**20, "1020 MiB"),
        (2**34, "16 GiB"),
    ],
)
def test_byte_size(num_bytes, text):
    assert byte_size(num_bytes) == text
