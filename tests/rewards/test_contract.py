"""What every reward source promises, whichever it is."""

import dataclasses
import math
from contextlib import AbstractContextManager, contextmanager, nullcontext

import peft
import pytest
import torch

from tests.rewards.batches import chat_batch
from tests.rewards.encoders import save_encoder
from tests.rewards.services import lengths, local_service
from tests.rewards.test_judge_source import RUBRIC, by_length
from tests.rewards.value_heads import save_value_head
from tests.tiny import EOS, save_tiny, tiny_tokenizer
from tether.config.rewards import HttpReward, JudgeReward, LengthTargetReward
from tether.config.schema import RunConfig
from tether.models.adapters import with_adapter
from tether.models.build import build_roles
from tether.models.classifiers import classifier_on, load_classifier, load_reward_model, load_value_head_model
from tether.models.loading import load_causal_lm
from tether.models.tokenizer import load_tokenizer
from tether.rewards.adapter import AdapterSource
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.encoder import EncoderSource
from tether.rewards.ensemble import Ensemble
from tether.rewards.fake import FakeRewards
from tether.rewards.function import FunctionSource
from tether.rewards.http import http_source, llamafactory_payload
from tether.rewards.judge import JudgeSource, judge_source
from tether.rewards.model import ModelSource
from tether.rewards.reading import Reads
from tether.rewards.ready import ready_source
from tether.types import RewardOutput, RewardSource

TURNS = [("the cat sees", "good"), ("it is", "the sun and the blue night"), ("rain", "bad bad bad"), ("you", "dog")]


def fake(folder):
    return FakeRewards(lambda query, response: float(len(query) - len(response)))


def function(folder):
    return FunctionSource(lambda prompts, completions: [len(c[0]["content"]) for c in completions], "length")


def model(folder):
    save_tiny(folder / "judge", num_labels=1)
    tokenizer = load_tokenizer(str(folder / "judge"))
    options = {"name": "judge", "input_format": "auto", "batch_size": 2, "max_length": None, "device": "cpu"}
    model = load_classifier(str(folder / "judge"))
    return ModelSource(model, model.score, tokenizer, tokenizer, **options)


def encoder(folder):
    save_encoder(folder / "judge", "roberta")
    options = {"name": "judge", "input_format": "pair", "batch_size": 2, "max_length": None, "device": "cpu"}
    return EncoderSource(load_reward_model(str(folder / "judge")), load_tokenizer(str(folder / "judge")), **options)


def value_head(folder):
    path = str(save_value_head(folder / "judge", form="adapter"))
    model, head = load_value_head_model(path, dtype=torch.float32)
    options = {"name": "judge", "input_format": "joined", "batch_size": 2, "max_length": None, "device": "cpu"}
    return ModelSource(model, head, load_tokenizer(path), tiny_tokenizer(), **options)


def adapter(folder):
    base = str(save_tiny(folder / "policy"))
    settings = {"task_type": "SEQ_CLS", "target_modules": "all-linear", "modules_to_save": ["score"]}
    torch.manual_seed(0)
    judge = classifier_on(load_causal_lm(base, dtype=torch.float32))
    torch.nn.init.normal_(judge.score.weight)
    adapted = with_adapter(judge, peft.LoraConfig(base_model_name_or_path=base, **settings))
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    run = RunConfig.model_validate(
        {
            "model": {"path": base, "lora": {}},
            "rewards": [{"type": "adapter", "path": str(folder / "adapter"), "name": "judge"}],
            "data": {"prompts": "prompts.jsonl"},
            "train": {"max_steps": 1},
            "output_dir": "out",
        }
    )
    roles = build_roles(run, load_tokenizer(base), device="cpu", autocast_dtype=None)
    roles.add_reward_adapter("judge", str(folder / "adapter"))
    return AdapterSource(roles, "judge", load_tokenizer(base), batch_size=3, device="cpu")


@contextmanager
def http(folder):
    with local_service(lengths) as local:
        section = {"type": "http", "url": local.url, "batch_size": 3}
        yield http_source(HttpReward.model_validate(section), "judge", "rewards.0", None)


@contextmanager
def judge(folder):
    with local_service(by_length) as local:
        section = {"type": "judge", "base_url": local.url, "model": "m", "rubric": RUBRIC, "scale": [0, 100]}
        yield judge_source(JudgeReward.model_validate(section), "judge", "rewards.0")


def ready(folder):
    return ready_source(LengthTargetReward(type="length_target", target=3), "length")


def ensemble(folder):
    return Ensemble([Part("fake", 0.5, fake(folder)), Part("length", -1.0, function(folder))], min, "ensemble")


def weighted_sum(folder):
    return WeightedSum([Part("fake", 0.5, fake(folder)), Part("length", -1.0, function(folder))])


SOURCES = [fake, function, model, encoder, value_head, adapter, http, judge, ready, ensemble, weighted_sum]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request, tmp_path):
    made = request.param(tmp_path)
    with made if isinstance(made, AbstractContextManager) else nullcontext(made) as source:
        yield source


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(str(save_tiny(tmp_path / "words")))


def test_one_finite_score_an_answer_that_differs_between_answers(source, tokenizer):
    assert isinstance(source, RewardSource)
    output = source.score(chat_batch(tokenizer, TURNS))
    assert isinstance(output, RewardOutput)
    assert len(output.scores) == len(TURNS)
    assert all(type(score) is float and math.isfinite(score) for score in output.scores)
    assert len(set(output.scores)) > 1
    assert all(len(values) == len(TURNS) for values in output.components.values())


def test_a_score_belongs_to_its_answer_alone(source, tokenizer):
    scores = source.score(chat_batch(tokenizer, TURNS)).scores
    assert source.score(chat_batch(tokenizer, TURNS[::-1])).scores[::-1] == pytest.approx(scores, abs=1e-5)
    for turn, score in zip(TURNS, scores, strict=True):
        assert source.score(chat_batch(tokenizer, [turn])).scores == pytest.approx([score], abs=1e-5)


@pytest.mark.parametrize("make", [model, adapter])
def test_answers_that_a_string_ended_are_read_closed(make, tmp_path, tokenizer):
    source, batch = make(tmp_path), chat_batch(tokenizer, TURNS)
    ended = dataclasses.replace(batch, closed=lambda ids, before: [*ids[:1], EOS])
    wanted = dataclasses.replace(batch, response_ids=[[*ids[:1], EOS] for ids in batch.response_ids])
    assert source.score(ended).scores == source.score(wanted).scores != source.score(batch).scores
    assert source.seen(ended) == source.seen(wanted)
    payload = llamafactory_payload(tokenizer)
    assert payload(ended, [1, 2]) == payload(wanted, [1, 2]) != payload(batch, [1, 2])


def test_a_source_that_can_show_what_its_model_reads_shows_each_answer(source, tokenizer):
    assert isinstance(source, Reads) == isinstance(source, ModelSource | EncoderSource | AdapterSource | JudgeSource)
    if isinstance(source, Reads):
        texts = source.seen(chat_batch(tokenizer, TURNS))
        assert len(texts) == len(TURNS)
        assert all(prompt in text and response in text for text, (prompt, response) in zip(texts, TURNS, strict=True))


def test_the_batch_is_left_as_it_was(source, tokenizer):
    batch, untouched = chat_batch(tokenizer, TURNS), chat_batch(tokenizer, TURNS)
    source.score(batch)
    assert batch == untouched
