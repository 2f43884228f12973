"""Encoder classifiers as judges, against transformers alone on each text."""

from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertForSequenceClassification, FNetConfig, FNetForSequenceClassification

from tests.rewards.batches import text_batch
from tests.rewards.encoders import POSITIONS, WITH_DECODER, encoder_tokenizer, plain_score, save_encoder
from tether.errors import ModelError, RewardError
from tether.models.classifiers import load_reward_model, reads_last_token
from tether.models.tokenizer import load_tokenizer
from tether.rewards.encoder import EncoderSource, position_limit

PROMPTS = ["the cat sees ", "rain ", "it is a very nice day and "]
ANSWERS = ["good", "bad bad bad bad bad", "the sun"]
CHAT = [[{"role": "system", "content": "nice"}, {"role": "user", "content": prompt.strip()}] for prompt in PROMPTS]


def source(folder, **options):
    options = {"name": "judge", "input_format": "auto", "batch_size": 2, "max_length": None, "device": "cpu"} | options
    return EncoderSource(load_reward_model(str(folder)), load_tokenizer(str(folder)), **options)


@pytest.mark.parametrize("kind", WITH_DECODER)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("form", ["auto", "joined", "pair", "response"])
def test_scores_are_those_of_the_classifiers_own_forward_on_each_text(tmp_path, kind, batch_size, form):
    save_encoder(tmp_path, kind)
    texts = {
        "auto": [(prompt + answer,) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)],
        "pair": list(zip(PROMPTS, ANSWERS, strict=True)),
        "response": [(answer,) for answer in ANSWERS],
    }
    texts["joined"] = texts["auto"]
    expected = [plain_score(tmp_path, *each) for each in texts[form]]
    assert len({round(score, 3) for score in expected}) == 3
    judge = source(tmp_path, batch_size=batch_size, input_format=form)
    assert not reads_last_token(judge.model)
    assert judge.score(text_batch(*ANSWERS, prompts=PROMPTS)).scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", WITH_DECODER)
def test_conversations_are_joined_paired_or_left_out_as_asked(tmp_path, kind):
    save_encoder(tmp_path, kind)
    batch = replace(text_batch(*ANSWERS, prompts=PROMPTS), conversations=CHAT)
    prompts = [f"nice\n\n{prompt.strip()}" for prompt in PROMPTS]
    for form, texts in {
        "joined": [(f"{prompt}\n\n{answer}",) for prompt, answer in zip(prompts, ANSWERS, strict=True)],
        "pair": list(zip(prompts, ANSWERS, strict=True)),
        "response": [(answer,) for answer in ANSWERS],
    }.items():
        expected = [plain_score(tmp_path, *each) for each in texts]
        assert source(tmp_path, input_format=form).score(batch).scores == pytest.approx(expected, abs=1e-5), form
    with pytest.raises(RewardError, match=r"answer 0 of 3 .* tokenizer has no chat template"):
        source(tmp_path).score(batch)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("writes", ["first", "last", "both", "none"])
def test_a_template_of_its_own_gets_the_familys_special_tokens_once(tmp_path, kind, writes):
    save_encoder(tmp_path, kind)
    tokenizer = encoder_tokenizer(kind)
    first, last = tokenizer.cls_token, tokenizer.sep_token
    turns = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.chat_template = (
        (f"{first} " if writes in ("first", "both") else "") + turns + (last if writes in ("last", "both") else "")
    )
    tokenizer.save_pretrained(tmp_path)
    batch = replace(text_batch(*ANSWERS, prompts=PROMPTS), conversations=CHAT)
    expected = [plain_score(tmp_path, f"nice {p} {a}") for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert source(tmp_path).score(batch).scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", WITH_DECODER)
@pytest.mark.parametrize("form", ["auto", "pair", "response"])
def test_special_tokens_that_were_typed_are_characters_unless_asked_for(tmp_path, kind, form):
    """A name in two pieces, neither of which the vocabulary knows, stands for each; token types are as ever."""
    save_encoder(tmp_path, kind)
    tokenizer = encoder_tokenizer(kind)
    last, unknown = tokenizer.sep_token, tokenizer.unk_token
    prompt, answer = f"the cat {last} rain ", f"{last} good {last} {last} bad"
    texts = {"auto": (prompt + answer,), "pair": (prompt, answer), "response": (answer,)}[form]
    expected = plain_score(tmp_path, *(text.replace(last, f"{unknown} {unknown}") for text in texts))
    batch = text_batch(answer, prompts=[prompt])
    assert source(tmp_path, input_format=form).score(batch).scores == pytest.approx([expected], abs=1e-5)
    as_tokens = plain_score(tmp_path, *texts)
    assert abs(as_tokens - expected) > 1e-3
    asked = source(tmp_path, input_format=form, special_tokens=True).score(batch).scores
    assert asked == pytest.approx([as_tokens], abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_special_tokens_typed_into_a_conversation_leave_those_of_the_template_alone(tmp_path, kind):
    save_encoder(tmp_path, kind)
    tokenizer = encoder_tokenizer(kind)
    first, last, unknown = tokenizer.cls_token, tokenizer.sep_token, tokenizer.unk_token
    tokenizer.chat_template = first + " {% for m in messages %}{{ m.content }} " + last + " {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    batch = text_batch(f"good {last} bad", prompts=["rain"])
    batch = replace(batch, conversations=[[{"role": "user", "content": f"{first} rain"}]])
    apart = f"{unknown} {unknown}"
    expected = plain_score(tmp_path, f"{apart} rain {last} good {apart} bad")
    assert source(tmp_path).score(batch).scores == pytest.approx([expected], abs=1e-5)


def test_an_empty_answer_is_judged_as_the_classifier_judges_it(tmp_path):
    save_encoder(tmp_path)
    batch = text_batch("", prompts=["rain"])
    for form, texts in {"response": ("",), "pair": ("rain", ""), "auto": ("rain",)}.items():
        expected = plain_score(tmp_path, *texts)
        assert source(tmp_path, input_format=form).score(batch).scores == pytest.approx([expected], abs=1e-5)


def test_a_classifier_whose_scores_change_with_padding_gets_its_texts_one_at_a_time(tmp_path, caplog):
    """FNet mixes all positions and knows no mask."""
    tokenizer = encoder_tokenizer("bert")
    tokenizer.model_input_names = ["input_ids", "token_type_ids"]
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = FNetConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, num_labels=1, **shape)
        FNetForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    judge = source(tmp_path, batch_size=3)
    expected = [plain_score(tmp_path, prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert judge.score(text_batch(*ANSWERS, prompts=PROMPTS)).scores == pytest.approx(expected, abs=1e-5)
    assert "padding changes the scores of FNetForSequenceClassification" in caplog.text


def test_a_pad_token_that_the_classifier_does_not_know_is_never_read(tmp_path):
    save_encoder(tmp_path)
    tokenizer = encoder_tokenizer("bert")
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.save_pretrained(tmp_path)
    expected = [plain_score(tmp_path, prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    scores = source(tmp_path, batch_size=3).score(text_batch(*ANSWERS, prompts=PROMPTS)).scores
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("refused", ["several", "short"])
def test_a_classifier_that_cannot_be_tested_gets_its_texts_one_at_a_time(tmp_path, monkeypatch, refused):
    """Some refuse several texts without a pad token in their configuration, others short texts."""
    save_encoder(tmp_path)
    forward = BertForSequenceClassification.forward

    def strict(self, input_ids, **inputs):
        if len(input_ids) > 1 if refused == "several" else input_ids.shape[1] < 4:
            raise ValueError("refused")
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", strict)
    expected = [plain_score(tmp_path, prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    scores = source(tmp_path, batch_size=3).score(text_batch(*ANSWERS, prompts=PROMPTS)).scores
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("writes", ["no end", "several ends"])
def test_a_classifier_that_pools_at_the_end_token_reads_texts_with_none_and_with_several(tmp_path, writes):
    save_encoder(tmp_path, "bart")
    tokenizer = encoder_tokenizer("bart")
    if writes == "no end":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    else:
        tokenizer.chat_template = "{{ '<s>' }}{% for m in messages %}{{ ' ' + m.content + ' </s>' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    batch = text_batch(*ANSWERS, prompts=PROMPTS)
    texts = [f"{prompt}{answer} </s>" for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    if writes == "several ends":
        turns = [[*CHAT[0], *CHAT[1]], CHAT[1], CHAT[2]]
        batch = replace(batch, conversations=turns)
        said = [[*(m["content"] for m in chat), answer] for chat, answer in zip(turns, ANSWERS, strict=True)]
        texts = ["".join(f"{text} </s>" for text in texts).removesuffix("</s>") for texts in said]
    expected = [plain_score(tmp_path, text) for text in texts]
    judge = source(tmp_path, batch_size=3)
    assert judge.score(batch).scores == pytest.approx(expected, abs=1e-5)
    assert judge.batch_size == (3 if writes == "no end" else 1)


def test_a_classifier_that_pools_at_an_end_token_must_say_which(tmp_path):
    save_encoder(tmp_path, "bart")
    model = load_reward_model(str(tmp_path))
    model.config.eos_token_id = None
    with pytest.raises(ModelError, match="reward judge: BartForSequenceClassification scores a text at its end token"):
        EncoderSource(model, encoder_tokenizer("bart"), name="judge", input_format="auto", batch_size=1,
                      max_length=None, device="cpu")  # fmt: skip


@pytest.mark.parametrize("kind", WITH_DECODER)
def test_a_classifier_that_ignores_padding_reads_whole_batches(tmp_path, kind):
    save_encoder(tmp_path, kind)
    assert source(tmp_path, batch_size=3).batch_size == 3


def test_a_tokenizer_without_a_pad_token_gets_its_texts_one_at_a_time(tmp_path):
    save_encoder(tmp_path)
    judge = source(tmp_path)
    judge.tokenizer.pad_token = None
    bare = EncoderSource(
        judge.model, judge.tokenizer, name="judge", input_format="auto", batch_size=3, max_length=None, device="cpu"
    )
    expected = [plain_score(tmp_path, prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert bare.score(text_batch(*ANSWERS, prompts=PROMPTS)).scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("kind", "limit"), [("bert", POSITIONS), ("roberta", POSITIONS - 2), ("deberta", POSITIONS)])
def test_an_answer_over_the_limit_is_refused_and_one_at_the_limit_is_not(tmp_path, kind, limit):
    """RoBERTa's positions begin after its pad token's id, 1, so two of its rows are never reached."""
    save_encoder(tmp_path, kind)
    judge = source(tmp_path, input_format="response")
    assert position_limit(judge.model) == limit
    fits, long = " ".join(["good"] * (limit - 2)), " ".join(["good"] * (limit - 1))
    assert judge.score(text_batch(fits)).scores == pytest.approx([plain_score(tmp_path, fits)], abs=1e-5)
    with pytest.raises(RewardError, match=rf"answer 1 of 2 .* has {limit + 1} tokens .*, but the limit is {limit}"):
        judge.score(text_batch(fits, long))
    with pytest.raises(RewardError, match="the limit is 5"):
        source(tmp_path, input_format="response", max_length=5).score(text_batch(fits))


def test_weights_in_another_type(tmp_path):
    save_encoder(tmp_path)
    judge = source(tmp_path)
    judge.model.to(torch.bfloat16)
    expected = [plain_score(tmp_path, prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert judge.score(text_batch(*ANSWERS, prompts=PROMPTS)).scores == pytest.approx(expected, abs=0.05)
