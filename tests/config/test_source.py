"""Files of reward sources, and runs taken for one."""

import pytest

from tether.config.source import QueryConfig, load_sources
from tether.errors import ConfigError

RUN = """\
model: {path: policy, lora: {}}
rewards:
  - {type: adapter, path: judge}
  - {type: http, url: "http://127.0.0.1:8000/score", protocol: llamafactory}
data: {prompts: prompts.jsonl, system_prompt: Be kind., max_prompt_length: 9}
train: {max_steps: 2, bf16: false}
output_dir: runs/first
"""


def loaded(folder, content, *overrides):
    file = folder / "source.yaml"
    file.write_text(content, encoding="utf-8")
    return load_sources(file, overrides)


def test_rewards_are_enough(tmp_path):
    config = loaded(tmp_path, "rewards: [{type: model, path: judge}]", "--rewards.0.weight=2")
    assert config.model is None
    assert (config.rewards[0].path, config.rewards[0].weight) == ("judge", 2.0)
    assert config.reward_names == ["model"]


def test_of_a_run_what_its_sources_need_is_taken(tmp_path):
    config = loaded(tmp_path, RUN, "--rewards.0.path=other", "--train.max_steps=3")
    assert config.model.path == "policy"
    assert config.reward_names == ["adapter_0", "http_1"]
    assert config.rewards[0].path == "other"
    assert config.data == QueryConfig(system_prompt="Be kind.")
    assert config.bf16 is False and config.fp16 is False
    half = loaded(tmp_path, RUN, "--train.fp16=true")
    assert half.bf16 is False and half.fp16 is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "rewards: [{type: adapter, path: judge}]\nmodel: {path: m, dtype: bfloat16}\nfp16: true",
            "model.dtype bfloat16 and train.fp16 request two different half-precision types",
        ),
        ("model: {path: policy}", r"rewards: missing; wanted a list of groups of keys, at least 1"),
        ("rewards: [{type: adapter, path: a}]", r"rewards\.0: type adapter shares the policy's base: set model.path"),
        (
            "rewards: [{type: ensemble, members: [{type: function, path: a.py, name: f}, "
            '{type: http, url: "http://h/", protocol: llamafactory}]}]',
            r"rewards\.0\.members\.1: protocol llamafactory uses the policy's chat template",
        ),
        (
            "rewards: [{type: function, path: a.py, name: f}]\ndata: {system_prompt: Be kind.}",
            r"data: no source has a tokenizer with a chat template",
        ),
        ("rewards: [{type: model, path: a, name: x}, {type: model, path: b, name: x}]", r"names must be unique"),
        ("rewards: [{type: model, path: a}]\ndata: {prompts: p}", r"line 2: data\.prompts: unknown key"),
        (RUN.replace("max_steps: 2", "max_steps: two"), r"line 6: train\.max_steps: got two"),
        ("rewards: [", r"source\.yaml, line 1"),
    ],
)
def test_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, content)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_sources(tmp_path / "none.yaml")
