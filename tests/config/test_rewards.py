"""What the sections of reward sources refuse by themselves."""

import pytest
from pydantic import TypeAdapter, ValidationError

from tether.config.rewards import RewardConfig, reward_names

HTTP = {"type": "http", "url": "http://127.0.0.1:8000/score"}
JUDGE = {"type": "judge", "base_url": "https://host/v1", "model": "m", "rubric": "Grade {response} to {prompt}"}


def parsed(section):
    return TypeAdapter(RewardConfig).validate_python(section)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host.example/a/b?c=d", "http://[::1]:8000/score"])
def test_addresses(url):
    assert parsed(HTTP | {"url": url}).url == url
    assert parsed(JUDGE | {"base_url": url}).base_url == url


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (HTTP | {"url": "127.0.0.1:8000/score"}, "wanted an address that begins with http"),
        (HTTP | {"url": "ftp://host/score"}, "wanted an address that begins with http"),
        (HTTP | {"url": "http:///score"}, "wanted an address that begins with http"),
        (HTTP | {"url": "http://host/a b"}, "wanted an address that begins with http"),
        (HTTP | {"url": "http://host:99999/"}, "wanted http://HOST:PORT/PATH"),
        (HTTP | {"url": "http://[host/"}, "wanted http://HOST:PORT/PATH"),
        (HTTP | {"url": "http://user:hidden@host/"}, "put the key into an environment variable"),
        (HTTP | {"api_key_env": "sk-hidden"}, "not the key itself"),
        (HTTP | {"api_key_env": "hf_hidden"}, "not the key itself"),
        (HTTP | {"protocol": "llamafactory", "columns": ["answer"]}, "cannot send them"),
        (JUDGE | {"base_url": "http://host/v1/chat/completions"}, "wanted the address without /chat/completions"),
        (HTTP | {"name": "ours/first"}, "got 'ours/first', wanted a name without /, which separates a source"),
        ({"type": "function", "path": "a.py", "name": "f/g"}, "got 'f/g', wanted a name without /"),
        (HTTP | {"name": " "}, "got ' ', wanted a name"),
        (JUDGE | {"rubric": "Grade this answer"}, "wanted text with {response}"),
        (JUDGE | {"scale": [10, 1]}, "got 10 to 1, wanted the lower number first"),
        (JUDGE | {"extra_body": {"stream": True}}, "holds stream, which the source itself sends or cannot use"),
    ],
)
def test_refused(section, message):
    with pytest.raises(ValidationError) as caught:
        parsed(section)
    (error,) = caught.value.errors()
    assert message in error["msg"]
    assert "hidden" not in error["msg"]


def test_names_are_those_given_or_the_types():
    unnamed, named = parsed(HTTP), parsed(HTTP | {"name": "ours"})
    assert reward_names([unnamed]) == ["http"]
    assert reward_names([unnamed, named, unnamed]) == ["http_0", "ours", "http_2"]
