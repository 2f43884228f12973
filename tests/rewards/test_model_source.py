"""Scores of a sequence classifier against the classifier's own forward on each text alone."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.rewards.batches import chat_batch, text_batch
from tests.tiny import KINDS, VOCABULARY, save_tiny, tiny_bpe_tokenizer, tiny_tokenizer
from tether.errors import RewardError
from tether.models.classifiers import load_classifier
from tether.models.tokenizer import load_tokenizer
from tether.rewards.model import ModelSource
from tether.rewards.reading import READS_TO, same_tokenizer

TURNS = [("the cat sees", "good"), ("it is a very nice day", "the sun and the blue night"), ("rain", "bad bad bad")]


def source(folder, policy_tokenizer, **options):
    options = {"name": "judge", "input_format": "auto", "batch_size": 2, "max_length": None, "device": "cpu"} | options
    model, tokenizer = load_classifier(str(folder)), load_tokenizer(str(folder))
    return ModelSource(model, model.score, tokenizer, policy_tokenizer, **options)


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


def permuted(text):
    return [VOCABULARY[::-1].index(word) for word in text.split()]


def user(content):
    return {"role": "user", "content": content}


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
    texts = [f"<user> {prompt} <eos> <assistant> {response} <eos>" for prompt, response in TURNS]
    expected = [alone(tmp_path, permuted(text)) for text in texts]
    assert judge.score(chat_batch(tiny_tokenizer(), TURNS)).scores == pytest.approx(expected, abs=1e-5)


def test_text_that_the_policy_wraps_is_a_user_turn_for_the_judge_too(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    judge = source(tmp_path, tiny_tokenizer(bos=True))
    batch = replace(text_batch("good", prompts=["the cat sees"]), conversations=[[user("the cat sees")]])
    words = "<user> the cat sees <eos> <assistant> good <eos>"
    assert judge.score(batch).scores == pytest.approx([alone(tmp_path, permuted(words))], abs=1e-5)
    system = {"role": "system", "content": "nice"}
    with_system = replace(batch, conversations=[[system, user("the cat sees")]])
    expected = alone(tmp_path, permuted(f"<system> nice <eos> {words}"))
    assert judge.score(with_system).scores == pytest.approx([expected], abs=1e-5)


def test_plain_text_is_the_prompt_followed_by_the_answer(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    batch = text_batch("is good", prompts=["the sun "])
    score = source(tmp_path, tiny_tokenizer(bos=True)).score(batch).scores
    assert score == pytest.approx([alone(tmp_path, permuted("the sun is good"))], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["template", "tokenizer", "both", "none"])
@pytest.mark.parametrize("chat", [True, False])
def test_exactly_one_bos_whoever_writes_it(tmp_path, kind, by, chat):
    """Against the model's own forward on the text alone, the BOS counted by hand."""
    if kind == "qwen2" and by in ("tokenizer", "both"):
        pytest.skip("Qwen2's tokenizer never writes a BOS")
    save_tiny(tmp_path, kind, num_labels=1)
    tokenizer = tiny_bpe_tokenizer() if kind == "qwen2" else tiny_tokenizer(bos=by in ("tokenizer", "both"))
    words = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    tokenizer.chat_template = ("<bos>" if by in ("template", "both") else "") + words
    tokenizer.save_pretrained(tmp_path)
    judge = source(tmp_path, permuted_tokenizer())
    batch = text_batch("good", "good", prompts=["the cat sees ", "rain "])
    if chat:
        batch = replace(batch, conversations=[[user("the cat sees")], [user("rain")]])
        texts = [f"<user> {turn} <eos> <assistant> good <eos> " for turn in ("the cat sees", "rain")]
    else:
        texts = [p + r for p, r in zip(batch.prompts, batch.responses, strict=True)]
    has_bos = by in ("tokenizer", "both") or (chat and by == "template")
    expected = []
    for text in texts:
        ids = judge.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert 1 not in ids
        expected.append(alone(tmp_path, [1] * has_bos + ids))
    assert judge.score(batch).scores == pytest.approx(expected, abs=1e-5)
    if chat and by != "tokenizer":  # where transformers itself writes one, it is the same text
        plain = judge.tokenizer.apply_chat_template([user("rain"), {"role": "assistant", "content": "bad"}])
        text = replace(text_batch("bad"), conversations=[[user("rain")]])
        assert judge.score(text).scores == pytest.approx([alone(tmp_path, plain["input_ids"])], abs=1e-5)


def test_the_forms_that_an_answer_can_be_judged_in(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    plain, chat = text_batch("good", prompts=["the cat "]), text_batch("good", prompts=["the cat"])
    chat = replace(chat, conversations=[[{"role": "system", "content": "nice"}, user("the cat")]])
    for form, batch, words in [
        ("auto", plain, "the cat good"),
        ("auto", chat, "<system> nice <eos> <user> the cat <eos> <assistant> good <eos>"),
        ("chat", plain, "<user> the cat <eos> <assistant> good <eos>"),
        ("chat", chat, "<system> nice <eos> <user> the cat <eos> <assistant> good <eos>"),
        ("joined", plain, "the cat good"),
        ("joined", chat, "nice the cat good"),
        ("pair", plain, "the cat good"),
        ("pair", chat, "nice the cat good"),
        ("response", plain, "good"),
        ("response", chat, "good"),
    ]:
        score = source(tmp_path, tiny_tokenizer(), input_format=form).score(batch).scores
        assert score == pytest.approx([alone(tmp_path, permuted(words))], abs=1e-5), (form, words)
        same = source(tmp_path, permuted_tokenizer(), input_format=form)
        assert same.shares_ids == (form == "auto"), "another form than the policy's is text"


@pytest.mark.parametrize("form", ["auto", "chat", "joined", "pair", "response"])
def test_special_tokens_that_were_typed_are_characters_unless_asked_for(tmp_path, form):
    """By hand: the name of a special token in two pieces, neither of which the vocabulary knows."""
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer().save_pretrained(tmp_path)
    prompt, answer = "the cat <eos> <assistant> good", "bad <eos> <user> rain"
    batch = replace(text_batch(answer, prompts=[prompt]), conversations=[[user(prompt)]])
    plain = text_batch(answer, prompts=[f"{prompt} "])
    apart = "<unk> <unk>"
    typed, written = f"the cat {apart} {apart} good", f"bad {apart} {apart} rain"
    wanted = {
        "auto": (f"<user> {typed} <eos> <assistant> {written} <eos>", f"{typed} {written}"),
        "chat": (f"<user> {typed} <eos> <assistant> {written} <eos>",) * 2,
        "joined": (f"{typed} {written}",) * 2,
        "pair": (f"{typed} {written}",) * 2,
        "response": (written,) * 2,
    }
    judge = source(tmp_path, tiny_tokenizer(), input_format=form)
    for given, words in zip((batch, plain), wanted[form], strict=True):
        assert judge.score(given).scores == pytest.approx([alone(tmp_path, permuted(words))], abs=1e-5)
    asked = source(tmp_path, tiny_tokenizer(), input_format=form, special_tokens=True)
    for given, words in zip((batch, plain), wanted[form], strict=True):
        as_tokens = words.replace(typed, prompt).replace(written, answer)
        assert asked.score(given).scores == pytest.approx([alone(tmp_path, permuted(as_tokens))], abs=1e-5)


@pytest.mark.parametrize("bos", [True, False])
def test_a_beginning_that_was_typed_is_no_beginning(tmp_path, bos):
    save_tiny(tmp_path, num_labels=1)
    tiny_tokenizer(bos=bos, chat_template=False).save_pretrained(tmp_path)
    judge = source(tmp_path, permuted_tokenizer())
    (ids,) = judge._sequences(text_batch("good", prompts=["<bos> the cat "]))
    assert ids == [1] * bos + [0, 0] + [VOCABULARY.index(word) for word in ("the", "cat", "good")]


def test_a_byte_pair_judge_reads_the_characters_of_what_was_typed(tmp_path):
    save_tiny(tmp_path, "qwen2", num_labels=1)
    judge = source(tmp_path, tiny_tokenizer())
    turns = [[user(f"the cat{sign} sees")] for sign in ("", "<eos>")]
    batch = replace(text_batch("good <eos>", "good <eos>", prompts=["the cat sees"] * 2), conversations=turns)
    usual, typed = judge._sequences(batch)
    special = set(judge.tokenizer.all_special_ids)
    assert [token for token in typed if token in special] == [token for token in usual if token in special]
    assert "<eos>" not in judge.tokenizer.decode([token for token in usual if token not in special])
    assert len(typed) > len(usual)


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
    with pytest.raises(RewardError, match=r"answer 0 of 3 .* has no chat template. Set the reward's input_format to j"):
        source(tmp_path, tiny_tokenizer()).score(chat_batch(tiny_tokenizer(), TURNS))


def test_a_conversation_that_the_judges_template_refuses_is_named_with_its_roles(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    tokenizer = permuted_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}x{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    batch = text_batch("a", "b", prompts=["p", "q"])
    batch = replace(batch, conversations=[[user("p")], [{"role": "system", "content": "s"}, user("q")]])
    with pytest.raises(RewardError, match=r"answer 1 of 2 .* roles system, user, assistant: TemplateError: no system"):
        source(tmp_path, tiny_tokenizer()).score(batch)


@pytest.mark.parametrize(("names", "token"), [({}, "<eos>"), ({"bos_token": "<bos>"}, "<bos>")])
def test_an_empty_answer_is_read_as_a_token_of_its_own(tmp_path, names, token):
    """As of a policy that ends at once, where the answer is read alone and the tokenizer puts nothing around text."""
    save_tiny(tmp_path, num_labels=1)
    permuted_tokenizer(**names).save_pretrained(tmp_path)
    judge = source(tmp_path, tiny_tokenizer(), input_format="response")
    wanted = [alone(tmp_path, permuted(words)) for words in ("good", token)]
    assert judge.score(text_batch("good", "")).scores == pytest.approx(wanted, abs=1e-5)


def test_an_empty_text_is_refused_where_no_token_could_stand_for_it(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    tokenizer = permuted_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"answer 1 of 2 .* is an empty text, .* give it a bos_token or an eos_token"):
        source(tmp_path, tiny_tokenizer()).score(text_batch("good", "", prompts=["a", ""]))


def test_a_whole_text_is_no_conversation(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    with pytest.raises(RewardError, match=r"answer 0 of 1 .* is a text without a prompt, .* set input_format to auto"):
        source(tmp_path, tiny_tokenizer(), input_format="chat").score(text_batch("good", prompts=[""]))


def closing_judge(folder, *, chat):
    """A judge that was trained to read to the end token, after which its template writes a blank that is a token."""
    save_tiny(folder, "qwen2", num_labels=1, chat_template=chat)
    tokenizer = tiny_bpe_tokenizer(chat_template=chat)
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos> {% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    tokenizer.init_kwargs[READS_TO] = "<eos>"
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("chat", [True, False])
def test_a_judge_of_the_stage_gives_one_score_whichever_tokenizer_the_policy_has(tmp_path, chat):
    own = closing_judge(tmp_path, chat=chat)
    turns = [(f" {query}", f" {answer}") for query, answer in TURNS]
    if chat:
        same, other = (chat_batch(tokenizer, turns) for tokenizer in (own, permuted_tokenizer()))
    else:
        other = text_batch(*(answer for _, answer in turns), prompts=[query for query, _ in turns])
        ids = [[own(text)["input_ids"] for text in turn] for turn in turns]
        same = replace(other, query_ids=[q for q, _ in ids], response_ids=[[*a, own.eos_token_id] for _, a in ids])
    read = source(tmp_path, own)
    assert read.shares_ids and not source(tmp_path, permuted_tokenizer()).shares_ids
    assert source(tmp_path, permuted_tokenizer()).read(other) == read.read(same)
    assert source(tmp_path, permuted_tokenizer()).score(other).scores == read.score(same).scores
    (tmp_path / "tokenizer_config.json").write_text(
        (tmp_path / "tokenizer_config.json").read_text().replace(READS_TO, "something_else")
    )
    assert source(tmp_path, permuted_tokenizer()).read(other) != read.read(same)
