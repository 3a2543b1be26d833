"""The rows of each optimizer step, and how the results of several steps are combined."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.policy.step import StepResult
from understudy.trainers.learn.minibatches import combine, split_rows
from understudy.types.loss_metrics import MetricSum, MetricTotal


def keys_of(prompts: int, sessions: int) -> list[str]:
    return [f"00000-{prompt:07d}_{session}_0" for prompt in range(prompts) for session in range(sessions)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 10), st.integers(1, 3), st.integers(0, 5))
def test_every_epoch_of_mini_batches_contains_every_row_once(
    prompts: int, sessions: int, each: int, epochs: int, step: int
) -> None:
    keys = keys_of(prompts, sessions)
    updates = split_rows(keys, range(len(keys)), each, epochs, seed=1, step=step)
    pieces = -(-prompts // each)
    assert len(updates) == epochs * pieces
    for epoch in range(epochs):
        mine = updates[epoch * pieces : (epoch + 1) * pieces]
        assert sorted(row for rows in mine for row in rows) == list(range(len(keys)))
        sizes = [len({keys[row].split("_")[0] for row in rows}) for rows in mine]
        assert max(sizes) <= each and max(sizes) - min(sizes) <= 1
        assert sum(sizes) == prompts, "the sessions of a prompt must stay together"


def test_the_order_of_mini_batches_depends_only_on_seed_step_and_epoch() -> None:
    keys = keys_of(9, 2)
    first = split_rows(keys, range(18), 4, 2, seed=1, step=3)
    assert first == split_rows(keys, range(18), 4, 2, seed=1, step=3)
    assert first[:3] != first[3:], "each epoch must have another order"
    for other in ({"seed": 2, "step": 3}, {"seed": 1, "step": 4}):
        assert split_rows(keys, range(18), 4, 2, **other) != first
    shuffled = [keys[(5 * i) % 18] for i in range(18)]
    named = [sorted(shuffled[row] for row in rows) for rows in split_rows(shuffled, range(18), 4, 2, 1, 3)]
    assert named == [sorted(keys[row] for row in rows) for rows in first], (
        "the order of the rows in the batch must not matter"
    )


def test_rows_are_not_split_or_shuffled_without_mini_batches() -> None:
    keys = keys_of(3, 2)
    assert split_rows(keys, range(6), None, 1, 0, 0) == [[0, 1, 2, 3, 4, 5]]
    assert split_rows(keys, range(6), 3, 2, 0, 0) == [[0, 1, 2, 3, 4, 5]] * 2
    assert split_rows(keys, [1, 4], None, 1, 0, 0) == [[1, 4]]
    assert split_rows(keys, [], 2, 3, 0, 0) == []


def result(loss: float, rows: tuple[float, ...], total: float, tokens: int) -> StepResult:
    metrics = {
        "mean": MetricSum(total, float(tokens)),
        "loss": MetricTotal(loss),
    }
    distill = tuple(row / 2 for row in rows)
    return StepResult(
        4, loss, 2 * loss, 0.1, metrics, 10, tokens, 1, rows, distill, (2,) * len(rows), {"compute": 1.0}
    )


def test_combine_sums_and_averages_the_results_of_all_updates_of_a_step() -> None:
    """Two epochs over rows 0 and 2 of three, a mini-batch each."""
    parts = [
        ([2], result(1.0, (6.0,), 8.0, 4)),
        ([0], result(2.0, (4.0,), 4.0, 2)),
        ([0], result(3.0, (2.0,), 2.0, 2)),
        ([2], result(6.0, (2.0,), 2.0, 4)),
    ]
    whole = combine(parts, rows_in_batch=3)
    assert (whole.step, whole.loss, whole.grad_norm, whole.updates) == (4, 3.0, 6.0, 4)
    assert whole.row_losses == (3.0, 0.0, 4.0) and whole.row_tokens == (2, 0, 2)
    assert whole.row_distill == (1.5, 0.0, 2.0)
    assert whole.metrics["loss"].result() == 3.0
    assert whole.metrics["mean"].result() == pytest.approx(16 / 12), (
        "tokens of every update must weigh the same"
    )
    assert whole.tokens == 40 and whole.seconds == {"compute": 4.0}


def test_combine_returns_the_result_of_a_single_update_unchanged() -> None:
    only = result(1.0, (6.0,), 8.0, 4)
    assert combine([([0], only)], 1) is only
