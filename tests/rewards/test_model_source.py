"""Scores of a sequence classifier against the classifier's own forward on each text alone."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.rewards.batches import chat_batch, text_batch
from tests.tiny import KINDS, VOCABULARY, save_tiny, tiny_bpe_tokenizer, tiny_classifier, tiny_tokenizer
from tether.errors import ModelError, RewardError
from tether.models.loading import load_classifier, load_tokenizer
from tether.rewards.model import ModelSource, encode_messages, encode_text, same_tokenizer
from tether.types import RewardBatch

TURNS = [("the cat sees", "good"), ("it is a very nice day", "the sun and the blue night"), ("rain", "bad bad bad")]


def source(folder, policy_tokenizer, **options):
    options = {"name": "judge", "batch_size": 2, "max_length": None, "device": "cpu"} | options
    return ModelSource(load_classifier(str(folder)), load_tokenizer(str(folder)), policy_tokenizer, **options)


@torch.no_grad()
def alone(folder, ids):
    """The score of one sequence without padding, by a forward that knows nothing of ours."""
    model = load_classifier(str(folder))
    return model.score(model.base_model(torch.tensor([ids])).last_hidden_state)[0, -1].item()


def permuted_tokenizer(**names):
    """The words of the tiny tokenizer under other ids, in a vocabulary of the same size."""
    words = [*reversed(VOCABULARY)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", **names)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad", ["own", "eos"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_ids_are_scored_at_the_last_token_whatever_the_padding(tmp_path, kind, pad, side):
    save_tiny(tmp_path, kind, num_labels=1, pad=pad)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.padding_side = side
    judge = source(tmp_path, tokenizer)
    assert judge.shares_ids
    batch = chat_batch(tokenizer, TURNS)
    expected = [alone(tmp_path, q + r) for q, r in zip(batch.query_ids, batch.response_ids, strict=True)]
    assert judge.score(batch).scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == len(TURNS)


def test_a_missing_pad_id_does_not_matter(tmp_path):
    save_tiny(tmp_path, num_labels=1, pad=None)
    judge = source(tmp_path, load_tokenizer(str(tmp_path)))
    judge.model.config.pad_token_id = None
    batch = chat_batch(judge.tokenizer, TURNS)
    expected = [alone(tmp_path, q + r) for q, r in zip(batch.query_ids, batch.response_ids, strict=True)]
    assert judge.score(batch).scores == pytest.approx(expected, abs=1e-5)


def test_a_score_depends_neither_on_the_batch_size_nor_on_the_other_answers(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    tokenizer = load_tokenizer(str(tmp_path))
    one, all_at_once = (source(tmp_path, tokenizer, batch_size=size) for size in (1, 8))
    batch, reversed_batch = chat_batch(tokenizer, TURNS), chat_batch(tokenizer, TURNS[::-1])
    scores = one.score(batch).scores
    assert all_at_once.score(batch).scores == pytest.approx(scores, abs=1e-5)
    assert all_at_once.score(reversed_batch).scores == pytest.approx(scores[::-1], abs=1e-5)


def test_another_vocabulary_of_equal_size_is_scored_as_text_in_the_judges_own_template(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    judge = source(tmp_path, tiny_tokenizer())
    assert not judge.shares_ids
    expected = []
    for prompt, response in TURNS:
        text = f"<user> {prompt} <eos> <assistant> {response} <eos>"
        expected.append(alone(tmp_path, [VOCABULARY[::-1].index(word) for word in text.split()]))
    assert judge.score(chat_batch(tiny_tokenizer(), TURNS)).scores == pytest.approx(expected, abs=1e-5)


def test_text_that_the_policy_wraps_is_a_user_turn_for_the_judge_too(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    judge = source(tmp_path, tiny_tokenizer(bos=True))
    batch = RewardBatch(
        prompts=["the cat sees"],
        queries=["<bos> <user> the cat sees <eos> <assistant>"],
        responses=["good"],
        query_ids=[[1]],
        response_ids=[[2]],
        conversations=[[{"role": "user", "content": "the cat sees"}]],
    )
    ids = encode_messages(
        judge.tokenizer, [{"role": "user", "content": "the cat sees"}, {"role": "assistant", "content": "good"}]
    )
    assert judge.score(batch).scores == pytest.approx([alone(tmp_path, ids)], abs=1e-5)


def test_plain_text_is_the_prompt_followed_by_the_answer(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    batch = text_batch("is good", prompts=["the sun "])
    ids = [VOCABULARY[::-1].index(word) for word in ("the", "sun", "is", "good")]
    score = source(tmp_path, tiny_tokenizer(bos=True)).score(batch).scores
    assert score == pytest.approx([alone(tmp_path, ids)], abs=1e-5)


def test_exactly_one_bos():
    tokenizer = tiny_tokenizer(bos=True)
    bos = tokenizer.bos_token_id
    assert encode_text(tokenizer, "good").count(bos) == 1
    assert encode_text(tokenizer, "<bos> good") == encode_text(tokenizer, "good")
    ids = encode_messages(tokenizer, [{"role": "user", "content": "good"}])
    assert ids[0] == bos and ids.count(bos) == 1
    assert encode_text(tiny_tokenizer(), "good good") == [17, 17]


def test_tokenizers_are_the_same_when_they_write_the_same_ids():
    tokenizer = tiny_tokenizer()
    assert same_tokenizer(tokenizer, tiny_tokenizer())
    assert same_tokenizer(tokenizer, tiny_tokenizer(pad="eos")), "pad tokens are in no text"
    assert same_tokenizer(tokenizer, tiny_tokenizer(pad=None))
    assert not same_tokenizer(tokenizer, tiny_tokenizer(bos=True)), "another beginning"
    assert not same_tokenizer(tokenizer, permuted_tokenizer()), "another vocabulary of the same size"
    assert not same_tokenizer(tokenizer, tiny_tokenizer(chat_template=False)), "another template"
    assert not same_tokenizer(tokenizer, tiny_bpe_tokenizer())
    other = tiny_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not same_tokenizer(tokenizer, other), "another way to split text"


@pytest.mark.parametrize("shares_ids", [True, False])
def test_an_answer_over_the_limit_is_refused_and_never_cut(tmp_path, shares_ids):
    save_tiny(tmp_path, num_labels=1)
    tokenizer = tiny_tokenizer()
    if not shares_ids:
        permuted_tokenizer().save_pretrained(tmp_path)
    judge = source(tmp_path, tokenizer, max_length=12)
    batch = chat_batch(tokenizer, TURNS)
    with pytest.raises(RewardError, match=r"reward judge: answer 1 of 3 \(counted from 0\) has 1[56] tokens .* is 12"):
        judge.score(batch)
    longest = source(tmp_path, tokenizer, max_length=16)
    assert len(longest.score(batch).scores) == 3


def test_the_models_own_limit_counts_where_none_is_given(tmp_path):
    save_tiny(tmp_path, "gpt2", num_labels=1)
    judge = source(tmp_path, load_tokenizer(str(tmp_path)))
    batch = chat_batch(judge.tokenizer, [("good " * 128, "bad")])
    with pytest.raises(RewardError, match=r"answer 0 of 1 .* the limit is 128"):
        judge.score(batch)


def test_a_conversation_that_the_judge_has_no_template_for_is_refused(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    tokenizer = permuted_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RewardError, match=r"answer 0 of 3 .* does not fit the reward model's chat template"):
        source(tmp_path, tiny_tokenizer()).score(chat_batch(tiny_tokenizer(), TURNS))


def test_an_empty_text_is_refused(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"answer 1 of 2 .* is an empty text"):
        source(tmp_path, tiny_tokenizer()).score(text_batch("good", "", prompts=["a", ""]))


def test_a_model_without_a_head_on_a_decoder_is_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ModelError, match="reward judge: LlamaModel has no score head"):
        ModelSource(
            tiny_classifier().base_model,
            tokenizer,
            tokenizer,
            name="judge",
            batch_size=1,
            max_length=None,
            device="cpu",
        )
