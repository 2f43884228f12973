"""Models with fewer embeddings than the policy: ids without a token never end a run, tokens without a row no start."""

import pytest
import torch

from tests.tiny import VOCAB_SIZE, tiny_causal_lm, tiny_classifier, tiny_tokenizer
from tests.train.runs import tiny_run
from tether.data.collate import collate
from tether.errors import ConfigError
from tether.generation.fake import FakeGenerator
from tether.metrics.writers import read_jsonl
from tether.models.build import critic_source
from tether.models.fit import ids_with_rows
from tether.train.inputs import check_data, load_data
from tether.train.rollout import reward_batch
from tether.train.run import open_trainer, train_policy
from tether.types import Request, Sampling

SPARE = VOCAB_SIZE + 20
"""An id of the policy that belongs to no token, and for which no other model has an embedding."""
GOOD, CAT, EOS = tiny_tokenizer().convert_tokens_to_ids(["good", "cat", "<eos>"])


def padded_run(folder, *, rows=VOCAB_SIZE + 4, spare=64, **changes):
    """A run whose policy has ``spare`` rows beyond its tokens, with a judge and a critic of ``rows`` embeddings."""
    for name, model in (
        ("policy", tiny_causal_lm(vocab_size=VOCAB_SIZE + spare)),
        ("judge", tiny_classifier(vocab_size=rows, seed=1)),
    ):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    judge = {"type": "model", "path": str(folder / "judge"), "name": "judge"}
    return tiny_run(folder, **{"model__path": str(folder / "policy"), "rewards": [judge]} | changes)


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_goes_on_after_ids_without_a_token(tmp_path, monkeypatch, lora):
    changes = {"model__lora": {"r": 2}, "value__kind": "model"} if lora else {}
    config = padded_run(tmp_path, train__save_steps=1, value__init="reward", **changes)
    answers = [[GOOD, SPARE, CAT, EOS], [SPARE] * 6, [GOOD, CAT, EOS]]
    generator = FakeGenerator(answers)
    monkeypatch.setattr("tether.train.build.build_generator", lambda config, roles: generator)
    first = train_policy(config).updates
    assert len(first) == 2 and all(update["loss/value_avg"] >= 0 for update in first)
    said = {row["response"] for row in read_jsonl(config.output_dir / "samples.jsonl")}
    assert said == {"good cat", ""}, "they have no text"
    resumed = config.model_copy(update={"resume": str(config.output_dir / "checkpoint-1")})
    assert train_policy(resumed).updates[0]["objective/scores"] == first[1]["objective/scores"]


def test_a_judge_scores_what_it_can_read(tmp_path):
    with open_trainer(padded_run(tmp_path)) as trainer:
        (part,) = trainer.parts.rewards.parts
        batch = answers_of(trainer, [[GOOD, SPARE, CAT, EOS], [GOOD, CAT, EOS], [SPARE, SPARE], [VOCAB_SIZE + 1]])
        with_ids, without, none, own = part.source.read(batch)
        assert with_ids == without == [*batch.query_ids[0], GOOD, CAT, EOS]
        assert none == batch.query_ids[2]
        assert own == [*batch.query_ids[3], VOCAB_SIZE + 1], "a row that it has is read as it was sampled"
        assert part.source.score(batch).scores[0] == part.source.score(batch).scores[1]


def answers_of(trainer, ids):
    prompts = [trainer.parts.prompts[0]] * len(ids)
    return reward_batch(prompts, ["good"] * len(ids), ids, trainer.parts.tokenizer, None)


def test_only_ids_without_a_token_and_without_a_row_are_passed_over():
    assert ids_with_rows([3, 9, 3, 5, 7], 5, {3, 7}) == [3, 3, 7]


def test_what_the_policy_samples_is_what_its_update_sees(tmp_path):
    """Nothing is masked: the distribution is over all rows, in sampling as in the log-probabilities."""
    with open_trainer(padded_run(tmp_path)) as trainer:
        roles, generator = trainer.roles, trainer.parts.generator
        query = trainer.parts.prompts[0].token_ids
        ((_, answer),) = generator.generate([Request(query, 5)], Sampling(40))
        assert any(token >= VOCAB_SIZE for token in answer.token_ids), "the case needs such an id"
        batch = collate([query], [answer.token_ids], [0])
        out = roles.score_pass(batch, 1.0)
        torch.testing.assert_close(out.logprobs[0], torch.tensor(answer.logprobs), rtol=0, atol=1e-5)
        torch.testing.assert_close(roles.ref_logprobs(batch, 1.0), out.logprobs, rtol=0, atol=0)
        assert torch.isfinite(out.values).all()


def test_a_token_without_a_row_is_refused_with_both_counts(tmp_path):
    config = padded_run(tmp_path, rows=VOCAB_SIZE - 2, value__init="policy")
    wanted = rf"rewards\.0: .*judge reads .* has embeddings for {VOCAB_SIZE - 2} tokens, but the policy has "
    with pytest.raises(ConfigError, match=wanted + rf"{VOCAB_SIZE + 64}, and may write token {VOCAB_SIZE - 2}, 'two'"):
        check_data(config, load_data(config))
    text = [config.rewards[0].model_copy(update={"input_format": "chat"})]
    check_data(config.model_copy(update={"rewards": text}), load_data(config))


def test_no_critic_is_copied_from_a_model_without_a_row_for_a_token(tmp_path):
    config = padded_run(tmp_path, rows=VOCAB_SIZE - 2)
    assert critic_source(config, tiny_tokenizer()) is None, "by default it starts from the policy"
    asked = padded_run(tmp_path, rows=VOCAB_SIZE - 2, value__init="reward")
    with pytest.raises(ConfigError, match=rf"value\.init reward: .*{VOCAB_SIZE - 2} tokens.*set value\.init to policy"):
        critic_source(asked, tiny_tokenizer())


def test_a_token_that_the_policy_cannot_write_needs_no_row(tmp_path):
    config = padded_run(tmp_path, rows=VOCAB_SIZE)
    for name in ("policy", "judge"):
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"<spare{i}>" for i in range(70)])
        tokenizer.save_pretrained(tmp_path / name)
    policy = tiny_causal_lm(vocab_size=VOCAB_SIZE)
    policy.save_pretrained(tmp_path / "policy")
    check_data(config, load_data(config))
    assert critic_source(config, load_data(config).tokenizer) is not None
