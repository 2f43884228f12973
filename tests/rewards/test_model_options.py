"""Judges that are compiled, or wait on the CPU: the same scores."""

from functools import partial

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.rewards.batches import chat_batch, text_batch
from tests.rewards.encoders import save_encoder
from tests.rewards.value_heads import save_value_head
from tests.tiny import save_tiny, tiny_tokenizer
from tether.config.rewards import RewardConfig
from tether.errors import RewardError
from tether.rewards.build import build_rewards

TURNS = [("the cat sees", "good"), ("it is a very nice day", "the sun and the blue night"), ("rain", "bad")]


def scores(source, **options):
    """The scores of three conversations, and the source."""
    rewards, judge = judged(source, **options)
    return rewards.score(chat_batch(tiny_tokenizer(), TURNS)).scores, judge


def judged(source, **options):
    """The rewards with one source, and that source."""
    config = TypeAdapter(RewardConfig).validate_python(source)
    rewards = build_rewards(
        [config], ["judge"], roles=None, tokenizer=tiny_tokenizer(), device=torch.device("cpu"), **options
    )
    return rewards, rewards.parts[0].source


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
def test_an_answer_that_a_judge_cannot_read_is_an_error_unless_it_has_a_score(judges, kind, caplog):
    """It is the second answer, and takes part in as many forwards as if it could be read."""
    short = judges[kind] | {"max_length": 12, "batch_size": 1}
    told = r"judge: answer 1 of 3 \(counted from 0\) has 1[3-9] tokens with its prompt, but the limit is 12: set "
    with pytest.raises(RewardError, match=told + r"rewards\.0\.missing to .*, or raise rewards\.0\.max_length"):
        scores(short)
    wanted, _ = scores(judges[kind])
    rewards, judge = judged(short | {"missing": -0.5})
    forwards = []
    judge.through = lambda forward: forwards.append(forward) or forward()
    output = rewards.score(chat_batch(tiny_tokenizer(), TURNS))
    assert output.scores == pytest.approx([wanted[0], -0.5, wanted[2]], abs=1e-6) and wanted[1] != -0.5
    assert output.components["judge/missing"] == [0.0, 1.0, 0.0] and len(forwards) == 3
    assert rewards.score(chat_batch(tiny_tokenizer(), TURNS[1:2])).scores == [-0.5]
    why = "but the limit is 12. Its score is set to -0.5, the reward's `missing`; rewards/judge/missing is"
    assert caplog.text.count(why) == caplog.text.count("Its score is set to") == 1


def test_an_empty_answer_without_a_token_has_the_score_of_those_that_cannot_be_read(tmp_path):
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path, num_labels=1)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    alone = {"type": "model", "path": str(tmp_path), "input_format": "response"}
    batch = text_batch("", "good")
    with pytest.raises(RewardError, match=r"answer 0 of 2 .* empty text, .*: set rewards\.0\.missing to .*, or give"):
        judged(alone)[0].score(batch)
    output = judged(alone | {"missing": 2.0})[0].score(batch)
    assert output.scores[0] == 2.0 != output.scores[1] and output.components["judge/missing"] == [1.0, 0.0]


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
