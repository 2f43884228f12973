"""A chat model that grades: what it is asked, and which of its replies hold a number."""

import json
import re

import pytest
from pydantic import TypeAdapter

from tests.rewards.batches import text_batch
from tests.rewards.services import Close, Hang, Reply, in_turn, local_service
from tests.tiny import tiny_tokenizer
from tether.config.rewards import RewardConfig
from tether.errors import ConfigError, RewardError, RewardResponseError, RewardTimeout
from tether.rewards.build import check_rewards, try_sources
from tether.rewards.judge import judge_source, last_number

RUBRIC = 'Grade this answer from 1 to 10: {"answer": "{response}"}\nIt answers: {prompt}'


def config(url, **keys):
    quick = {"connect_timeout": 0.5, "read_timeout": 0.5, "retries": 1, "retry_delay": 0.01}
    section = {"type": "judge", "base_url": url, "model": "grader", "rubric": RUBRIC, **quick, **keys}
    return TypeAdapter(RewardConfig).validate_python(section)


def source(url, **keys):
    return judge_source(config(url, **keys), "grade", "rewards.0")


def says(text, finish_reason="stop"):
    message = {"role": "assistant", "content": text}
    return Reply({"object": "chat.completion", "choices": [{"message": message, "finish_reason": finish_reason}]})


def by_length(payload):
    """Grades the answer by its letters, as it finds it in the rubric."""
    return says(str(len(re.search(r'"answer": "(.*)"', payload["messages"][0]["content"])[1])))


def test_each_answer_is_asked_about_by_itself_and_scores_are_in_their_order():
    batch = text_batch("aaa", "a", "aaaaaaa", "aa", prompts=["one", "two", "three", "four"])
    with local_service(by_length) as local:
        assert source(local.url, max_concurrency=2).score(batch).scores == [3.0, 1.0, 7.0, 2.0]
    assert len(local.seen) == 4
    assert local.most_at_work <= 2


def test_a_request_is_that_of_a_chat_completion():
    with local_service(by_length) as local:
        source(f"{local.url}/v1/?version=2", extra_body={"seed": 7}).score(text_batch("aaa", prompts=["two"]))
        source(local.url, temperature=None, max_tokens=None).score(text_batch("aaa", prompts=["two"]))
    content = 'Grade this answer from 1 to 10: {"answer": "aaa"}\nIt answers: two'
    asked = {"model": "grader", "messages": [{"role": "user", "content": content}]}
    assert local.seen == [asked | {"temperature": 0.0, "max_tokens": 16, "seed": 7}, asked]
    assert local.paths == ["/score/v1/chat/completions?version=2", "/score/chat/completions"]


def test_what_an_answer_says_is_no_part_of_the_rubric():
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "{response}"}]
    batch = text_batch("{prompt} {0}", prompts=[messages])
    with local_service(in_turn(says("7"))) as local:
        judge = source(local.url)
        judge.score(batch)
    seen = 'Grade this answer from 1 to 10: {"answer": "{prompt} {0}"}\nIt answers: system: be\nuser: {response}'
    assert judge.seen(batch) == [local.seen[0]["messages"][0]["content"]] == [seen]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("7", 7.0),
        (" 7.5\n", 7.5),
        ("7.", 7.0),
        ("+7", 7.0),
        ("007", 7.0),
        ("7/10", 7.0),
        ("7 out of 10.", 7.0),
        ("Score: 7", 7.0),
        ("**Score:** 7/10", 7.0),
        ("Score (1-10) = `7`", 7.0),
        ("评分：7", 7.0),
        ("It is short, and 2 words are wrong.\n\nScore: 7", 7.0),
        ("<think>\nmaybe 3?\n</think>\n\n7", 7.0),
        ("1", 1.0),
        ("10", 10.0),
        ("", None),
        ("   \n ", None),
        ("good", None),
        ("seven", None),
        ("7 or 8", None),
        ("7-8", None),
        ("I give it 7", None),
        ("Score: 7\nBecause it is good.", None),
        ("There is 1 mistake.", None),
        ("0", None),
        ("11", None),
        ("-7", None),
        ("Score: -1", None),
        ("7/100", None),
        ("70%", None),
        ("7,5", None),
        ("1e1", None),
        ("nan", None),
        ("٧", None),
        ("7" * 400, None),
    ],
)
def test_a_number_counts_where_it_is_all_that_the_last_line_says(reply, number):
    assert last_number(reply, (1.0, 10.0)) == number


def test_the_scale_is_the_users():
    assert last_number("-0.5", (-1.0, 1.0)) == -0.5
    assert last_number("Score: .25/1", (0.0, 1.0)) == 0.25
    assert last_number("5/10", (0.0, 5.0)) is None


def test_a_judge_that_gives_no_number_is_reminded_of_the_form():
    with local_service(in_turn(says("Well, it is good."), says(""), says("8"))) as local:
        assert source(local.url).score(text_batch("a")).scores == [8.0]
    first, *others = (payload["messages"][0]["content"] for payload in local.seen)
    assert others == [first + "\n\nReply with one number from 1 to 10 and nothing else."] * 2


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (says("I \x1b[31mwill not"), r"the last reply: 'I \\\\x1b\[31mwill not'\. Wanted the number alone"),
        (says("Score: 1", "length"), r"the last reply, cut off at max_tokens: 'Score: 1'"),
        (says(None), r"the last reply: ''"),
        (says([{"type": "text", "text": "7"}]), r"the last reply: ''"),
    ],
    ids=["words", "cut", "none", "parts"],
)
def test_a_judge_that_never_gives_a_number_is_an_error_that_quotes_it(reply, told):
    message = (
        r"reward grade: http.*/chat/completions \(status 200\) gave no number from 1 to 10 for answer 1 of 2 \(counted "
        rf"from 0\) in 2 attempts; {told}"
    )
    with (
        local_service(lambda payload: says("5") if "fine" in str(payload) else reply) as local,
        pytest.raises(RewardResponseError, match=message),
    ):
        source(local.url, attempts=2, max_concurrency=1).score(text_batch("fine", "odd"))
    assert len(local.seen) == 3


FILTERED = {
    "azure": {"error": {"message": "The response was filtered due to the prompt", "code": "content_filter"}},
    "openai": {"error": {"message": "Your request was rejected by our safety system", "type": "invalid_request_error"}},
    "deepseek": {"error": {"message": "Content Exists Risk", "code": "invalid_request_error"}},
    "dashscope": {"error": {"message": "Output data may contain ...", "code": "data_inspection_failed"}},
}


@pytest.mark.parametrize("reply", [*(Reply(body, 400) for body in FILTERED.values()), says("I will not"), says(None)])
def test_an_answer_that_is_refused_is_an_error_unless_it_has_a_score(reply, caplog):
    batch = text_batch("fine", "odd", "fair", "odd")
    with local_service(lambda payload: reply if '"odd"' in str(payload) else by_length(payload)) as local:
        with pytest.raises(RewardResponseError, match=r"reward grade: .* set rewards\.0\.missing to the"):
            source(local.url).score(batch)
        output = source(local.url, missing=-0.5).score(batch)
        assert (output.scores, output.components) == ([4.0, -0.5, 4.0, -0.5], {"missing": [0.0, 1.0, 0.0, 1.0]})
        assert source(local.url, missing=-0.5).score(text_batch("fine")).components == {"missing": [0.0]}
    (told,) = caplog.messages
    assert told.startswith("reward grade: ")
    assert "Its score is set to -0.5, the reward's `missing`; rewards/grade/missing is the share of such" in told


@pytest.mark.parametrize("missing", [None, 0.0])
def test_a_judge_that_never_replies_in_form_is_told_before_a_run_whatever_its_missing(missing, caplog):
    wanted = r"rewards\.0: .* gave no number from 1 to 10 .*'I like it'"
    with local_service(in_turn(says("I like it"))) as local, pytest.raises(ConfigError, match=wanted) as caught:
        try_sources([config(local.url, missing=missing)], ["grade"], text_batch("a"), tiny_tokenizer())
    assert "missing" not in str(caught.value) and not caplog.messages
    with local_service(in_turn(Reply(FILTERED["azure"], 400))) as local:
        filtered = [config(local.url, missing=missing)], ["grade"], text_batch("a"), tiny_tokenizer()
        if missing is None:
            with pytest.raises(ConfigError, match="content_filter"):
                try_sources(*filtered)
        else:
            try_sources(*filtered)
    assert len(local.seen) == 1


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(FILTERED["azure"], 401), RewardResponseError),
        (Reply(FILTERED["azure"], 503), RewardResponseError),
        (Reply({"error": {"message": "Unsupported parameter: max_tokens"}}, 400), RewardResponseError),
        (Reply({"choices": []}), RewardResponseError),
        (Close(), RewardError),
        (Hang(), RewardTimeout),
    ],
)
def test_what_fails_for_every_answer_never_counts_as_missing(reply, error):
    with local_service(in_turn(reply)) as local, pytest.raises(error):
        source(local.url, missing=0.0, read_timeout=0.1, connect_timeout=0.1).score(text_batch("a"))


NO_COMPLETIONS = [
    {},
    [],
    {"choices": []},
    {"choices": None},
    {"choices": [{"text": "7"}]},
    {"choices": ["7"]},
    "7",
    None,
]


@pytest.mark.parametrize("body", NO_COMPLETIONS, ids=json.dumps)
def test_an_answer_that_is_no_chat_completion_is_an_error(body):
    message = r"\(status 200\) returned .*; wanted JSON \{\"choices\""
    with local_service(in_turn(Reply(body))) as local, pytest.raises(RewardResponseError, match=message):
        source(local.url).score(text_batch("a"))
    assert len(local.seen) == 1


def test_what_may_pass_is_tried_again_and_the_rest_is_an_error():
    with local_service(in_turn(Reply(b"", 503), says("7"))) as local:
        assert source(local.url).score(text_batch("a")).scores == [7.0]
    for reply, error in ((Reply(b"", 400), RewardResponseError), (Close(), RewardError), (Hang(), RewardTimeout)):
        with local_service(in_turn(reply)) as local, pytest.raises(error, match="reward grade: POST"):
            source(local.url, read_timeout=0.1, connect_timeout=0.1).score(text_batch("a"))


def test_the_key_is_sent_and_must_be_set(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with local_service(in_turn(says("7"), Reply(b"", 401))) as local:
        judge = config(local.url, api_key_env="JUDGE_KEY")
        check_rewards([judge])
        try_sources([judge], ["grade"], text_batch("a"), tiny_tokenizer())
        with pytest.raises(ConfigError, match=r"rewards\.0: the service failed to score a test answer: .* status 401"):
            try_sources([judge], ["grade"], text_batch("a"), tiny_tokenizer())
    assert local.headers[0]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"rewards\.0\.api_key_env: the environment variable JUDGE_KEY is not set"):
        check_rewards([judge])


def test_a_key_that_the_judge_repeats_is_in_no_message(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-key")
    replies = Reply({"error": "of Bearer s3cret-key"}), says("you are s3cret-key")
    with local_service(in_turn(*replies)) as local:
        judge = judge_source(config(local.url, api_key_env="JUDGE_KEY", attempts=1), "grade", "rewards.0")
        for _ in replies:
            with pytest.raises(RewardResponseError, match="…") as caught:
                judge.score(text_batch("a"))
            assert "s3cret" not in str(caught.value)
