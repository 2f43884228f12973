"""What the keys of a configuration read of a source: parts of splits, subsets, and columns under other names."""

import json
import re

import datasets
import pytest

from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config, parse_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.sft_stage import SftStageConfig
from tether.data.prompts import load_prompts
from tether.errors import ConfigError, DataError
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.stages import reward, sft
from tether.train.inputs import check, load_data

WORDS = ("cat", "dog", "sun", "sea", "day")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """Two subsets of rows as gsm8k has them."""
    path = tmp_path / "maths"
    path.mkdir()
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "other"))
    (path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    for name, article in (("main", "the"), ("other", "a")):
        rows = [{"question": f"{article} {word}", "answer": word, "worse": "bad"} for word in WORDS]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stage(section, folder, **data):
    model = {"path": str(save_tiny(folder.parent / "model"))}
    return parse_config(json.dumps({"model": model, "data": data, "output_dir": str(folder.parent / "out")}), section)


def test_a_run_reads_parts_subsets_and_columns(folder, tmp_path):
    source = str(folder)
    config = tiny_run(
        tmp_path, data__prompts=source, data__subset="main", data__split="train[:60%]", data__eval_prompts=source,
        data__eval_subset="other", data__eval_split="train[60%:]", data__columns={"prompt": "question"},
        data__ptx=source, data__ptx_subset="main", data__ptx_split="train[:1]", ppo__ptx_coef=1.0,
        data__ptx_columns={"prompt": "question", "completion": "answer"},
    )  # fmt: skip
    data = load_data(config)
    assert [prompt.source for prompt in data.prompts.prompts] == ["the cat", "the dog", "the sun"]
    assert [prompt.source for prompt in data.eval_prompts.prompts] == ["a sea", "a day"]
    assert data.prompts.columns == ["answer", "worse"], "which reward functions get under their own names"
    assert data.tokenizer.decode(data.ptx.demonstrations[0].response_ids) == "cat <eos>"


def test_the_other_stages_do_so_too(folder):
    same = {"subset": "main", "split": "train[-1:]", "eval_subset": "other", "eval_split": "train[:2]"}
    of_sft = {"demonstrations": str(folder), "eval_demonstrations": str(folder)}
    columns = {"prompt": "question", "completion": "answer"}
    data = sft.load_data(stage(SftStageConfig, folder, **same, **of_sft, columns=columns))
    assert [data.tokenizer.decode(each.response_ids) for each in data.train] == ["day <eos>"]
    assert [data.tokenizer.decode(each.query_ids).split()[1] for each in data.held_out] == ["a", "a"]
    columns = {"prompt": "question", "chosen": "answer", "rejected": "worse"}
    of_reward = {"pairs": str(folder), "eval_pairs": str(folder)}
    tokenizer, pairs = reward.load_data(stage(RewardStageConfig, folder, **same, **of_reward, columns=columns))
    assert tokenizer.decode(pairs.train[0].chosen_ids).endswith("day <eos>") and len(pairs.train) == 1
    assert tokenizer.decode(pairs.held_out[1].rejected_ids).endswith("bad <eos>") and len(pairs.held_out) == 2


def test_a_source_without_the_column_that_is_named_is_left_as_it_is_and_one_with_both_is_read_by_it(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "you run", "answer": "x"}) + "\n")
    (tmp_path / "both.jsonl").write_text(json.dumps({"prompt": "not this", "question": "a sea", "answer": "y"}) + "\n")
    (tmp_path / "main.jsonl").write_text((folder / "main.jsonl").read_text())
    sources = [str(tmp_path / name) for name in ("main.jsonl", "rows.jsonl", "both.jsonl")]
    columns = {"prompt": "question"}
    config = tiny_run(tmp_path, data__prompts=sources, data__columns=columns, data__max_samples=1)
    data = load_data(config).prompts
    assert [prompt.source for prompt in data.prompts] == ["the cat", "you run", "a sea"]
    assert data.columns == ["answer", "worse"]


def test_prompts_of_the_command_line_are_whole_and_have_the_runs_columns(folder, tmp_path, monkeypatch):
    """A part that a run holds out is a part of its own prompts, not of others."""
    source = str(folder / "main.jsonl")
    parts = {"data__split": "train[:-1]", "data__eval_split": "train[-1:]", "data__eval_prompts": source}
    config = tiny_run(tmp_path, data__prompts=source, data__columns={"prompt": "question"}, **parts)
    save_tiny(config.output_dir)
    (config.output_dir / "config.yaml").write_text(dump_config(config))
    rows = [{"question": "you run"}, {"question": "you see"}, {"question": "not this", "prompt": "a sea"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = []

    def asked(prompts, *given, **options):
        read.append([prompt.source for prompt in load_prompts(prompts, *given, **options).prompts])
        raise StopIteration

    for name in ("evaluate", "generate"):
        monkeypatch.setattr(f"tether.inference.{name}.load_prompts", asked)
    for answer in (evaluate_path, generate_path):
        with pytest.raises(StopIteration):
            answer(config.output_dir, tmp_path / "asked.jsonl")
    assert read == [["you run", "you see", "a sea"]] * 2


def test_each_source_of_a_run_is_read_in_its_own_revision_and_the_run_says_which(tmp_path, monkeypatch):
    asked = {}

    def load_dataset(name, split, revision=None):
        asked[name] = revision
        return datasets.Dataset.from_list([{"prompt": f"the {word}", "completion": "runs"} for word in WORDS])

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, **options: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = {"data__prompts": "org/a", "data__eval_prompts": "org/b", "data__ptx": "org/c"}
    revisions = {"data__revision": "v1", "data__eval_revision": "v2", "data__ptx_revision": "v3"}
    config = tiny_run(tmp_path, **names, **revisions, ppo__ptx_coef=1.0)
    check(config)
    data = load_data(config)
    assert asked == {"org/a": "v1", "org/b": "v2", "org/c": "v3"}
    assert data.prompts.note.startswith("org/a (split train, revision v1): ")
    assert "revision: v1" in dump_config(config)
    load_data(tiny_run(tmp_path, **names, ppo__ptx_coef=1.0))
    assert asked == {"org/a": None, "org/b": None, "org/c": None}


def test_a_revision_of_a_local_file_is_refused_before_a_row_is_read(folder, tmp_path):
    file = str(folder / "main.jsonl")
    told = r"^data\.{}: got v1, but .*main\.jsonl is a local file, which has no revisions: leave it out$"
    runs = {
        "revision": {"data__prompts": ["org/a", file], "data__revision": "v1"},
        "eval_revision": {"data__eval_prompts": file, "data__eval_revision": "v1"},
        "ptx_revision": {"data__ptx": file, "data__ptx_revision": "v1", "ppo__ptx_coef": 1.0},
    }
    for key, given in runs.items():
        with pytest.raises(DataError, match=told.format(key)):
            check(tiny_run(tmp_path, **given))
    with pytest.raises(DataError, match=told.format("revision")):
        sft.check(stage(SftStageConfig, folder, demonstrations=file, revision="v1"))
    with pytest.raises(DataError, match=told.format("eval_revision")):
        reward.check(stage(RewardStageConfig, folder, pairs="org/a", eval_pairs=file, eval_revision="v1"))


@pytest.fixture
def trained(folder, tmp_path):
    """The folder of a run that held out a split called test."""
    config = tiny_run(tmp_path, data__prompts=str(folder / "main.jsonl"), data__columns={"prompt": "question"})
    save_tiny(config.output_dir)
    (config.output_dir / "config.yaml").write_text(dump_config(config))
    return config.output_dir


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_command_reads_the_part_that_its_options_name(folder, trained, monkeypatch, command):
    read = []

    def asked(prompts, *given, **options):
        read.append([prompt.source for prompt in load_prompts(prompts, *given, **options).prompts])
        raise DataError("read")

    monkeypatch.setattr(f"tether.inference.{command}.load_prompts", asked)
    given = [command, str(trained), "--prompts", str(folder)]
    for part, wanted in ((["--split", "train[3:]"], ["a sea", "a day"]), ([], [f"a {word}" for word in WORDS])):
        assert main([*given, "--subset", "other", *part]) == 2
        assert read.pop() == wanted


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_command_reads_the_columns_that_its_option_names(trained, tmp_path, monkeypatch, command):
    """Rather than a column prompt, and instead of the names of the run."""
    read = []

    def asked(prompts, *given, **options):
        read.append([prompt.source for prompt in load_prompts(prompts, *given, **options).prompts])
        raise DataError("read")

    monkeypatch.setattr(f"tether.inference.{command}.load_prompts", asked)
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"prompt": "the cat", "question": "a dog", "ask": "a day"}) + "\n")
    given = [command, str(trained), "--prompts", str(file)]
    for options, wanted in (([], "the cat"), (["--columns={prompt: ask}"], "a day"), (["--columns={}"], "the cat")):
        assert main([*given, *options]) == 2
        assert read.pop() == [wanted]


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{prompt: ask}", "--prompts: {file} has no column ask, which should be its prompt; its columns are: question, "
         "input. Correct it in --columns"),
        ("{prompt: question}", None),
        ("{}", "Rename one, or name it by --columns: {{prompt: …}}"),
        ("{promt: question}", "--columns: got {{promt: question}}, wanted names of columns by ours (prompt, "),
        ("{prompt: 3}", "--columns: got {{prompt: 3}}, wanted names of columns by ours (prompt, "),
        ("question", "--columns: got question, wanted names of columns by ours (prompt, "),
        ("{prompt: [", "argument --columns: got {{prompt: [, which is not YAML: "),
    ],
)
def test_mistakes_in_the_columns_of_a_command(trained, tmp_path, capsys, command, columns, message):
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"question": 3, "input": "more"}) + "\n")
    assert main([command, str(trained), "--prompts", str(file), f"--columns={columns}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (message or "the prompt is a int").format(file=file) in told
    assert "data." not in told


def test_half_of_an_alpaca_prompt_is_refused_for_a_command(trained, tmp_path, capsys):
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"instruction": "the", "input": "cat"}) + "\n")
    assert main(["generate", str(trained), "--prompts", str(file), "--columns={prompt: instruction}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "join the two in one column; if it is something else, rename it" in told and "data." not in told


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"--prompts: .* has the subsets main, other: choose one with --subset$"),
        (["--subset", "third"], r"--prompts: .* main, other, but none called third: choose one with --subset$"),
        (["--subset", "main", "--split", "train[9"], r"--prompts: the split train\[9 cannot be read"),
        (["--subset", "main", "--split", "a+b"], None),
    ],
)
def test_mistakes_of_a_command_name_its_options(folder, trained, capsys, command, options, message):
    for name in ("main", "other"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": 3}) + "\n")
    assert main([command, str(trained), "--prompts", str(folder), *options]) == 2
    told = " ".join(capsys.readouterr().err.split())
    if message is None:
        assert "the prompt is a int" in told
    else:
        assert re.search(message.rstrip("$"), told), told
    assert "data." not in told


def test_limits_and_system_prompts_of_a_command_name_its_options(folder, trained, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the cat sees a dog"}))
    with pytest.raises(DataError, match=r"every prompt of .* \(1 prompt\) is longer than --max_prompt_length 2; "):
        generate_path(trained, tmp_path / "asked.jsonl", max_prompt_length=2)
    plain = save_tiny(tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"^the system prompt \(--system, or the run's\) needs a chat template"):
        generate_path(plain, tmp_path / "asked.jsonl", system="you nice", response_length=4)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": [{"role": "robot", "content": "the cat"}]}))
    with pytest.raises(DataError, match=r"the role 'robot' .* in the chat template: rename it$"):
        generate_path(trained, tmp_path / "asked.jsonl")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "the cat"}]}))
    with pytest.raises(DataError, match=r"has no chat template\. Use prompts that are text, or a model that has one$"):
        generate_path(plain, tmp_path / "asked.jsonl", response_length=4)


def test_a_split_without_prompts_is_refused(trained):
    for part in ({"split": "test"}, {"subset": "main"}, {"columns": {"prompt": "question"}}):
        with pytest.raises(ConfigError, match=r"^--split, --subset and --columns say how --prompts are read, "):
            evaluate_path(trained, **part)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__subset": None}, r"^data\.prompts: .* the subsets main, other: choose one with data\.subset$"),
        (
            {"data__eval_subset": "third"},
            r"^data\.eval_prompts: .* main, other, but none called third: choose one with data\.eval_subset$",
        ),
        (
            {"data__columns": {"prompt": "qestion"}},
            r"^data\.prompts: .* has no column qestion, which should be its prompt; its columns are: question, answer, "
            r"worse\. Correct it in data\.columns$",
        ),
        ({"data__columns": {}}, r"^data\.prompts: .*Rename one, or name it by data\.columns: \{prompt: …\}$"),
    ],
)
def test_mistakes_name_the_key(folder, tmp_path, changes, message):
    usual = {"data__subset": "main", "data__eval_prompts": str(folder), "data__eval_subset": "main"}
    usual["data__columns"] = {"prompt": "question"}
    with pytest.raises(DataError, match=message):
        load_data(tiny_run(tmp_path, data__prompts=str(folder), **usual | changes))


def test_half_of_an_alpaca_prompt_is_refused(tmp_path):
    """Its other half would be lost."""
    def read(**more):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "the", "answer": "a"} | more) + "\n")
        config = tiny_run(tmp_path, data__prompts=str(tmp_path / "rows.jsonl"), data__columns={"prompt": "instruction"})
        return load_data(config).prompts.prompts[0].source

    with pytest.raises(DataError, match=r"^data\.prompts: .*rows\.jsonl has a column input besides instruction, "):
        read(input="cat")
    assert [read(input=""), read(input=None), read(other="cat")] == ["the"] * 3


def test_keys_that_do_nothing_are_refused():
    data = {"dataset_dir": "data", "demonstrations": "d"}
    rest = {"model": {"path": "m"}, "output_dir": "o"}
    values = {"subset": "main", "eval_subset": "main", "revision": "v1", "columns": {"prompt": "question"}}
    for name, value in values.items():
        with pytest.raises(ConfigError, match=rf"data: {name} \(.*\) applies only to sources that dataset_dir"):
            parse_config(json.dumps(rest | {"data": data | {name: value}}), SftStageConfig)
    with pytest.raises(ConfigError, match=r"data\.columns: promt is not a column that is read here; wanted prompt, "):
        parse_config(json.dumps(rest | {"data": {"demonstrations": "d", "columns": {"promt": "x"}}}), SftStageConfig)
