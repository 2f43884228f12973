"""From configuration to sources: what is checked before a model is loaded, and what is built."""

import json
import math

import peft
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from tests.rewards.batches import chat_batch, text_batch
from tests.rewards.encoders import encoder_tokenizer, plain_score, save_encoder
from tests.rewards.value_heads import plain_value, save_value_head
from tests.tiny import save_tiny, tiny_classifier, tiny_tokenizer
from tether.config.rewards import FunctionReward, RewardConfig
from tether.config.schema import RunConfig
from tether.errors import ConfigError, DataError, ModelError
from tether.models.adapters import with_adapter
from tether.models.build import build_roles
from tether.models.classifiers import classifier_on
from tether.models.loading import load_causal_lm
from tether.models.roles import ModelRoles
from tether.models.tokenizer import load_tokenizer
from tether.rewards.build import (
    build_rewards,
    check_contents,
    check_conversations,
    check_reward_columns,
    check_rewards,
    try_sources,
)
from tether.types import Prompt, RewardSource

TURNS = [("the cat sees", "good"), ("it is a very nice day", "the sun and the blue night")]


def configs(*sources):
    return [TypeAdapter(RewardConfig).validate_python(source) for source in sources]


@pytest.fixture
def function_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("def words(prompts, completions): return [len(c[0]['content'].split()) for c in completions]")
    return str(file)


def save_reward_adapter(folder, base, *, seed=1):
    """A LoRA adapter of a sequence classifier on ``base`` with weights far from zero."""
    torch.manual_seed(seed)
    model = classifier_on(load_causal_lm(str(base), dtype=torch.float32))
    settings = {"task_type": "SEQ_CLS", "r": 4, "target_modules": "all-linear", "modules_to_save": ["score"]}
    adapted = with_adapter(model, peft.LoraConfig(base_model_name_or_path=str(base), **settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.get_base_model().eval()


def test_sources_of_every_kind_add_up(tmp_path, function_file):
    policy = save_tiny(tmp_path / "policy")
    save_tiny(tmp_path / "judge", num_labels=1, seed=3)
    classifier = save_reward_adapter(tmp_path / "adapter", policy)
    run = RunConfig.model_validate(
        {
            "model": {"path": str(policy), "lora": {"r": 2}},
            "rewards": [
                {"type": "model", "path": str(tmp_path / "judge"), "weight": 0.5},
                {"type": "adapter", "path": str(tmp_path / "adapter"), "batch_size": 1},
                {"type": "function", "path": function_file, "name": "words", "weight": -0.25},
            ],
            "data": {"prompts": "prompts.jsonl"},
            "train": {"max_steps": 1},
            "output_dir": str(tmp_path / "out"),
        }
    )
    tokenizer = load_tokenizer(str(policy))
    roles = build_roles(run, tokenizer, device="cpu", autocast_dtype=None)
    rewards = build_rewards(run.rewards, run.reward_names, roles=roles, tokenizer=tokenizer, device="cpu")
    assert isinstance(rewards, RewardSource)
    batch = chat_batch(tokenizer, TURNS)
    output = rewards.score(batch)

    assert list(output.components) == ["model_0", "adapter_1", "words"]
    ids = [torch.tensor([q + r]) for q, r in zip(batch.query_ids, batch.response_ids, strict=True)]
    with torch.no_grad():
        judge = tiny_classifier(seed=3).eval()
        by_model = [judge.score(judge.base_model(i).last_hidden_state)[0, -1].item() for i in ids]
        by_adapter = [classifier.score(classifier.base_model(i).last_hidden_state)[0, -1].item() for i in ids]
    assert output.components["model_0"] == pytest.approx(by_model, abs=1e-5)
    assert output.components["adapter_1"] == pytest.approx(by_adapter, abs=1e-5)
    assert output.components["words"] == [1.0, 6.0]
    sums = [0.5 * m + a - 0.25 * w for m, a, w in zip(by_model, by_adapter, (1.0, 6.0), strict=True)]
    assert output.scores == pytest.approx(sums, abs=1e-5)


def test_an_ensemble_of_adapters_on_the_policys_base(tmp_path):
    policy = save_tiny(tmp_path / "policy")
    classifiers = [save_reward_adapter(tmp_path / str(seed), policy, seed=seed) for seed in (1, 2)]
    members = [{"type": "adapter", "path": str(tmp_path / str(seed)), "name": f"seed_{seed}"} for seed in (1, 2)]
    run = RunConfig.model_validate(
        {
            "model": {"path": str(policy), "lora": {"r": 2}},
            "value": {"init": "policy"},
            "rewards": [{"type": "ensemble", "members": members, "reduce": "uwo", "coef": 0.1}],
            "data": {"prompts": "prompts.jsonl"},
            "train": {"max_steps": 1},
            "output_dir": str(tmp_path / "out"),
        }
    )
    check_rewards(run.rewards)
    tokenizer = load_tokenizer(str(policy))
    roles = build_roles(run, tokenizer, device="cpu", autocast_dtype=None)
    rewards = build_rewards(run.rewards, run.reward_names, roles=roles, tokenizer=tokenizer, device="cpu")
    batch = chat_batch(tokenizer, TURNS)
    output = rewards.score(batch)
    ids = [torch.tensor([q + r]) for q, r in zip(batch.query_ids, batch.response_ids, strict=True)]
    with torch.no_grad():
        one, two = ([c.score(c.base_model(i).last_hidden_state)[0, -1].item() for i in ids] for c in classifiers)
    assert output.components["ensemble/seed_1"] == pytest.approx(one, abs=1e-5)
    assert output.components["ensemble/seed_2"] == pytest.approx(two, abs=1e-5)
    pairs = zip(one, two, strict=True)
    assert output.scores == pytest.approx([(a + b) / 2 - 0.1 * ((a - b) / 2) ** 2 for a, b in pairs], abs=1e-4)
    assert [row.role for row in roles.table()][-2:] == ["reward/ensemble/seed_1", "reward/ensemble/seed_2"]


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_judges_of_other_families_and_files(tmp_path, form):
    bert, value_head = save_encoder(tmp_path / "bert"), save_value_head(tmp_path / "llamafactory", "gpt2", form=form)
    sources = configs(
        {"type": "model", "path": str(bert), "input_format": "pair"},
        {"type": "value_head", "path": str(value_head), "weight": -2.0},
    )
    check_rewards(sources)
    tokenizer = load_tokenizer(str(value_head))
    no_roles = object.__new__(ModelRoles)
    rewards = build_rewards(sources, ["bert", "value"], roles=no_roles, tokenizer=tokenizer, device="cpu")
    batch = chat_batch(tokenizer, TURNS)
    output = rewards.score(batch)
    by_bert = [plain_score(bert, prompt, answer) for prompt, answer in TURNS]
    values = [plain_value(value_head, q + r) for q, r in zip(batch.query_ids, batch.response_ids, strict=True)]
    assert output.components["bert"] == pytest.approx(by_bert, abs=1e-5)
    assert output.components["value"] == pytest.approx(values, abs=1e-5)
    assert output.scores == pytest.approx([b - 2 * v for b, v in zip(by_bert, values, strict=True)], abs=1e-5)


def test_what_a_judge_can_be_shown_is_tried_before_it_is_loaded(tmp_path):
    bert, policy = save_encoder(tmp_path / "bert"), tiny_tokenizer()
    user, system = {"role": "user", "content": "the cat"}, {"role": "system", "content": "be nice"}
    prompts = [
        Prompt(3, "the cat", "the cat", (12,)),
        Prompt(4, "the cat", "<user> the cat", (5, 12), conversation=[user]),
        Prompt(5, "the cat", "<user> the cat", (5, 12), conversation=[user]),
        Prompt(7, "the cat", "<user> the cat", (5, 12), conversation=[system, user]),
    ]
    judge = {"type": "model", "path": str(bert)}
    check_conversations(configs(judge), prompts[:1], policy)
    with pytest.raises(ConfigError, match=r"rewards\.1: .*answer to row 4 of the prompts .* has no chat template"):
        check_conversations(configs(judge | {"input_format": "pair"}, judge), prompts, policy)
    with pytest.raises(ConfigError, match=r"rewards\.0: .*answer to row 3 of the prompts .* has no chat template"):
        check_conversations(configs(judge | {"input_format": "chat"}), prompts[:1], policy)
    for form in ("joined", "pair", "response"):
        check_conversations(configs(judge | {"input_format": form}), prompts, policy)
    own = encoder_tokenizer("bert")
    own.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}x"
    own.save_pretrained(bert)
    check_conversations(configs(judge), prompts[:3], policy)
    with pytest.raises(ConfigError, match=r"rewards\.0: .*row 7 .* refuses messages of the roles system, user"):
        check_conversations(configs(judge), prompts, policy)
    check_conversations(configs(judge), prompts, own)
    with pytest.raises(ConfigError, match=r"rewards\.0: .*row 7 .* refuses messages of the roles system, user"):
        check_conversations(configs(judge | {"input_format": "chat"}), prompts, own)


def test_checks_pass_what_can_be_built(tmp_path, function_file):
    base = save_tiny(tmp_path / "base")
    save_encoder(tmp_path / "bert")
    save_value_head(tmp_path / "value")
    save_tiny(tmp_path / "judge", num_labels=1)
    save_reward_adapter(tmp_path / "adapter", base)
    sources = configs(
        {"type": "model", "path": str(tmp_path / "judge")},
        {"type": "model", "path": str(tmp_path / "adapter")},
        {"type": "model", "path": str(tmp_path / "bert")},
        {"type": "value_head", "path": str(tmp_path / "value" / "reward")},
        {"type": "adapter", "path": str(tmp_path / "adapter")},
        {"type": "function", "path": function_file, "name": "words"},
    )
    check_rewards(sources)
    check_reward_columns(sources, ["answer"])
    (tmp_path / "judge" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"rewards\.0\.path"):
        check_rewards(sources)


def test_mistakes_are_found_before_a_model_is_loaded(tmp_path, function_file):
    save_tiny(tmp_path / "two", num_labels=2)
    base = save_tiny(tmp_path / "base")
    save_reward_adapter(tmp_path / "adapter", base)
    policy_adapter = tmp_path / "policy-adapter"
    policy_adapter.mkdir()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (policy_adapter / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = {name: tensor for name, tensor in tensors.items() if "lora_" in name}
    save_file(layers, policy_adapter / "adapter_model.safetensors")
    good = {"type": "function", "path": function_file, "name": "words"}
    for source, error, message in [
        ({"type": "model", "path": str(tmp_path / "none")}, ModelError, r"rewards\.1\.path: .*none does not exist"),
        (
            {"type": "model", "path": str(tmp_path / "two")},
            ModelError,
            r"rewards\.1\.path: .* with 2 labels; wanted one",
        ),
        (
            {"type": "value_head", "path": str(base)},
            ModelError,
            r"rewards\.1\.path: .*value_head\.safetensors or value_head\.bin is missing",
        ),
        ({"type": "adapter", "path": str(base)}, ModelError, r"rewards\.1\.path: .* a full model, not an adapter"),
        ({"type": "adapter", "path": str(policy_adapter)}, ModelError, r"is an adapter without a head"),
        ({"type": "function", "path": function_file, "name": "word"}, ConfigError, r"rewards\.1\.name: .*has no word"),
    ]:
        with pytest.raises(error, match=message):
            check_rewards(configs(good, source))


def test_a_column_that_a_function_needs_is_checked_once_the_columns_are_known(tmp_path):
    file = tmp_path / "graded.py"
    file.write_text("def graded(prompts, completions, answer): return [0.0]")
    sources = configs({"type": "function", "path": str(file), "name": "graded"})
    check_rewards(sources)
    check_reward_columns(sources, ["answer"])
    with pytest.raises(ConfigError, match=r"rewards\.0: function graded needs answer, .* columns are none"):
        check_reward_columns(sources, [])


def test_dtype_of_a_model_source(tmp_path):
    save_tiny(tmp_path, num_labels=1)
    assert load_file(tmp_path / "model.safetensors")["score.weight"].dtype == torch.float32
    sources = configs({"type": "model", "path": str(tmp_path), "dtype": "bfloat16"})
    built = build_rewards(
        sources, ["judge"], roles=object.__new__(ModelRoles), tokenizer=tiny_tokenizer(), device="cpu"
    )
    model = built.parts[0].source.model
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model.score.weight.dtype == torch.float32


def checked_rows(reward, *rows):
    check_contents(configs(reward), [("p", row, f"row {i} of the prompts") for i, row in enumerate(rows)])


def test_what_columns_hold_is_checked_in_every_row():
    exact, mathematics = {"type": "exact_match"}, {"type": "math_match"}
    checked_rows(exact, {"answer": "4"}, {"answer": 4})
    checked_rows(mathematics, {"answer": 4.5}, {"answer": "x^2"})
    for reward, value, wanted in (
        (exact, 4.5, r"holds 4\.5 \(float\), wanted text or a whole number"),
        (exact, None, r"holds None \(NoneType\), wanted text or a whole number"),
        (mathematics, "", "holds '', wanted a mathematical expression"),
        (mathematics, r"\$", r"holds '\\\\\$', wanted a mathematical expression"),
        (mathematics, ["4"], r"holds \['4'\] \(list\), wanted text or a number"),
    ):
        with pytest.raises(DataError, match=rf"^row 1 of the prompts, for rewards\.0: column answer {wanted}"):
            checked_rows(reward, {"answer": "4"}, {"answer": value})


def test_what_services_are_sent_is_checked_in_every_row():
    service = {"type": "http", "url": "http://127.0.0.1:1/"}
    with pytest.raises(DataError, match=r"^row 1 of the prompts, for rewards\.0: column x cannot be sent as JSON"):
        checked_rows(service, {"x": 1.0}, {"x": math.nan})
    checked_rows(service | {"columns": ["y"]}, {"x": math.nan, "y": 1})
    checked_rows(service | {"protocol": "llamafactory"}, {"x": math.nan})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [c.lower() for c in completions]", "AttributeError: 'list' object has no attribute 'lower'"),
        ("return [nothing]", "NameError: name 'nothing' is not defined"),
        ("return [1.0]", "returned 1 score for 2 answers; wanted one per answer"),
        ("return 1.0", r"returned 1\.0 \(float\); wanted a list of 2 numbers, one per answer"),
        ("[len(c) for c in completions]", r"returned None \(NoneType\); wanted a list of 2 numbers"),
        ("return [statistics.stdev([0.0]) for _ in completions]", None),
    ],
)
def test_a_first_call_tells_a_function_that_cannot_work(tmp_path, body, message):
    """And lets pass what more answers might mend."""
    (tmp_path / "judge.py").write_text(f"import statistics\ndef f(prompts, completions):\n    {body}\n")
    function = [FunctionReward(type="function", path=str(tmp_path / "judge.py"), name="f")]
    batch = text_batch("a", prompts=[[{"role": "user", "content": "hi"}]])
    if message is None:
        return try_sources(function, ["f"], batch, tiny_tokenizer())
    with pytest.raises(ConfigError, match=rf"^rewards\.0: the function failed to score a test answer: .*{message}"):
        try_sources(function, ["f"], batch, tiny_tokenizer())
