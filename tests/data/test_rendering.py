"""Chat templates that print the present date: they print the given one, and all else as without it."""

from datetime import datetime

import pytest

from tests.tiny import tiny_tokenizer
from tether.data.rendering import rendered

TURNS = [{"role": "user", "content": "Hi"}]
MOMENT = datetime(2026, 2, 3, 4, 5, 6)
FORMAT = "%d %b %Y, %A %-d %B %y; %H:%M:%S %I %p %j %F %T%% %%d"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ strftime_now('" + FORMAT + "') }}", MOMENT.strftime(FORMAT)),
        ("{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
         "{{ date_string }}", "03 Feb 2026"),
        ("\n  {% if strftime_now is defined %}\n  is {{ strftime_now(format='%d') }}{% endif %}", "\n  is 03"),
        ("  {% macro f() %}{{ strftime_now('%Y')|int + 1 }}{% endmacro %}{{ f() }}", "2027"),
        ("{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}",
         "26 Jul 2024"),
        ("{{ messages[0].content }}", "Hi"),
    ],
)  # fmt: skip
def test_a_template_that_prints_the_present_date_prints_the_given_one(template, wanted, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert rendered(tokenizer, TURNS, MOMENT.isoformat()) == wanted
    assert tokenizer.chat_template == template, "what is saved is not changed"

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return MOMENT

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    assert rendered(tokenizer, TURNS) == tokenizer.apply_chat_template(TURNS, tokenize=False) == wanted


def test_arguments_of_the_template_go_before_the_date():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ date_string if date_string is defined else strftime_now('%Y') }}{{ strftime_now }}"
    assert rendered(tokenizer, TURNS, "2026-01-01", date_string="then", strftime_now="clock") == "thenclock"


def test_the_template_for_tools_gets_the_date_too():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools {{ strftime_now('%Y') }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(tokenizer, TURNS, "2020-01-01", tools=tools) == "tools 2020"
    assert rendered(tokenizer, TURNS, "2020-01-01") == "plain"
