"""The table of architectures: a type that keeps the promise, one that is refused, one that breaks it."""

import logging

import pytest
import torch
import transformers
from benchmarks.architectures import examined, main, small_model

from benchmarks import architectures


@pytest.fixture(autouse=True)
def run(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def table(*kinds):
        monkeypatch.setattr("sys.argv", ["architectures", *kinds])
        return main()

    yield table
    logging.getLogger("tether").setLevel(logging.NOTSET)
    transformers.logging.set_verbosity_warning()


def test_types_that_agree_or_are_refused_keep_the_promise(run, capsys):
    assert run("llama", "bart", "xlnet", "no_such_type") == 0
    said = capsys.readouterr().out
    assert "bart" in said and "alike" in said and "reads what comes" in said
    assert "2 types tried" not in said and "3 types tried, 1 alike, 1 cut; 1 of them as usual" in said
    assert "not tried: no_such_type" in said


def test_a_type_that_differs_breaks_it(run, capsys, monkeypatch):
    monkeypatch.setattr(architectures, "whole_logprobs", lambda model, query, response: [0.0] * len(response))
    assert run("llama") == 1
    assert "broken: llama" in capsys.readouterr().out


def test_a_number_that_is_none_breaks_it(run, capsys, monkeypatch):
    whole, nan = architectures.whole_logprobs, float("nan")
    monkeypatch.setattr(architectures, "whole_logprobs", lambda *given: [*whole(*given)[:-1], nan])
    assert run("llama") == 1
    assert "broken: llama" in capsys.readouterr().out


def test_numbers_are_those_of_the_model():
    with torch.no_grad():
        found = examined("gpt2", small_model("gpt2"))
    assert found.is_kept and max(found.passes, found.decoded) > 0 and found.way == "cut"
