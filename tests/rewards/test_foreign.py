"""Reward functions written for OpenRLHF and verl."""

import inspect

import pytest

from tests.rewards.batches import text_batch
from tether.config.rewards import FunctionReward
from tether.errors import ConfigError, DataError, RewardError, RewardResponseError
from tether.rewards.build import check_contents, check_reward_columns, check_rewards, try_sources
from tether.rewards.function import FunctionSource, check_columns, load_function

CHAT = [{"role": "user", "content": "hi"}]
VERL = {"data_source": ["a", "b"], "reward_model": [{"ground_truth": "x"}, {"ground_truth": "yy"}]}


@pytest.fixture
def source(tmp_path):
    """Makes a source of a file's text."""

    def make(text, label=None, **arguments):
        file = tmp_path / "judge.py"
        file.write_text(f"import functools\nimport numpy as np\nimport torch\n{text}")
        return FunctionSource(load_function(str(file), "f", "rewards.0", label, arguments), "f")

    return make


def scores(source, **columns):
    batch = text_batch("x", "yyy", prompts=["who", CHAT], **columns)
    return source.score(batch).scores


@pytest.mark.parametrize(
    "body",
    [
        "return torch.tensor([float(len(q)) for q in queries])",
        "return {'rewards': torch.tensor([[len(q)] for q in queries]), 'scores': [0, 0], 'extra_logs': {}}",
        "return [{'rewards': torch.tensor([len(q)])} for q in queries]",
        "return [{'rewards': len(q)} for q in queries]",
        "return [len(q) for q in queries]",
        "return np.array([[len(q)] for q in queries])",
        "return tuple(torch.tensor([len(q)]) for q in queries)",
        "return {'rewards': np.array([len(q) for q in queries]), 'extra_logs': {'a': [1, 2]}}",
    ],
)
def test_openrlhfs_function_gets_prompts_with_their_answers(source, body):
    assert scores(source(f"def f(queries, prompts, labels, **kwargs): {body}")) == [4.0, 14.0]


def test_openrlhfs_function_gets_the_prompts_as_the_policy_reads_them_and_the_labels_of_a_column(source):
    body = "return [len(p) + 100 * (a == 'yes') for p, a in zip(prompts, labels)]"
    labelled = source(f"def f(queries, prompts, labels): {body}", "answer")
    assert scores(labelled, answer=["yes", "no"]) == [103.0, 11.0]
    assert scores(source(f"def f(queries, prompts, labels): {body}")) == [3.0, 11.0]
    assert scores(source("async def f(queries, prompts): return {'rewards': [1, 2]}")) == [1.0, 2.0]
    with pytest.raises(ConfigError, match="needs answer, but the dataset's columns are gold"):
        check_columns(labelled.function, ["gold"], "f", "rewards.0")


@pytest.mark.parametrize(
    "text",
    [
        "def f(data_source, solution_str, ground_truth, extra_info=None): return len(solution_str) - len(ground_truth)",
        "def f(solution_str, ground_truth, **others): return {'score': len(solution_str) - len(ground_truth), 'a': 1}",
        "async def f(solution_str, ground_truth): return {'score': len(solution_str) - len(ground_truth)}",
        "def f(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
        "    return [{'score': len(s) - len(g)} for s, g in zip(solution_strs, ground_truths)]",
        "def f(data_sources, solution_strs, ground_truths, extra_infos=None, **kwargs):\n"
        "    return np.array([len(s) - len(g) for s, g in zip(solution_strs, ground_truths)])",
        "def base(data_source, solution_str, ground_truth, extra_info=None, scale=2.0):\n"
        "    return {'score': torch.tensor(scale * (len(solution_str) - len(ground_truth))), 'pred': None}\n"
        "f = functools.partial(base, scale=1.0)",
        "class Judge:\n"
        "    def __call__(self, solution_str, ground_truth): return np.float32(len(solution_str) - len(ground_truth))\n"
        "f = Judge()",
        "def f(solution_str, ground_truth): return {'score': torch.tensor([len(solution_str) - len(ground_truth)])}",
        "f = lambda solution_str, ground_truth, extra_info=None: len(solution_str) - len(ground_truth)",
    ],
)
def test_verls_function_gets_one_answer_with_its_truth_or_the_batch(source, text):
    assert scores(source(text), **VERL) == [0.0, 1.0]


def test_verls_function_gets_the_other_columns_that_it_takes(source):
    taken = "data_source, solution_str, ground_truth, extra_info={}"
    text = f"def f({taken}): return len(extra_info['i']) + (data_source == 'b')"
    assert scores(source(text), **VERL, extra_info=[{"i": "123"}, {"i": "1"}]) == [3.0, 2.0]
    needy = source("def f(data_source, solution_str, ground_truth, extra_info): return 0").function
    with pytest.raises(ConfigError, match="needs data_source, extra_info, but the dataset's columns are reward_model"):
        check_columns(needy, ["reward_model"], "f", "rewards.0")
    modest = source("def f(solution_str, ground_truth, extra_info=None): return 0").function
    check_columns(modest, ["reward_model"], "f", "rewards.0")


@pytest.mark.parametrize(
    "text",
    [
        "def f(data_source, solution_str, ground_truth, extra_info=None): return told(extra_info)",
        "def f(data_sources, solution_strs, ground_truths, extra_infos): return list(map(told, extra_infos))",
        "def f(solution_str, ground_truth, **others): return told(others['extra_info'])",
    ],
)
def test_verls_function_finds_what_verl_adds_to_every_row(source, text):
    """And nothing that a call changes in there is seen by the next one, or in the row."""
    told = (
        "def told(extra):\n"
        "    turns, scores, own = extra.pop('num_turns'), extra['rollout_reward_scores'], extra.get('i', 0)\n"
        "    scores['seen'] = extra['i'] = 1 + len(scores)\n"
        "    return turns + 10 * own + 100 * (scores['seen'] - 1)\n"
    )
    made, columns = source(told + text), {"extra_info": [{"i": 3}, None]}
    for _ in range(2):
        assert scores(made, **VERL, **columns) == [32.0, 2.0]
    assert columns == {"extra_info": [{"i": 3}, None]}
    if "extra_infos" not in text:
        assert scores(made, **VERL) == [2.0, 2.0]


@pytest.mark.parametrize("takes", ["prompts, completions", "solution_str, ground_truth, **others", "queries, prompts"])
def test_a_label_that_no_argument_gets_is_told(source, takes):
    with pytest.raises(ConfigError, match=r"rewards\.0\.label: f\(.*takes columns by their own names; leave it out"):
        source(f"def f({takes}): return 0", "answer")


@pytest.mark.parametrize(
    "text",
    [
        "def f(solution_str, ground_truth, scale, extra_info=None, shift=0): return scale * len(solution_str) + shift",
        "def f(solution_str, ground_truth, **others):\n"
        "    return others['scale'] * len(solution_str) + others['shift']",
        "async def f(solution_str, ground_truth, *, scale, shift): return scale * len(solution_str) + shift",
        "def f(solution_strs, ground_truths, scale, shift): return [scale * len(s) + shift for s in solution_strs]",
        "def f(queries, prompts, labels, scale, shift): return [scale * len(q) + shift for q in ('x', 'yyy')]",
        "def f(prompts, completions, scale, shift): return [scale * n + shift for n in (1, 3)]",
        "async def f(prompts, completions, **others):\n"
        "    return [others['scale'] * n + others['shift'] for n in (1, 3)]",
    ],
)
def test_arguments_go_to_the_function_and_before_columns(source, text):
    made = source(text, scale=10, shift=1)
    check_columns(made.function, [*VERL, "shift"], "f", "rewards.0")
    assert scores(made, **VERL, shift=[7, 8]) == [11.0, 31.0]


def test_an_argument_that_the_function_changes_is_the_same_in_the_next_call(source):
    made = source("def f(solution_str, ground_truth, seen): seen.append(1); return len(seen)", seen=[])
    assert scores(made, **VERL) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "why"),
    [("scal", r"f\(prompts, completions, scale=1\) in .* takes no argument of this name; leave it out"),
     ("completions", "the run itself gives .* this argument"), ("rendered_prompts", "the run itself gives ")],
)  # fmt: skip
def test_an_argument_that_the_function_cannot_get_is_told(source, name, why):
    with pytest.raises(ConfigError, match=rf"^rewards\.0\.arguments\.{name}: {why}"):
        source("def f(prompts, completions, scale=1): return 0", **{name: 2})


def test_arguments_of_a_section_are_checked_before_a_run(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("def f(prompts, completions, scale): return 0")
    given = {"type": "function", "path": str(file), "name": "f"}
    check_reward_columns([FunctionReward(**given, arguments={"scale": 2})], ["answer"])
    with pytest.raises(ConfigError, match="needs scale, but the dataset's columns are answer"):
        check_reward_columns([FunctionReward(**given)], ["answer"])
    with pytest.raises(ConfigError, match=r"^rewards\.0\.arguments\.scales: f.* takes no argument of this name"):
        check_rewards([FunctionReward(**given, arguments={"scales": 2})])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("def f(queries, prompts, **kwargs): return [len(kwargs)] * len(prompts)", 0.0),
        ("def f(queries, prompts, *rest): return [len(rest)] * len(prompts)", 1.0),
        ("f = functools.partial(lambda queries, prompts, scale: [scale] * len(prompts), scale=3)", 3.0),
    ],
)
def test_openrlhfs_function_gets_labels_only_where_it_has_a_place_for_them(source, text, kept):
    assert scores(source(text)) == [kept, kept]


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        ("queries, prompts, labels, tokenizer", "missing a required argument: 'tokenizer'"),
        ("data_source, solution_str, ground_truth, extra_info, router", "missing a required argument: 'router'"),
        ("solution_strs, ground_truths, *, model", "missing a required argument: 'model'"),
    ],
)
def test_an_argument_that_neither_project_passes_is_named(source, takes, told):
    with pytest.raises(ConfigError, match=rf"rewards\.0\.name: f\(.*cannot be called as .*: {told}"):
        source(f"def f({takes}): return 0")


def test_a_class_is_no_function(source):
    with pytest.raises(ConfigError, match=r"f in .* is a class, wanted a function, or an object"):
        source("class f:\n    def __init__(self, **kwargs): ...")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(queries, prompts, labels): return {'reward': [1, 2]}", "it returned a dict of reward; wanted one with"),
        ("def f(solution_str, ground_truth): return {'acc': 1, 'pred': ''}", "it returned a dict of acc, pred; wanted"),
        ("def f(solution_strs, ground_truths): return None", "returned None"),
        ("def f(solution_str, ground_truth): return None", "returned None for answer 0 of 2"),
        ("def f(solution_str, ground_truth): return float('nan')", r"returned nan \(float\) for answer 0 of 2"),
        ("def f(queries, prompts, labels): return torch.tensor([1.0])", "returned 1 score for 2 answers"),
    ],
)
def test_what_is_no_score_is_told(source, text, told):
    with pytest.raises(RewardError, match=told):
        scores(source(text), **VERL)


def test_async_functions_are_called_while_others_are_generated(source):
    assert inspect.iscoroutinefunction(source("async def f(solution_str, ground_truth): return 0").function)
    assert inspect.iscoroutinefunction(source("async def f(queries, prompts, labels): return [0]").function)
    assert not inspect.iscoroutinefunction(source("def f(queries, prompts, labels): return [0]").function)


@pytest.mark.parametrize("truth", [None, "x", {"style": "rule"}])
def test_a_row_without_a_ground_truth_is_named_before_a_model_loads(source, tmp_path, truth):
    source("def f(solution_str, ground_truth): return 0")
    config = FunctionReward(type="function", path=str(tmp_path / "judge.py"), name="f")
    rows = [("who", {"reward_model": {"ground_truth": None}}, "row 1"), ("who", {"reward_model": truth}, "row 2")]
    with pytest.raises(DataError, match=r"row 2, for rewards\.0: column reward_model holds .*; wanted {'ground_truth'"):
        check_contents([config], rows)
    check_contents([config], rows[:1])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{'scores': [1.0]}", "dict of scores; wanted one with rewards"),
        ("None", "returned None"),
        ("'1'", "returned '1'"),
        ("['1'] * 2", r"returned '1' \(str\) for answer 0"),
        ("[1.0]", "returned 1 score for 2 answers"),
        ("1.0", r"returned 1\.0 \(float\); wanted a list of 2 numbers"),
        ("torch.tensor(1.0)", "returned 1 score for 2 answers"),
        ("np.array(1.0)", "returned 1 score for 2 answers"),
        ("[{'rewards': {'a': 1}}]", "dict of a; wanted one with rewards"),
    ],
)
def test_what_no_answer_can_cause_is_told_before_a_model_loads(source, tmp_path, body, told):
    source(f"def f(queries, prompts, labels): return {body}")
    config = FunctionReward(type="function", path=str(tmp_path / "judge.py"), name="f")
    with pytest.raises(ConfigError, match=rf"rewards\.0: the function failed to score a test answer: .*{told}"):
        try_sources([config], ["f"], text_batch("Hello.", prompts=["who"]), None)


@pytest.mark.parametrize(
    "body", ["[float('nan')] * len(prompts)", "[None] * len(prompts)", "torch.ones(len(prompts)).squeeze()"]
)
def test_what_certain_answers_can_cause_is_not(source, tmp_path, body):
    """But an error when answers cause it, such as one alone."""
    source(f"def f(prompts, completions): return {body}")
    config = FunctionReward(type="function", path=str(tmp_path / "judge.py"), name="f")
    try_sources([config], ["f"], text_batch("Hello.", prompts=["who"]), None)
    function = FunctionSource(load_function(config.path, config.name, "rewards.0"), "f")
    with pytest.raises(RewardResponseError):
        function.score(text_batch("Hello.", prompts=["who"]))
