"""Every row of classes C, E and F of the fault list that one process can try, and the tests that try it.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RATIO, SAVING, MEMORY = "faults/test_ratio_and_kl.py", "faults/test_saving_and_resuming.py", "faults/test_memory.py"
TRIED: dict[int, dict[str, str | tuple[str, ...]]] = {
    20: {RATIO: "test_20_21_27_", "train/test_invariances.py": "test_the_split_into_micro_batches_does_not_show"},
    21: {RATIO: "test_20_21_27_nothing_moves_where_nothing_is_learned"},
    24: {RATIO: ("test_24_estimated", "test_24_what_is_not_drawn"), "algo/test_kl.py": "test_"},
    26: {RATIO: "test_26_", "faults/test_bad_numbers.py": "test_a_policy_that_says_one_thing",
         "train/test_bookkeeping.py": "test_no_step_follows_one_that_went_too_far"},
    27: {RATIO: "test_20_21_27_", "models/test_roles_bitwise.py": "test_"},
    28: {RATIO: ("test_28_kl_starts_at_zero_where", "test_28_kl_starts_at_zero_with", "test_20_21_27_ratio_is_1")},
    30: {"train/test_invariances.py": "test_the_split_into_micro_batches_does_not_show",
         "train/test_run.py": "test_micro_batch_size_changes_nothing"},
    34: {RATIO: "test_34_", "train/test_metrics.py": "test_logged_numbers_are_those_worked_out_by_hand"},
    35: {RATIO: ("test_35_gradient", "test_35_types"), "faults/test_bad_numbers.py": "test_too_many_in_a_row"},
    37: {RATIO: "test_37_", "algo/test_losses.py": "test_a_ratio_beyond_all_measure_stays_finite"},
    54: {SAVING: ("test_54_run_that_replaces", "test_54_56_")},
    55: {SAVING: "test_54_56_"},
    56: {SAVING: "test_54_56_"},
    58: {SAVING: ("test_58_killed", "test_58_checkpoint_without_its_critic", "test_58_evaluation"),
         "chaos/test_chaos.py": "test_a_little_chaos"},
    59: {SAVING: "test_59_", "train/test_run.py": "test_resumed_run_is_bitwise",
         "faults/test_state.py": "test_every_generator_comes_back"},
    60: {"train/test_saved_critic.py": "test_next_run_begins_with_the_values"},
    61: {"faults/test_watching.py": "test_61_"},
    67: {MEMORY: ("test_67_", "test_the_dry_step_has_the_longest_lengths", "test_fewer_answers_are_decoded")},
    68: {"models/test_forward.py": ("test_logits_are_made_for_response_tokens_only", "test_equals_one_unpadded_row")},
    69: {"faults/test_modes_of_training.py": "test_69_"},
    70: {"models/test_quantization.py": ("test_transformers_is_asked_for", "test_an_adapter_is_not_merged",
                                         "test_one_base_in_few_bits_plays_four_roles")},
    71: {"faults/test_modes_of_training.py": "test_71_"},
    72: {"faults/test_watching.py": "test_72_", "metrics/test_trackers.py": "test_a_tracker_that_fails_later_warns"},
    73: {"train/test_run.py": ("test_evaluation_leaves_training_as_it_was", "test_save_total_limit_keeps"),
         "faults/test_saving_and_resuming.py": "test_58_nothing_is_evaluated_twice",
         "config/test_keys.py": "test_"},
    74: {"train/test_costs.py": "test_seconds_and_memory_of_the_phases",
         "generation/test_hf.py": "test_one_forward_a_token_of_the_longest_answer"},
}  # fmt: skip
"""Row → files under tests/, and what the names of tests in them begin with. Rows 32, 52, 53 and 63 to 65 need several
processes."""


@pytest.mark.parametrize("row", TRIED)
def test_every_row_has_the_tests_that_are_named(row):
    for file, beginnings in TRIED[row].items():
        there = re.findall(r"^def (test_\w+)", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
        for beginning in [beginnings] if isinstance(beginnings, str) else beginnings:
            assert any(name.startswith(beginning) for name in there), f"{file} has no {beginning}"


def test_no_row_of_one_process_is_left_out():
    class_c, class_e, class_f = (20, 21, 24, 26, 27, 28, 30, 34, 35, 37), range(54, 62), range(67, 75)
    assert set(TRIED) == {*class_c, *class_e, *class_f} - {57}
