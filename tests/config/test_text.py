"""Configuration text: what is read as what, and what is refused where."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.config import text

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(10**50), 10**50) | st.floats(allow_nan=False) | WORDS
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("5.0e-5", 5e-5),
        ("1e-5", 1e-5),
        ("1E5", 100_000),
        ("1e5", 100_000),
        ("2.5e3", 2500),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("10_000", 10_000),
        ("010", 10),
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        (".inf", math.inf),
        ("yes", "yes"),
        ("on", "on"),
        ("NO", "NO"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_", "1_"),
        ("e5", "e5"),
        (".", "."),
        ("9" * 101, "9" * 101),
        ("'1'", "1"),
        ('"null"', "null"),
        ("[1, a, {b: 1e-2}]", [1, "a", {"b": 0.01}]),
        ("1: 2", {"1": 2}),
    ],
)
def test_a_word_is_read_as_what_it_looks_like(written, value):
    read = text.parse(written).data
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{type:function}", "type:function is one word, as no blank follows its colon: write `type: function`"),
        ("[{type:function, path: f.py}]", "write `type: function`"),
        ("a: 1\nb: {c: 2, d:e:f}", "d:e:f is one word, as no blank follows its colon: write `d: e:f`"),
        ("{a:1,b: 2}", "write `a: 1`"),
    ],
)
def test_a_colon_without_a_blank_after_it_is_told(written, told):
    with pytest.raises(text.TextError, match=re.escape(told)) as error:
        text.parse(written)
    assert error.value.line == written.count("\n") + 1


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{'a:b'}", {"a:b": None}),
        ("{a:b: }", {"a:b": None}),
        ("{a:b: null, c}", {"a:b": None, "c": None}),
        ("a:b:", {"a:b": None}),
        ("{a:b: 'c'}", {"a:b": "c"}),
        ('{"a":1}', {"a": 1}),
        ("[a:b, http://c]", ["a:b", "http://c"]),
    ],
)
def test_a_colon_within_a_word_that_has_a_value_or_quotes_is_part_of_it(written, value):
    assert text.parse(written).data == value


@settings(deadline=None, derandomize=True)
@given(DATA)
def test_what_is_dumped_is_read_as_the_same_data(data):
    assert _typed(text.parse(text.dump(data)).data) == _typed(data)


def _typed(data):
    """The data with the type of every scalar beside it, since 1 == 1.0 == True."""
    if isinstance(data, dict):
        return {key: _typed(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_typed(value) for value in data]
    return type(data), data


def test_every_value_has_its_line():
    document = text.parse("# first\na:\n  b: 1\n  c:\n    - x\n    - {d: 2,\n       e: 3}\n")
    assert document.lines == {
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c"): 4,
        ("a", "c", 0): 5,
        ("a", "c", 1): 6,
        ("a", "c", 1, "d"): 6,
        ("a", "c", 1, "e"): 7,
    }


@pytest.mark.parametrize(
    ("written", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a is set twice, first on line 1"),
        ("a:\n  b: 1\n  'b': 2\n", 3, "a.b is set twice"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tags"),
        ("\na: !!int 1\n", 2, "tags"),
        ("a: &x 1\nb: *x\n", 1, "anchors"),
        ("a: 1\nb: *x\n", 2, "anchors"),
        ("? [a, b]\n: 1\n", 1, "a key must be plain text"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', 2, "a second value starts here; wanted one mapping of keys"),
        ("a: 1\nb: be kind: always\n", 2, "quotes"),
        ("a: [1,\n", 2, "expected"),
        ("a: 1\nb: \x07\n", 2, "character"),
        ('a: "\\0"\n', 1, "character"),
        ('a: "\\uD800"\n', 1, "character"),
        ("[" * 2000, 1, "nested more than"),
    ],
)
def test_what_is_refused_names_its_line(written, line, words):
    with pytest.raises(text.TextError, match=words) as caught:
        text.parse(written)
    assert caught.value.line == line


def test_an_empty_text_holds_nothing():
    assert text.parse("# only a comment\n").data is None
