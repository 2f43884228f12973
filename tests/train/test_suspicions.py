"""What is noticed in an update's metrics."""

from functools import partial

import pytest

from tests.train.runs import tiny_run, write
from tether.train.display import NullDisplay
from tether.train.run import train_policy
from tether.train.suspicions import Watch, suspicions

found_in = partial(suspicions, forward_type="bfloat16")

GOOD = {"val/first_ratio_error": 0.0, "rollout/logprob_gap": 0.01}


def test_sound_metrics_raise_no_suspicion():
    assert found_in(GOOD) == []
    assert found_in({"val/first_ratio_error": 1e-4}) == []


def test_each_mismatch_is_told_with_its_metric():
    (ratio,) = found_in(GOOD | {"val/first_ratio_error": 0.01})
    assert "val/first_ratio_error" in ratio
    (overflow,) = found_in(GOOD | {"policy/num_overflows": 2.0, "update/num_steps": 0.0})
    assert "policy/num_overflows" in overflow and "train.fp16: false" in overflow
    of_both = {"policy/num_overflows": 2.0, "value/num_overflows": 2.0, "update/num_steps": 0.0}
    assert found_in(GOOD | of_both) == [overflow]
    (overflow,) = found_in(GOOD | of_both | {"policy/num_overflows": 0.0})
    assert "value/num_overflows" in overflow and "the critic took no step" in overflow
    assert found_in(GOOD | {"policy/num_overflows": 1.0, "update/num_steps": 1.0}) == []
    (gap,) = found_in(GOOD | {"rollout/logprob_gap": 0.5})
    assert "rollout/logprob_gap" in gap and "model.attn_implementation" in gap
    (gap,) = found_in(GOOD | {"rollout/logprob_gap": 0.5}, with_vllm=True)
    assert "rollout/logprob_gap" in gap and "Leaving sampling.vllm out" in gap


def test_what_top_k_cuts_off_is_no_fault_of_vllm(tmp_path):
    """vLLM tells log-probabilities of the truncated distribution, the policy's own decoding those of the whole one."""
    metrics = GOOD | {"objective/scores": 0.0, "objective/scores_std": 1.0, "rollout/logprob_gap": 0.5}
    for cuts, vllm, count in ((True, {}, 0), (False, {}, 1), (True, None, 1)):
        cut = {"sampling__top_k": 5, "sampling__allow_truncated_sampling": True} if cuts else {}
        config = tiny_run(tmp_path, sampling__vllm=vllm, **cut)
        assert len(Watch(config).suspicions(metrics)) == count

@pytest.mark.parametrize(("forward_type", "is_told"), [("float32", True), ("float16", False), ("bfloat16", False)])
def test_how_far_decoding_may_differ_from_the_forward_depends_on_the_type(forward_type, is_told):
    found = suspicions({"rollout/logprob_gap": 0.04}, forward_type=forward_type)
    assert bool(found) == is_told


@pytest.mark.parametrize("algorithm", [{}, {"ppo__advantage_estimator": "grpo", "sampling__num_generations": 4}])
def test_a_judge_that_tells_no_answers_apart_is_named_while_the_run_goes_on(tmp_path, algorithm):
    said = []

    class Listener(NullDisplay):
        def message(self, text):
            said.append(text)

    write("def same(prompts, completions, **columns):\n    return [0.1] * len(completions)\n", tmp_path / "same.py")
    rewards = [{"type": "function", "path": str(tmp_path / "same.py"), "name": "same"}]
    train_policy(tiny_run(tmp_path, rewards=rewards, train__max_steps=6, **algorithm), display=Listener())
    told = [text for text in said if "objective/scores_std" in text]
    assert len(told) == 1 and "5 updates in a row" in told[0] and "pattern or its column" in told[0]
    said.clear()
    train_policy(tiny_run(tmp_path, train__max_steps=6, overwrite_output_dir=True, **algorithm), display=Listener())
    assert not any("objective/scores_std" in text for text in said)
