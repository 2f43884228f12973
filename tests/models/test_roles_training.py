"""What trains, where it starts, and which settings are refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    OPTConfig,
)

from tests.models.build import (
    checksums,
    edit_json,
    micro_batch,
    plain_adapted,
    roles_of,
    run_config,
    save_adapter,
    save_model,
)
from tests.tiny import EOS, KINDS, VOCAB_SIZE, tiny_tokenizer
from tether.errors import CheckpointError, ConfigError, ModelError
from tether.models.build import build_roles
from tether.models.tokenizer import load_tokenizer

STARTS = ("full", "fresh", "loaded")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind → (model, loaded start, reward model, reward adapter)."""
    made = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        model = save_model(root / "model", kind)
        made[kind] = (
            model,
            save_adapter(root / "start", model, tokenizer=True),
            save_model(root / "reward", kind, num_labels=1, seed=4),
            save_adapter(root / "judge", model, reward=True),
        )
    return made


def step(pass_, lr=0.01):
    with pass_(micro_batch(), temperature=1.0) as out:
        sum(x.add(-1).square().sum() for x in (out.logprobs, out.values) if x is not None).backward()
    optimizer = torch.optim.SGD(pass_.parameters(), lr=lr)
    optimizer.step()
    optimizer.zero_grad()


def everything(roles):
    """Every tensor of every role, by role and name."""
    tensors = {}
    for name in ("policy", "reference", "value"):
        role = roles.role(name)
        model = roles.policy if role.adapter is not None else role.model
        tensors |= {f"{name}.{key}": value for key, value in checksums(model).items()}
        if role.head is not None:
            tensors |= {f"{name}.head.{key}": value for key, value in checksums(role.head).items()}
    return tensors


def trained_names(roles, pass_):
    """Names, as ``everything`` has them, of what the pass trains."""
    trained = {id(parameter) for parameter in pass_.parameters()}
    names = set()
    for name in ("policy", "reference", "value"):
        role = roles.role(name)
        model = roles.policy if role.adapter is not None else role.model
        parts = [(name, model)] + ([(f"{name}.head", role.head)] if role.head is not None else [])
        for prefix, part in parts:
            names |= {f"{prefix}.{key}" for key, p in part.named_parameters(remove_duplicate=False) if id(p) in trained}
    return names


def changed(before, after):
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.parametrize(
    ("start", "value"),
    [
        (start, value)
        for start in STARTS
        for value in ("head", "model", "adapter")
        if (start, value) != ("full", "adapter")
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_should_train_trains(folders, kind, start, value):
    model, loaded, *_ = folders[kind]
    path, lora = loaded if start == "loaded" else model, None if start == "full" else {}
    roles = roles_of(run_config(path, lora=lora, value={"kind": value}))
    for pass_ in roles.passes:
        before = everything(roles)
        for _ in range(3):  # head, then LoRA's B, then its A leave 0 or begin to move
            step(pass_)
        got, wanted = changed(before, everything(roles)), trained_names(roles, pass_)
        assert got and got <= wanted
        # Biases of keys cancel in the softmax, and positions past the batch's are never seen.
        assert all("k_proj.bias" in name or ".wpe." in name for name in wanted - got), wanted - got


def test_the_value_loss_reaches_the_trunk_of_a_head_unless_detached(folders):
    model = folders["llama"][0]
    for detach in (False, True):
        for lora in (None, {}):
            roles = roles_of(run_config(model, lora=lora, value={"kind": "head", "detach": detach}))
            with torch.no_grad():
                roles.role("value").head.weight.fill_(1.0)
            (pass_,) = roles.passes
            with pass_(micro_batch(), temperature=1.0) as out:
                out.values.square().sum().backward()
            trunk = [p.grad for p in roles.role("policy").trained.values()]
            assert all(g is None or not g.any() for g in trunk) == detach
            assert roles.role("value").head.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradients_from_fewer_kept_tensors(folders, kind):
    model, loaded, *_ = folders[kind]
    for path, lora in ((model, None), (loaded, {})):
        results = {}
        for enabled in (False, True):
            roles = roles_of(
                run_config(path, lora=lora, value={"kind": "model"}, train={"gradient_checkpointing": enabled})
            )
            kept = []

            def keep(tensor, kept=kept):
                kept.append(tensor.numel())
                return tensor

            gradients = []
            for pass_ in roles.passes:
                with (
                    torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
                    pass_(micro_batch(), temperature=1.0) as out,
                ):
                    held = len(kept)
                    sum(x.add(-1).square().sum() for x in (out.logprobs, out.values) if x is not None).backward()
                gradients += [p.grad for p in pass_.parameters() if p.grad is not None]
            results[enabled] = (held, torch.cat([g.flatten() for g in gradients]))
        assert results[True][0] < results[False][0] / 2
        assert torch.equal(results[True][1], results[False][1])


# Starts of the critic


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, {}])
def test_a_critic_model_from_the_reward_model_gives_its_scores(folders, kind, lora):
    model, _, reward, _ = folders[kind]
    judge = [{"type": "model", "path": str(reward)}]
    wanted = load_file(reward / "model.safetensors")
    for init in (None, "reward", str(reward)):
        roles = roles_of(run_config(model, lora=lora, value={"kind": "model", "init": init}, rewards=judge))
        critic = roles.role("value")
        assert critic.source == str(reward)
        got = critic.model.state_dict()
        assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert {p.dtype for p in critic.trained.values()} == {torch.float32}


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_copies_of_whole_modules_are_float32_on_a_base_in_half_precision(tmp_path, precision):
    model = save_model(tmp_path / "model", tied=False)
    options = {"tokenizer": True, "modules_to_save": ["lm_head"]}
    start, judge = save_adapter(tmp_path / "start", model, **options), save_adapter(tmp_path / "r", model, reward=True)
    judge_too = {"value": {"kind": "adapter", "init": str(judge)}, "rewards": [{"type": "adapter", "path": str(judge)}]}
    roles = roles_of(run_config(start, lora={}, **judge_too), autocast_dtype=precision)
    roles.add_reward_adapter("judge", str(judge))
    kinds = {"lora" in name or "modules_to_save" in name: set() for name, _ in roles.policy.named_parameters()}
    for name, parameter in roles.policy.named_parameters():
        kinds["lora" in name or "modules_to_save" in name].add(parameter.dtype)
    assert kinds == {True: {torch.float32}, False: {precision}}


@pytest.mark.parametrize("start", ["full", "fresh", "merged", "loaded"])
def test_a_critic_model_from_the_policy_has_its_trunk_and_says_zero(folders, start):
    model, loaded, reward, _ = folders["llama"]
    judge = [{"type": "model", "path": str(reward)}]
    path = loaded if start in ("merged", "loaded") else model
    lora = {} if start in ("fresh", "loaded") else None
    roles = roles_of(run_config(path, lora=lora, value={"kind": "model", "init": "policy"}, rewards=judge))
    ids = torch.tensor([[5, 7, 8]])
    with torch.no_grad():
        with roles.use("policy") as policy:
            wanted = policy.base_model(ids, use_cache=False).last_hidden_state
        with roles.use("value") as critic:
            got = critic.base_model(ids, use_cache=False).last_hidden_state
    assert (got - wanted).abs().max() < 1e-5
    values = roles.score_pass(micro_batch(), 1.0).values
    assert not values.any()
    shared = {id(p) for p in roles.role("value").model.parameters()} & {id(p) for p in roles.policy.parameters()}
    assert not shared


def test_a_reward_of_another_vocabulary_is_no_start_of_a_critic(folders, tmp_path):
    model, *_ = folders["llama"]
    other = save_model(tmp_path / "other", "qwen2", num_labels=1)  # another tokenizer
    judge = [{"type": "model", "path": str(other)}]
    assert roles_of(run_config(model, rewards=judge)).role("value").source == str(model)
    with pytest.raises(ConfigError, match=r"value.init reward: the tokenizer of .*other has a different vocabulary"):
        roles_of(run_config(model, rewards=judge, value={"init": "reward"}))
    with pytest.raises(ConfigError, match=r"value.init: the tokenizer of .*other has a different vocabulary"):
        roles_of(run_config(model, value={"init": str(other)}))


def test_a_critic_starts_from_the_label_that_is_the_reward(folders, tmp_path):
    model, *_ = folders["llama"]
    judge = save_model(tmp_path / "judge", num_labels=3)
    roles = roles_of(run_config(model, rewards=[{"type": "model", "path": str(judge), "label": 2}]))
    critic = roles.role("value")
    rows = AutoModelForSequenceClassification.from_pretrained(judge).score.weight
    assert critic.source == str(judge) and critic.head.weight.shape == (1, rows.shape[1])
    direction = torch.nn.functional.cosine_similarity(critic.head.weight, rows)
    assert direction[2].item() == pytest.approx(1.0) and max(direction[:2]) < 0.999


def test_a_judge_that_is_no_decoder_is_no_start_of_a_critic(folders, tmp_path):
    model, *_ = folders["llama"]
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertForSequenceClassification(BertConfig(vocab_size=VOCAB_SIZE, num_labels=1, **settings))
    encoder.save_pretrained(tmp_path)
    load_tokenizer(str(model)).save_pretrained(tmp_path)  # the policy's own vocabulary
    judge = [{"type": "model", "path": str(tmp_path)}]
    assert roles_of(run_config(model, rewards=judge)).role("value").source == str(model)
    for key, value in (("value.init reward", "reward"), ("value.init", str(tmp_path))):
        with pytest.raises(ConfigError, match=f"{key}: {tmp_path} is not a decoder, .*; set value.init to policy"):
            roles_of(run_config(model, rewards=judge, value={"init": value}))


def test_a_critic_model_from_a_reward_adapter_is_merged(folders):
    model, _, _, judge = folders["llama"]
    roles = roles_of(
        run_config(model, lora={}, value={"kind": "model"}, rewards=[{"type": "adapter", "path": str(judge)}])
    )
    assert roles.role("value").source == str(judge)
    assert roles.role("value").model is not roles.role("policy").model
    assert roles.score_pass(micro_batch(), 1.0).values.any()


def test_a_critic_reads_the_states_that_the_output_embedding_reads(tmp_path):
    """OPT-350m's kind: states are projected to another size than the trunk's before they meet the output embedding."""
    config = OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=8, do_layer_norm_before=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for lora, value in ((None, "head"), (None, "model"), ({}, "head"), ({}, "model"), ({}, "adapter")):
        roles = roles_of(run_config(tmp_path, lora=lora, value={"kind": value}))
        for pass_ in roles.passes:
            step(pass_)
        assert roles.score_pass(micro_batch(), 1.0).values.any()


# Starts of the policy


def test_a_merged_start_trains_all_weights_of_what_the_adapter_made(folders):
    model, loaded, *_ = folders["llama"]
    roles = roles_of(run_config(loaded, value={"kind": "head"}))
    plain = plain_adapted(AutoModelForCausalLM, model, loaded)
    ids = torch.tensor([[5, 7, 8]])
    with roles.use("policy") as policy, torch.no_grad():
        assert (policy(ids, use_cache=False).logits - plain(input_ids=ids, use_cache=False).logits).abs().max() < 1e-5
    assert not any("lora" in name for name in roles.role("policy").trained)
    assert roles.base_source == str(model)


def test_fresh_weights_depend_on_the_seed_alone(folders):
    model = folders["llama"][0]
    config = run_config(model, lora={}, train={"seed": 1})
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = roles_of(config).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    second = roles_of(config).state_dict()
    other = roles_of(run_config(model, lora={}, train={"seed": 2})).state_dict()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert not all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_a_continued_adapter_keeps_its_own_settings(folders):
    _, loaded, *_ = folders["llama"]
    roles = roles_of(run_config(loaded, lora={}))
    assert (roles.policy.peft_config["default"].r, roles.policy.peft_config["default"].lora_dropout) == (4, 0.3)
    same = {"r": 4, "alpha": 8, "dropout": 0.3, "target_modules": "all-linear"}
    assert roles_of(run_config(loaded, lora=same)).policy.peft_config["default"].r == 4
    for key, value, message in (
        ("r", 16, r"model.lora.r: 16, but the adapter in .*start that is continued has 4"),
        ("alpha", 32, r"model.lora.alpha: 32.* has 8"),
        ("dropout", 0.1, r"model.lora.dropout: 0.1.* has 0.3"),
        ("target_modules", ["q_proj"], r"model.lora.target_modules: \['q_proj'\], but the adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            roles_of(run_config(loaded, lora={key: value}))


def test_target_modules_that_are_not_there_are_a_configuration_error(folders):
    with pytest.raises(ConfigError, match=r"model.lora.target_modules: .*nowhere"):
        roles_of(run_config(folders["llama"][0], lora={"target_modules": ["nowhere"]}))


def test_a_reward_adapter_is_no_policy(folders):
    judge = folders["llama"][3]
    tokenizer = load_tokenizer(str(judge))
    for lora in (None, {}):
        with pytest.raises(ModelError, match="reward adapter"):
            build_roles(run_config(judge, lora=lora), tokenizer, device="cpu", autocast_dtype=None)


def test_an_end_token_outside_of_the_vocabulary_is_refused_but_a_pad_token_is_not(folders, tmp_path):
    model = save_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    assert tokenizer.pad_token_id == 40
    roles = build_roles(run_config(model), tokenizer, device="cpu", autocast_dtype=None)
    assert roles.score_pass(micro_batch(), 1.0).logprobs.any()
    for beyond in (40, -1):
        edit_json(model / "generation_config.json", lambda config, end=beyond: config.update(eos_token_id=[EOS, end]))
        with pytest.raises(ModelError, match=f"end token {beyond} is outside of the model's vocabulary of 40 tokens"):
            build_roles(run_config(model), tokenizer, device="cpu", autocast_dtype=None)


# State


@pytest.mark.parametrize(
    ("lora", "value"), [(None, "head"), (None, "model"), ({}, "head"), ({}, "model"), ({}, "adapter")]
)
def test_state_comes_back_bitwise(folders, lora, value):
    config = run_config(folders["llama"][0], lora=lora, value={"kind": value})
    roles, other = roles_of(config), roles_of(config)
    for pass_ in roles.passes * 2:
        step(pass_)
    batch = micro_batch()
    wanted = roles.score_pass(batch, 1.0)
    assert not torch.equal(other.score_pass(batch, 1.0).logprobs, wanted.logprobs)
    other.load_state_dict({name: tensor.clone() for name, tensor in roles.state_dict().items()})
    got = other.score_pass(batch, 1.0)
    assert torch.equal(got.logprobs, wanted.logprobs) and torch.equal(got.values, wanted.values)
    assert torch.equal(other.ref_logprobs(batch, 1.0), roles.ref_logprobs(batch, 1.0))
    parameters = {id(p) for pass_ in other.passes for p in pass_.parameters()}
    assert len(parameters) == len(other.state_dict())


def test_state_of_another_run_is_refused(folders):
    model = folders["llama"][0]
    small, large, full = (
        roles_of(run_config(model, lora=lora, value={"kind": "head"})) for lora in ({"r": 2}, {"r": 3}, None)
    )
    with pytest.raises(
        CheckpointError, match=r"policy\..*lora_A.*: the checkpoint has shape \[3, 16\], this run \[2, 16\]"
    ):
        small.load_state_dict(large.state_dict())
    with pytest.raises(CheckpointError, match=r"no match for \d+ trained tensors; the first"):
        small.load_state_dict(full.state_dict())
