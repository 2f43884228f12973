"""``tether chat`` with what is typed piped in."""

import io
import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.loading import load_pairs
from tests.models.build import edit_json, save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config, parse_config
from tether.config.sft_stage import SftStageConfig
from tether.config.source import load_sources
from tether.errors import ConfigError, DataError, GenerationError, ModelError
from tether.generation import hf
from tether.generation.fake import FakeGenerator
from tether.inference.chat import open_chat
from tether.inference.generate import generate_path
from tether.inference.judges import load_reader
from tether.models.loading import load_causal_lm
from tether.train.inputs import load_data
from tether.types import Completion

OPTIONS = {"beside": None, "alone": False, "system": None, "response_length": 6, "temperature": 0.0, "seed": 1}


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    start = save_tiny(folder / "start", tied=False)
    return start, save_adapter(folder / "trained", start, tokenizer=True)


def typed(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def by_transformers(folder, messages):
    """The six most likely tokens after a conversation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_answers_are_those_of_transformers_over_turns(models):
    start, _ = models
    chat = open_chat(str(start), **OPTIONS | {"system": "you run"})
    messages = [{"role": "system", "content": "you run"}]
    for text in ("the cat sees", "i like the dog"):
        messages.append({"role": "user", "content": text})
        (answer,) = chat.say(text)
        assert answer == by_transformers(start, messages)
        messages.append({"role": "assistant", "content": answer})
    chat.forget()
    assert chat.say("the cat sees") == [by_transformers(start, [messages[0], messages[1]])]


def test_two_models_hear_their_own_answers(models):
    start, trained = models
    chat = open_chat(str(trained), **OPTIONS | {"beside": str(start)})
    first = chat.say("the cat sees")
    assert first[0] != first[1] == by_transformers(start, [{"role": "user", "content": "the cat sees"}])
    assert [speaker.turns[-1]["content"] for speaker in chat.speakers] == first


def test_piped_lines_are_answered_until_quit(models, monkeypatch, capsys):
    start, trained = models
    typed(monkeypatch, "the cat sees\n\n/new\n/system you run\n/help\ni like\n/quit\nnever\n")
    arguments = ["chat", str(trained), "--beside", str(start), "--response_length", "5", "--temperature", "0"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("/trained") == 2 and shown.count("/start") == 2  # two answers, side by side
    assert shown.count("a new conversation") == 2 and "/new forgets" in shown and "never" not in shown


def test_the_end_of_input_ends_it(models, monkeypatch, capsys):
    typed(monkeypatch, "")
    assert main(["chat", str(models[0])]) == 0


def test_a_conversation_that_is_too_long_is_told_and_kept(models, monkeypatch, capsys):
    typed(monkeypatch, " ".join(["the"] * 130) + "\n/new\nthe cat\n")
    assert main(["chat", str(models[0]), "--response_length", "4"]) == 0
    shown = capsys.readouterr().out
    assert "/new starts over" in " ".join(shown.split()) and "/start" in shown


def test_a_template_that_refuses_a_system_prompt_ends_nothing(tmp_path, monkeypatch, capsys):
    folder = save_tiny(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no such role') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    typed(monkeypatch, "/system be\nthe cat\n/system\nthe cat\n")
    assert main(["chat", str(folder), "--response_length", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no such role; /new starts over, /system alone removes the system prompt" in shown
    assert "with no system prompt" in shown and shown.count("/start") == 1


def test_without_a_chat_template_text_is_continued(tmp_path):
    folder = save_tiny(tmp_path / "plain", chat_template=False)
    chat = open_chat(str(folder), **OPTIONS)
    assert chat.say("the cat") == chat.say("the cat")  # nothing is remembered


def test_what_a_model_says_does_nothing_to_the_terminal(models, monkeypatch, capsys):
    typed(monkeypatch, "the cat\n")
    monkeypatch.setattr("tether.inference.chat.Chat._answer", lambda *args: "\x1b[2J[bold]x[/bold]")
    assert main(["chat", str(models[0])]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2J[bold]x[/bold]" in shown and "\x1b[2J" not in shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--response_length=0", "above 0"),
        ("--beside=missing", "missing"),
        ("--temperature=-1", "--temperature: got -1.0, wanted a number of at least 0"),
        ("--temperature=nan", "--temperature: got nan"),
        ("--temperature=inf", "--temperature: got inf"),
    ],
)
def test_mistakes(models, capsys, option, message):
    assert main(["chat", str(models[0]), option]) == 2
    assert message in capsys.readouterr().err


def test_what_a_run_started_from_is_loaded_as_the_run_loaded_it(models, tmp_path, monkeypatch):
    start, _ = models
    config = tiny_run(tmp_path, model__path="org/start", model__revision="v1.0", model__trust_remote_code=True)
    out = save_tiny(config.output_dir, tied=False)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    loads = []

    def load(path, **options):
        loads.append((str(path), options.get("revision"), options.get("trust_remote_code", False)))
        return load_causal_lm(str(start) if path == "org/start" else path, dtype=None)

    monkeypatch.setattr("tether.inference.chat.check_model_path", lambda *args, **options: None)
    tokenizer = AutoTokenizer.from_pretrained(start)
    monkeypatch.setattr("tether.inference.chat.load_tokenizer", lambda *args, **options: tokenizer)
    monkeypatch.setattr("tether.inference.saved.load_causal_lm", load)
    open_chat(str(out), **OPTIONS)
    assert loads == [(str(out), None, False), ("org/start", "v1.0", False)], "the run was trusted, its folder is not"
    del loads[:]
    open_chat(str(out), **OPTIONS, trust_remote_code=True)
    assert loads == [(str(out), None, True), ("org/start", "v1.0", True)]
    del loads[:]
    open_chat(str(out), **OPTIONS | {"beside": str(start)}, trust_remote_code=True)
    assert loads == [(str(out), None, True), (str(start), None, True)]


def test_a_start_model_that_is_gone_is_named_with_the_way_out(models, tmp_path):
    config = tiny_run(tmp_path, model__path=str(tmp_path / "gone"))
    out = save_tiny(config.output_dir, tied=False)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.path of the run in .* \(--alone skips it.*gone does not exist"):
        open_chat(str(out), **OPTIONS)
    assert len(open_chat(str(out), **OPTIONS | {"alone": True}).speakers) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_typed_special_tokens_are_the_same_tokens_in_a_run_in_score_and_in_chat(tmp_path, monkeypatch, asked):
    prompts = tmp_path / "rows.jsonl"
    config = tiny_run(tmp_path, kind="qwen2", data__special_tokens=asked, data__prompts=str(prompts))
    text = f"the cat {AutoTokenizer.from_pretrained(config.model.path).eos_token} sees"
    prompts.write_text(json.dumps({"prompt": text, "chosen": "good", "rejected": "bad"}) + "\n", encoding="utf-8")
    data = load_data(config)
    wanted = list(data.prompts.prompts[0].token_ids)
    assert wanted.count(data.tokenizer.eos_token_id) == 1 + asked

    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    source = load_sources(tmp_path / "run.yaml")
    batch = load_reader(source).batch([text], ["good"], {}, ["row 0"])
    assert batch.query_ids == [wanted]

    end_ids, chat = {data.tokenizer.eos_token_id}, config.data.chat
    (pair,) = load_pairs(str(prompts), data.tokenizer, end_ids=end_ids, **chat).pairs
    assert list(pair.chosen_ids[: pair.query_length]) == wanted

    out = save_tiny(config.output_dir, "qwen2")
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    asked_for = noted(monkeypatch)
    open_chat(str(out), **OPTIONS | {"alone": True}).say(text)
    assert asked_for == [wanted]


def noted(monkeypatch):
    """Queries that are answered from now on, each with one token."""
    queries = []

    def generate(self, requests, sampling):
        queries.extend(list(request.token_ids) for request in requests)
        return iter([(i, Completion([1], "stop")) for i in range(len(requests))])

    monkeypatch.setattr("tether.generation.hf.HFGenerator.generate", generate)
    return queries


def test_what_sft_made_is_asked_as_it_was_trained(tmp_path, monkeypatch):
    template = "{% for m in messages %}{{ shout }} <{{ m.role }}> {{ m.content }} {% endfor %}"
    data = {"demonstrations": "d", "system_prompt": "be nice", "chat_template_kwargs": {"shout": "you"}}
    config = parse_config(
        json.dumps({"model": {"path": "start"}, "data": data, "output_dir": str(tmp_path / "sft")}), SftStageConfig
    )
    out = save_tiny(tmp_path / "sft")
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    asked = noted(monkeypatch)
    wanted = tokenizer("you <system> be nice you <user> the cat", add_special_tokens=False)["input_ids"]
    generate_path(out, tmp_path / "prompts.jsonl", output=str(tmp_path / "answers.jsonl"), response_length=4)
    open_chat(str(out), **OPTIONS).say("the cat")
    assert asked == [wanted, wanted]
    del asked[:]
    for system, words in (("you run", "you <system> you run you <user> the cat"), ("", "you <user> the cat")):
        generate_path(str(out), str(tmp_path / "prompts.jsonl"), system=system, response_length=4)
        open_chat(str(out), **OPTIONS | {"system": system}).say("the cat")
        assert asked == [tokenizer(words, add_special_tokens=False)["input_ids"]] * 2
        del asked[:]


def test_a_template_of_a_file_that_is_not_here_is_that_of_the_saved_tokenizer(models, tmp_path, monkeypatch):
    start, _ = models
    config = tiny_run(tmp_path, model__path=str(start), data__chat_template="own.jinja")
    out = save_tiny(config.output_dir, tied=False)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = "{% for m in messages %}you {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(out)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    asked = noted(monkeypatch)
    open_chat(str(out), **OPTIONS).say("the cat")
    assert asked == [tokenizer("you the cat", add_special_tokens=False)["input_ids"]] * 2, "the start is asked alike"


def test_answers_and_what_is_remembered_of_them_end_before_a_stop_string(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, sampling__stop_strings=[" we it"])
    out = save_tiny(config.output_dir, tied=False)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    tokenizer, asked = AutoTokenizer.from_pretrained(out), []
    written = tokenizer("you we it is very good", add_special_tokens=False)["input_ids"]

    def generate(self, requests, sampling):
        asked.extend(list(request.token_ids) for request in requests)
        return FakeGenerator([written]).generate(requests, sampling)

    monkeypatch.setattr("tether.generation.hf.HFGenerator.generate", generate)
    chat = open_chat(str(out), **OPTIONS | {"alone": True})
    assert chat.say("the cat") == chat.say("the sun") == ["you"]
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "the cat"), ("assistant", "you"), ("user", "the sun"))
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert asked[1] == ids
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    (row,) = generate_path(out, tmp_path / "asked.jsonl")
    assert (row["response"], row["finish_reason"]) == ("you", "stop")
    assert generate_path(save_tiny(tmp_path / "alone"), tmp_path / "asked.jsonl", response_length=6) == [
        row | {"response": "you we it is very good", "finish_reason": "length"}
    ]


def test_answers_are_told_as_they_are_written(models):
    start, trained = models
    chat = open_chat(str(trained), **OPTIONS | {"beside": str(start)})
    bits = []
    answers = chat.say("the cat sees", lambda speaker, text: bits.append((speaker, text)))
    for speaker, answer in zip(chat.speakers, answers, strict=True):
        own = [text for who, text in bits if who is speaker]
        assert "".join(own) == answer and len(own) > 1
    assert chat.say("the cat sees") != answers, "the conversation goes on"


def test_how_a_model_decodes_is_found_out_once(models, monkeypatch):
    probed, original = [], hf.decoding

    def decoding(*args, **options):
        probed.append(args)
        return original(*args, **options)

    monkeypatch.setattr(hf, "decoding", decoding)
    chat = open_chat(str(models[0]), **OPTIONS)
    for _ in range(3):
        chat.say("the cat")
    assert len(probed) == 1


def test_on_a_terminal_answers_appear_one_after_the_other(models, monkeypatch, capsys):
    start, trained = models
    typed(monkeypatch, "the cat sees\n")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert main(["chat", str(trained), "--beside", str(start), "--response_length", "5", "--temperature", "0"]) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).splitlines()
    wanted = open_chat(str(trained), **OPTIONS | {"beside": str(start), "response_length": 5}).say("the cat sees")
    shown = [line.strip() for line in lines if line.strip()]
    assert shown[-4:] == [str(trained), wanted[0], str(start), wanted[1]]


@pytest.mark.parametrize("template", [None, "none"])
def test_a_system_prompt_that_no_model_would_read_is_refused(tmp_path, monkeypatch, capsys, template):
    folder = save_tiny(tmp_path / "plain", chat_template=template is not None)
    if template is not None:
        config = tiny_run(tmp_path, model__path=str(folder), data__chat_template=template)
        folder = save_tiny(config.output_dir)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--system: .* chat template, so that it would never read a system prompt"):
        open_chat(str(folder), **OPTIONS | {"alone": True, "system": "be nice"})
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--system.* needs a chat template for prompts that are text"):
        generate_path(folder, tmp_path / "asked.jsonl", system="be nice", response_length=4)
    open_chat(str(folder), **OPTIONS | {"alone": True, "system": ""})
    typed(monkeypatch, "/system be\nthe cat\n")
    assert main(["chat", str(folder), "--alone", "--response_length", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "would never read a system prompt" in shown and "with this system prompt" not in shown
    assert shown.count(folder.name) >= 2, "and it is answered without one"


NO_KEY = re.compile(r"\b(data|sampling|model|train)\.[a-z_]+")


@pytest.mark.parametrize(
    "options", [{"response_length": 0}, {"max_prompt_length": 0}, {"temperature": -1.0}, {"temperature": math.nan}]
)
def test_generate_refuses_options_out_of_range_before_a_model_loads(options, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    (name,) = options
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"--{name}: got .*, wanted a"):
        generate_path(tmp_path / "empty", tmp_path / "asked.jsonl", **options)


@pytest.mark.parametrize(
    ("row", "template", "changes"),
    [
        ({"prompt": [{"role": "user", "content": "a"}]}, False, {}),
        ({"prompt": "a", "tools": [{"type": "function"}]}, True, {}),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "a"}]}, True, {}),
        ({"prompt": "the cat"}, False, {"system": "be nice"}),
        ({"prompt": "the cat"}, True, {"response_length": 500}),
        ({"prompt": "the cat " * 20}, True, {"max_prompt_length": 3}),
    ],
)
def test_messages_of_generate_name_options(tmp_path, row, template, changes):
    folder = save_tiny(tmp_path / "model", chat_template=template)
    (tmp_path / "asked.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises((ConfigError, DataError)) as caught:
        generate_path(folder, tmp_path / "asked.jsonl", **{"response_length": 4} | changes)
    assert not NO_KEY.search(str(caught.value)), caught.value


def full(*args):
    raise torch.OutOfMemoryError("full")


def test_memory_that_runs_out_in_generate_is_told_with_options(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    monkeypatch.setattr("tether.generation.batch.Batch.decode_until_one_ends", full)
    with pytest.raises(GenerationError, match=r"lower --response_length or --max_prompt_length$"):
        generate_path(folder, tmp_path / "asked.jsonl", response_length=4)


def test_messages_of_chat_name_options(models, monkeypatch):
    chat = open_chat(str(models[0]), **OPTIONS)
    with pytest.raises(ConfigError, match="lower --response_length") as caught:
        chat.say("the " * 130)
    assert not NO_KEY.search(str(caught.value))

    monkeypatch.setattr("tether.generation.batch.Batch.decode_until_one_ends", full)
    with pytest.raises(GenerationError, match=r"lower --response_length$") as caught:
        chat.say("the")
    assert not NO_KEY.search(str(caught.value))


def test_messages_about_the_file_of_a_run_name_its_keys(tmp_path):
    out = save_tiny(tmp_path / "out")
    (out / "config.yaml").write_text("rewards: []\nsampling: {response_length: 0}\n", encoding="utf-8")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    for ask in (lambda: generate_path(out, tmp_path / "asked.jsonl"), lambda: open_chat(str(out), **OPTIONS)):
        with pytest.raises(ConfigError, match=r"config\.yaml.*\n(.*\n)*.*sampling\.response_length"):
            ask()


def test_a_model_without_an_end_token_is_told_what_it_lacks(tmp_path):
    folder = save_tiny(tmp_path / "endless")
    for file, name in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        edit_json(folder / file, lambda data, name=name: data.pop(name, None))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has an end token; set eos_token in the tokenizer") as caught:
        generate_path(folder, tmp_path / "asked.jsonl", response_length=4)
    assert not NO_KEY.search(str(caught.value))
