"""What is noticed in an update's metrics."""

from tether.train.guard import suspicions

GOOD = {"val/first_ratio_error": 0.0, "rollout/logprob_gap": 0.01}


def test_sound_metrics_raise_no_suspicion():
    assert suspicions(GOOD) == []
    assert suspicions({"val/first_ratio_error": 1e-4}) == []


def test_each_mismatch_is_told_with_its_metric():
    (ratio,) = suspicions(GOOD | {"val/first_ratio_error": 0.01})
    assert "val/first_ratio_error" in ratio
    (overflow,) = suspicions(GOOD | {"policy/num_overflows": 2.0, "update/num_steps": 0.0})
    assert "policy/num_overflows" in overflow and "train.fp16: false" in overflow
    assert suspicions(GOOD | {"policy/num_overflows": 1.0, "update/num_steps": 1.0}) == []
    (gap,) = suspicions(GOOD | {"rollout/logprob_gap": 0.5})
    assert "rollout/logprob_gap" in gap and "model.attn_implementation" in gap
