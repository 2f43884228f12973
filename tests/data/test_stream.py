"""Every prompt each epoch, full batches, nothing to save for a resume."""

from collections import Counter

import pytest

from tether.data.stream import PromptStream


@pytest.mark.parametrize(("prompts", "batch_size"), [(5, 8), (9, 4), (8, 8), (1, 3), (7, 1), (3, 10)])
def test_every_prompt_is_drawn_once_an_epoch(prompts, batch_size):
    stream = PromptStream(prompts, batch_size, seed=0)
    batches = [stream.batch(i) for i in range(2 * prompts)]
    assert all(len(batch) == batch_size for batch in batches)
    draws = [draw for batch in batches for draw in batch]
    for epoch in range(len(draws) // prompts):
        drawn = draws[epoch * prompts : (epoch + 1) * prompts]
        assert sorted(index for index, _ in drawn) == list(range(prompts))


def test_the_count_is_how_often_the_prompt_was_drawn_before():
    stream, seen = PromptStream(5, 8, seed=3), Counter()
    for i in range(10):
        for index, count in stream.batch(i):
            assert count == seen[index]
            seen[index] += 1


def test_a_batch_depends_on_its_number_alone():
    first, second = PromptStream(50, 8, seed=1), PromptStream(50, 8, seed=1)
    in_order = [first.batch(i) for i in range(20)]
    assert [second.batch(i) for i in reversed(range(20))] == in_order[::-1]


def test_epochs_and_seeds_differ_in_their_order():
    stream = PromptStream(50, 50, seed=1)
    orders = [tuple(index for index, _ in stream.batch(i)) for i in range(3)]
    orders.append(tuple(index for index, _ in PromptStream(50, 50, seed=2).batch(0)))
    orders.append(tuple(range(50)))
    assert len(set(orders)) == 5
