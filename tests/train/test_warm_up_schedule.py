"""A schedule that follows a metric hears of an update only where its parameters trained."""

from tests.train.runs import tiny_run
from tests.train.test_whole_step import trainer_for


def test_policy_schedule_does_not_follow_the_critics_warm_up(tmp_path):
    config = tiny_run(
        tmp_path, value__kind="model", value__warmup_steps=3, train__max_steps=6,
        train__lr_scheduler_type="reduce_lr_on_plateau", train__lr_scheduler_kwargs={"patience": 0, "threshold": 1e6},
    )  # fmt: skip
    trainer = trainer_for(config, tmp_path)
    policy, value = trainer.optimizers
    rates = []
    for _ in range(6):
        trainer.step()
        trainer.state.step += 1
        rates.append((policy.learning_rate, value.learning_rate))
    # every metric but the first is a plateau: the critic's rate falls from the second update on, the policy's from the
    # second of its own
    assert [policy for policy, _ in rates[:4]] == [1e-3] * 4
    assert rates[1][1] < 1e-3 and rates[4][0] < 1e-3
