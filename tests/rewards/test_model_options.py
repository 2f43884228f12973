"""Judges that are compiled, or wait on the CPU: the same scores."""

from functools import partial

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.rewards.batches import chat_batch
from tests.rewards.encoders import save_encoder
from tests.rewards.value_heads import save_value_head
from tests.tiny import save_tiny, tiny_tokenizer
from tether.config.rewards import RewardConfig
from tether.rewards.build import build_rewards

TURNS = [("the cat sees", "good"), ("it is a very nice day", "the sun and the blue night"), ("rain", "bad")]


def scores(source, **options):
    """The scores of three conversations, and the source."""
    config = TypeAdapter(RewardConfig).validate_python(source)
    judge = build_rewards(
        [config], ["judge"], roles=None, tokenizer=tiny_tokenizer(), device=torch.device("cpu"), **options
    )
    return judge.score(chat_batch(tiny_tokenizer(), TURNS)).scores, judge.parts[0].source


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A judge of each kind that is a model of its own, as configured."""
    root = tmp_path_factory.mktemp("judges")
    save_tiny(root / "model", num_labels=1, seed=3)
    value_head = save_value_head(root, seed=4)
    save_encoder(root / "encoder")
    return {
        "model": {"type": "model", "path": str(root / "model")},
        "value_head": {"type": "value_head", "path": str(value_head)},
        "encoder": {"type": "model", "path": str(root / "encoder"), "input_format": "pair"},
    }


KINDS = ("model", "value_head", "encoder")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("own", "of_run", "waits"), [(None, False, False), (None, True, True), (True, False, True), (False, True, False)]
)
def test_a_judge_waits_on_the_cpu_where_it_or_the_run_is_told_to(judges, kind, own, of_run, waits, monkeypatch):
    monkeypatch.setattr("tether.rewards.build.has_own_memory", lambda device: True)
    wanted, _ = scores(judges[kind])
    got, judge = scores(judges[kind] | {"offload": own}, offload_idle=of_run)
    home = [p.data_ptr() for p in judge.model.parameters()]
    with judge.fetched():
        assert ([p.data_ptr() for p in judge.model.parameters()] != home) == waits
    assert got == pytest.approx(wanted, abs=1e-6)  # a copy may begin at another address, which changes the rounding
    assert [p.data_ptr() for p in judge.model.parameters()] == home


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_judge_gives_the_same_scores(judges, kind, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    wanted, _ = scores(judges[kind])
    assert not graphs
    torch._dynamo.reset()
    got, _ = scores(judges[kind] | {"compile": True})
    assert graphs and got == pytest.approx(wanted, abs=1e-5)


def test_a_judge_in_few_bits_does_not_move(judges):
    with pytest.raises(ValidationError, match=r"offload: quantized weights \(quantization 4bit\) stay"):
        TypeAdapter(RewardConfig).validate_python(judges["model"] | {"offload": True, "quantization": "4bit"})
