"""Files and overrides to a configuration, the messages about their mistakes, and the way back to text."""

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tether.config import text
from tether.config.load import dump_config, load_config, parse_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.rewards import RewardConfig
from tether.config.schema import RunConfig
from tether.config.source import SourceConfig
from tether.errors import ConfigError

TYPES = [get_args(member.model_fields["type"].annotation)[0] for member in get_args(get_args(RewardConfig)[0])]
FILE = """\
model:
  path: some/model
  lora: {r: 8}
rewards:
  - {type: model, path: judge, weight: 1.0}
  - {type: function, path: my_rewards.py, name: brevity, weight: 0.2}
data: {prompts: prompts.jsonl}
ppo: {kl_coef: 0.05}
train:
  total_episodes: 1e4
  learning_rate: 1e-5
output_dir: runs/first
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


def problems(content, *overrides, section=RunConfig):
    """The lines of the message about a configuration that is refused, without the heading."""
    with pytest.raises(ConfigError) as caught:
        parse_config(content, section, overrides=overrides, source="run.yaml")
    lines = str(caught.value).splitlines()
    return [line.strip() for line in lines[1:]] if len(lines) > 1 else lines


class TestReading:
    def test_a_file_gives_its_values_and_the_defaults(self, file):
        config = load_config(file)
        assert config.model.lora.r == 8
        assert config.model.lora.alpha == 32.0
        assert config.train.total_episodes == 10_000
        assert config.train.learning_rate == 1e-5
        assert [reward.weight for reward in config.rewards] == [1.0, 0.2]
        assert config.output_dir == Path("runs/first")

    def test_a_byte_order_mark_is_no_part_of_the_first_key(self, file):
        file.write_bytes(b"\xef\xbb\xbf" + FILE.encode())
        assert load_config(file).model.path == "some/model"

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "wanted keys and values .* got null"),
            (b"- 1\n", r"wanted keys and values .* got \[1\]"),
            (b"a: \xff\n", "not a UTF-8 text file"),
            (b"a: {", "line 1: .*"),
        ],
    )
    def test_a_file_that_holds_no_configuration_is_named(self, file, content, words):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"run.yaml.*{words}"):
            load_config(file)

    def test_a_missing_file_and_a_folder_are_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nope\.yaml: there is no such file"):
            load_config(tmp_path / "nope.yaml")
        with pytest.raises(ConfigError, match="is a folder"):
            load_config(tmp_path)

    def test_an_output_folder_without_a_name_is_not_the_current_one(self):
        """What is left of ``--output_dir=$OUT`` if the variable is not set."""
        of_run = "rewards: [{type: model, path: j}], data: {prompts: p}, train: {max_steps: 1}"
        for section, keys in {RunConfig: of_run, RewardStageConfig: "data: {pairs: p}"}.items():
            text = f"{{model: {{path: m}}, {keys}, output_dir: o}}"
            (told,) = problems(text, "--output_dir=", section=section)
            assert "--output_dir: got '', which would be the current folder" in told
            assert parse_config(text, section, overrides=["--output_dir=."]).output_dir == Path()

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("a" * 300, r"a{100}… cannot be accessed: File name too long"),
            ("loop", r".*loop cannot be accessed: Too many levels of symbolic links"),
            ("~nobody-of-this-name/x", r"got ~nobody-of-this-name/x, but there is no home folder ~nobody-of-this-name"),
        ],
    )
    def test_a_name_that_no_file_can_have_is_told_with_its_key(self, tmp_path, monkeypatch, name, words):
        (tmp_path / "loop").symlink_to("loop")
        monkeypatch.chdir(tmp_path)
        keys = ["model.path", "value.init", "rewards.0.path", "rewards.1.path", "data.prompts", "data.eval_prompts"]
        keys += ["data.chat_template", "data.dataset_dir", "output_dir", "resume"]
        for key in keys:
            (told,) = problems(FILE, f"--{key}={name}")
            assert re.search(rf"--{key}: {words}$", told), told
        (told,) = problems(FILE, f"--data.prompts=[prompts.jsonl, {name}]")
        assert re.search(rf"--data.prompts: {words}$", told), told
        of_stage = "{model: {path: m}, data: {pairs: p}, output_dir: o}"
        for key in ("model.path", "data.pairs", "output_dir"):
            (told,) = problems(of_stage, f"--{key}={name}", section=RewardStageConfig)
            assert re.search(rf"--{key}: {words}$", told), told

    def test_a_checkpoint_that_may_not_be_read_is_told(self, tmp_path, monkeypatch):
        (tmp_path / "link").symlink_to("nowhere")
        monkeypatch.chdir(tmp_path)
        (told,) = problems(FILE, "--resume=link")
        assert told.endswith("--resume: link is a link to nowhere, which does not exist")

    def test_what_may_be_gone_by_now_is_no_mistake_of_a_file_that_a_run_saved(self, tmp_path, monkeypatch):
        (tmp_path / "prompts.jsonl").symlink_to("gone.jsonl")
        monkeypatch.chdir(tmp_path)
        assert parse_config(FILE).data.prompts == "prompts.jsonl"

    def test_a_name_of_the_hub_may_begin_like_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "org").touch()
        monkeypatch.chdir(tmp_path)
        assert parse_config(FILE, overrides=["--model.path=org/model"]).model.path == "org/model"

    def test_another_section_class_may_be_the_whole_file(self):
        config = parse_config("{model: {path: m}, data: {pairs: p.jsonl}, output_dir: o}", RewardStageConfig)
        assert config.data.pairs == "p.jsonl"
        assert problems("{model: {path: m}, data: {pairz: p}, output_dir: o}", section=RewardStageConfig) == [
            "line 1: data.pairz: unknown key; did you mean data.pairs?",
            "line 1: data.pairs: missing; wanted text or a list of text, at least 1 "
            f"({_help(RewardStageConfig, 'data', 'pairs')})",
        ]


def _help(section, *names):
    for name in names[:-1]:
        section = section.model_fields[name].annotation
    return " ".join(section.model_fields[names[-1]].description.split())


class TestOverrides:
    @pytest.mark.parametrize(
        ("overrides", "read"),
        [
            (["--ppo.kl_coef=0.02"], lambda c: c.ppo.kl_coef == 0.02),
            (["--ppo.kl_coef", "0.02"], lambda c: c.ppo.kl_coef == 0.02),
            (["--ppo.kl_coef=1", "--ppo.kl_coef=2"], lambda c: c.ppo.kl_coef == 2),
            (["--ppo.cliprange_value=null"], lambda c: c.ppo.cliprange_value is None),
            (["--train.learning_rate", "5e-5"], lambda c: c.train.learning_rate == 5e-5),
            (["--rewards.0.weight=-2"], lambda c: c.rewards[0].weight == -2 and c.rewards[1].weight == 0.2),
            (["--rewards.0.weight", "-2"], lambda c: c.rewards[0].weight == -2),
            (["--rewards=[{type: model, path: x}]"], lambda c: [r.path for r in c.rewards] == ["x"]),
            (["--model.lora=null"], lambda c: c.model.lora is None),
            (["--value.kind=head"], lambda c: c.value_kind == "head"),
            (["--model.lora.target_modules=[q, v]"], lambda c: c.model.lora.target_modules == ["q", "v"]),
            (["--resume=true"], lambda c: c.resume is True),
            (["--resume=runs/x/checkpoint-3"], lambda c: c.resume == "runs/x/checkpoint-3"),
            (["--output_dir=a b=c"], lambda c: c.output_dir == Path("a b=c")),
        ],
    )
    def test_a_value_reaches_its_key(self, file, overrides, read):
        assert read(load_config(file, overrides))

    @pytest.mark.parametrize("section", [RunConfig, RewardStageConfig, SourceConfig])
    def test_half_precision_is_of_one_type(self, section):
        of_run = "rewards: [{type: model, path: judge}]\noutput_dir: o\n"
        rest = {RunConfig: f"{of_run}data: {{prompts: p}}\n", RewardStageConfig: "data: {pairs: p}\noutput_dir: o\n"}
        content = "model: {path: p}\n" + rest.get(section, "rewards: [{type: model, path: judge}]\n")
        keys = "" if section is SourceConfig else "train."
        steps = [] if section is SourceConfig else ["--train.max_steps=1"]
        both = [*steps, f"--{keys}fp16=true", f"--{keys}bf16=true"]
        (told,) = problems(content, *both, section=section)
        assert "bf16 and fp16 are both true: set one of them" in told
        parse_config(content, section, overrides=both[:-1], source="run.yaml")
        if section is not SourceConfig:
            (told,) = problems(content, *both[:-1], "--model.dtype=bfloat16", section=section)
            assert "model.dtype bfloat16 and train.fp16 request two different half-precision types" in told

    @pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/vllm-flash-attn3", "sdpa", None])
    def test_a_cache_of_fixed_size_is_not_for_flash_attention(self, kernel):
        static = ["--sampling.cache_implementation=static", f"--model.attn_implementation={kernel or 'null'}"]
        if kernel is None or "flash" not in kernel:
            parse_config(FILE, RunConfig, overrides=static, source="run.yaml")
            return
        (told,) = problems(FILE, *static)
        assert f"cache_implementation static does not work with model.attn_implementation {kernel}" in told
        assert "Set cache_implementation to dynamic, or attn_implementation to sdpa" in told
        parse_config(FILE, RunConfig, overrides=static[1:], source="run.yaml")

    def test_float16_goes_before_the_bfloat16_of_the_hardware(self, file):
        assert load_config(file, ["--train.fp16=true"]).resolved(bf16=True).train.bf16 is False

    @pytest.mark.parametrize(
        ("written", "value"),
        [
            ("7", "7"),
            ("true", "true"),
            ("be kind: always", "be kind: always"),
            ("*kindly* #1", "*kindly* #1"),
            ("'null'", "null"),
            ('"a\\nb"', "a\nb"),
            ("null", None),
            ("", ""),
        ],
    )
    def test_a_key_that_takes_text_takes_it_as_it_is(self, file, written, value):
        assert load_config(file, [f"--data.system_prompt={written}"]).data.system_prompt == value

    @pytest.mark.parametrize(
        ("written", "value"),
        [
            ("my file #1.jsonl", "my file #1.jsonl"),
            ("2024", "2024"),
            ("a: b", "a: b"),
            ("[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
            ("'[a].jsonl'", "[a].jsonl"),
        ],
    )
    def test_a_key_that_takes_texts_too_takes_a_list_in_brackets(self, file, written, value):
        assert load_config(file, [f"--data.prompts={written}"]).data.prompts == value
        assert load_config(file, [f"--data.eval_prompts={written}"]).data.eval_prompts == value
        assert load_config(file, ["--data.eval_prompts=null"]).data.eval_prompts is None

    def test_an_override_mends_what_the_file_has_wrong(self, file):
        file.write_text(FILE.replace("kl_coef: 0.05", "kl_coef: much"))
        assert load_config(file, ["--ppo.kl_coef=0.1"]).ppo.kl_coef == 0.1

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("--ppo.kl_coef=x", "--ppo.kl_coef: got x, wanted a number of at least 0"),
            ("--rewards.2.weight=1", "--rewards.2.weight: rewards has 2 entries, numbered from 0; got 2"),
            ("--rewards.x.weight=1", "--rewards.x.weight: rewards has 2 entries, numbered from 0; got x"),
            ("--model.path.x=1", "--model.path.x: model.path is some/model, which has no key x"),
            ("--ppo.kl_coef=[", "--ppo.kl_coef: [ is not a YAML value"),
            ("--ppo.lma=1", "--ppo.lma: unknown key; did you mean ppo.lam?"),
            ("--kl_coef=1", "--kl_coef: unknown key; it belongs elsewhere: ppo.kl_coef"),
            ("--batch_size=4", "--batch_size: unknown key; here it is train.rollout_batch_size"),
            ("--model.path=\udcff", "--model.path: "),
        ],
    )
    def test_a_mistake_is_told_by_its_override(self, override, words):
        (line,) = problems(FILE, override)
        assert line.startswith(f"run.yaml, {words}")

    def test_an_entry_of_a_list_that_the_file_lacks_is_told_by_its_override(self):
        lines = problems("output_dir: out", "--rewards.0.type=regex")
        wanted = "the file has no rewards, and so no entry 0: add it there, or give all of --rewards='[…]'"
        assert lines[0] == f"--rewards.0.type: {wanted}"
        assert not any("got {0:" in line for line in lines)

    def test_a_number_names_a_key_where_the_file_lacks_a_mapping(self, file):
        assert load_config(file, ["--data.chat_template_kwargs.0=x"]).data.chat_template_kwargs == {"0": "x"}

    @pytest.mark.parametrize("overrides", [["--train.seed"], ["--train.seed", "--resume=true"], ["run2"], ["--=1"]])
    def test_an_override_without_key_or_value_is_refused(self, overrides):
        with pytest.raises(ConfigError, match=r"has no value|wanted an override"):
            parse_config(FILE, overrides=overrides)


class TestProblems:
    def test_all_of_a_file_are_told_at_once_in_its_order(self):
        lines = problems(
            "model: {path: 3, lora: 5}\n"
            "value: {kind: foo}\n"
            "rewards:\n"
            "  - {type: modl}\n"
            "  - {type: function, path: a, name: b, weight: true}\n"
            "  - 7\n"
            "train:\n"
            "  seed: 1.5\n"
            "  bf16: yes\n"
            "  warmup_ratio: 2\n"
            "  report_to: 5\n"
            "  learning_rate: .inf\n"
            "  max_steps: 3\n"
            "ppo: {missing_eos_penalty: 1, missing_eos_score: -1}\n"
            "output_dir: null\n"
        )
        assert lines == [
            "line 1: model.path: got 3, wanted text",
            "line 1: model.lora: got 5, wanted a group of keys or null",
            "line 2: value.kind: got foo, wanted one of adapter, model, head or null",
            f"line 4: rewards.0.type: got modl; wanted one of {', '.join(TYPES)}",
            "line 5: rewards.1.weight: got true, wanted a number",
            "line 6: rewards.2: got 7, wanted a group of keys",
            "line 8: train.seed: got 1.5, wanted a whole number from 0 to 4294967295",
            "line 9: train.bf16: got yes, wanted true or false or null",
            "line 10: train.warmup_ratio: got 2, wanted a number from 0 to 1",
            "line 11: train.report_to: got 5, wanted text or a list of text",
            "line 12: train.learning_rate: got inf, which is not finite; wanted a number of at least 0 or null",
            "line 14: ppo: missing_eos_penalty (1.0) subtracts and missing_eos_score (-1.0) replaces: set one of them",
            "line 15: output_dir: got null, wanted a path",
            "data: missing; wanted a group of keys (The prompts.)",
        ]

    def test_several_are_counted_and_one_stands_on_one_line(self):
        with pytest.raises(ConfigError, match=r"^run\.yaml: 2 problems\n  line 1: a: .*\n  line 2: b: "):
            parse_config("a: 1\nb: 2\n" + FILE, source="run.yaml")
        with pytest.raises(ConfigError, match=r"\Arun\.yaml, line 1: a: .*\Z"):
            parse_config("a: 1\n" + FILE, source="run.yaml")

    def test_a_rule_over_several_keys_speaks_for_itself(self):
        assert problems(FILE, "--ppo.num_mini_batches=3") == [
            "run.yaml: ppo.num_mini_batches 3 must divide train.rollout_batch_size 64: try 2 or 4"
        ]

    def test_a_rule_over_absurd_numbers_answers_at_once(self):
        (line,) = problems(FILE, f"--train.rollout_batch_size={10**30 + 57}", "--train.micro_batch_size=8")
        assert line.endswith("micro_batch_size 8 must divide rollout_batch_size 1000000000000000000000000000057: try 1")

    @pytest.mark.parametrize("value", ["'0.1'", "true", "[0.1]", "null", "{}"])
    def test_no_other_type_passes_for_a_number(self, value):
        (line,) = problems(FILE.replace("kl_coef: 0.05", f"kl_coef: {value}"))
        assert "ppo.kl_coef: got" in line

    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("outputdir: x", "did you mean output_dir?"),
            ("overwrite-output-dir: true", "did you mean overwrite_output_dir?"),
            ("model.lora.r: 4", "nest it: model: {lora: {r: …}}"),
            ("gamma: 1", "it belongs elsewhere: ppo.gamma"),
            ("init_kl_coef: 0.2", "here it is ppo.kl_coef"),
            ("top_p: 0.9", "it belongs elsewhere: sampling.top_p"),
            ("min_p: 0.9", "answers are drawn from the policy's own distribution"),
            ("qqqqq: 1", "allowed here: model, value, rewards, data, sampling, ppo, train, output_dir"),
        ],
    )
    def test_an_unknown_key_is_told_what_to_write(self, key, hint):
        (line,) = problems(f"{key}\n{FILE}")
        assert line.startswith(f"run.yaml, line 1: {key.split(':')[0]}: unknown key; {hint}")

    def test_every_key_of_another_systems_group_is_named_by_its_line(self):
        lines = problems("algo:\n  kl:\n    init_coef: 0.01\n    other: 1\n  advantage: {lambd: 1}\n" + FILE)
        assert lines == [
            "line 3: algo.kl.init_coef: unknown key; here it is ppo.kl_coef",
            "line 5: algo.advantage.lambd: unknown key; here it is ppo.lam",
        ]


class TestStopStrings:
    @pytest.mark.parametrize(
        ("written", "read"),
        [
            ('["\\nHuman:", "###"]', ["\nHuman:", "###"]),
            ('"###"', ["###"]),
            ("Human", ["Human"]),
            ("[]", []),
            ("['7', ' ']", ["7", " "]),
        ],
    )
    def test_one_or_several(self, written, read):
        config = parse_config(f"{FILE}sampling: {{stop_strings: {written}}}\n")
        assert config.sampling.stop_strings == read
        assert parse_config(dump_config(config)) == config

    def test_on_the_command_line(self, file):
        given = {"###": ["###"], "7": ["7"], '["\\n#", b]': ["\n#", "b"], '"\\n"': ["\n"], "[]": []}
        for written, read in given.items():
            assert load_config(file, [f"--sampling.stop_strings={written}"]).sampling.stop_strings == read

    @pytest.mark.parametrize(
        ("written", "what"),
        [
            ("###", "got null; wanted text or a list of text, in quotes as # begins a comment; or leave it out"),
            ('""', "entry 0 is empty, which would end every answer at once: remove it"),
            ('[a, ""]', "entry 1 is empty, which would end every answer at once: remove it"),
            ("7", "got 7, wanted text or a list of text"),
            ("[a, 7]", "got [a, 7], wanted text or a list of text"),
            ("[[a]]", "got [[a]], wanted text or a list of text"),
            ("{a: b}", "got {a: b}, wanted text or a list of text"),
        ],
    )
    def test_mistakes(self, written, what):
        (line,) = problems(f"{FILE}sampling:\n  stop_strings: {written}\n")
        assert line == f"run.yaml, line 14: sampling.stop_strings: {what}"

    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("stop", "here it is sampling.stop_strings"),
            ("stop_sequences", "here it is sampling.stop_strings"),
            ("stop_strings", "it belongs elsewhere: sampling.stop_strings"),
            ("stop_token_id", "here it is sampling.stop_token: the token itself, not its id"),
        ],
    )
    def test_other_names(self, key, hint):
        (line,) = problems(f"{FILE}sampling: {{}}\n{key}: x\n")
        assert line == f"run.yaml, line 14: {key}: unknown key; {hint}"


def test_lora_targets_that_can_match_nothing(file):
    whats = {"q_proj(": r"is not a regular expression: missing \)", "[]": "an empty list names no module"}
    for targets, what in whats.items():
        with pytest.raises(ConfigError, match=rf"--model\.lora\.target_modules: .*{what}"):
            load_config(file, [f"--model.lora.target_modules={targets}"])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sampling": {"stop_strings": ["the", "a\0"]}}, "sampling.stop_strings"),
        ({"data": {"prompts": "p", "chat_template_kwargs": {"a": ["\0"]}}}, "data.chat_template_kwargs"),
        ({"rewards": [{"type": "regex", "pattern": "\0"}]}, "rewards.0.regex.pattern"),
        ({"output_dir": Path("o\0")}, "output_dir"),
    ],
)
def test_what_its_file_could_not_hold_is_refused_in_python_too(changes, key):
    usual = {"model": {"path": "m"}, "rewards": [{"type": "regex", "pattern": "a"}], "data": {"prompts": "p"}}
    with pytest.raises(ValidationError, match=rf"{key}\n.*wanted text without NUL"):
        RunConfig(**usual | {"train": {"max_steps": 1}, "output_dir": "o"} | changes)


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
NUMBERS = st.floats(min_value=1e-300, max_value=1e300)


@settings(deadline=None, derandomize=True)
@given(
    path=WORDS,
    template=st.none() | WORDS,
    kl=NUMBERS,
    episodes=st.integers(1, 10**12),
    seed=st.integers(),
    clip=st.none() | NUMBERS,
    modules=WORDS.map(re.escape) | st.lists(WORDS, min_size=1),
    resume=st.booleans() | WORDS,
    weight=st.floats(-1e300, 1e300),
)
def test_a_dumped_configuration_loads_as_an_equal_one(
    path, template, kl, episodes, seed, clip, modules, resume, weight
):
    config = RunConfig.model_validate(
        {
            "model": {"path": path, "lora": {"target_modules": modules}},
            "rewards": [{"type": "function", "path": path, "name": "f", "weight": weight}],
            "data": {"prompts": path, "system_prompt": template},
            "ppo": {"kl_coef": kl, "cliprange_value": clip},
            "train": {"total_episodes": episodes, "seed": seed % 2**32},
            "output_dir": path,
            "resume": resume,
        }
    )
    assert parse_config(dump_config(config)) == config


def test_a_dump_holds_every_key(file):
    config = load_config(file)
    assert text.parse(dump_config(config)).data == config.model_dump(mode="json")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text() | st.lists(st.sampled_from([*"{}[]:,-&*!#|>'\"\n \t", "model", "path", "train", "1e5"])).map("".join))
def test_any_text_is_a_configuration_or_a_readable_mistake(content):
    with pytest.raises(ConfigError, match=r"configuration(:|, line \d+:) "):
        parse_config(content)


def test_a_path_at_home_is_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(FILE, overrides=["--output_dir=~/runs/a", "--data.prompts=[~/one.jsonl, b~/two.jsonl]"])
    assert config.output_dir == tmp_path / "runs/a"
    assert config.data.prompts == [str(tmp_path / "one.jsonl"), "b~/two.jsonl"]


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64])
def test_a_seed_that_some_generator_does_not_take_is_refused(seed):
    with pytest.raises(ConfigError, match=rf"train\.seed: got {seed}, wanted a whole number from 0 to 4294967295"):
        parse_config(f"train: {{seed: {seed}}}\n")
