from __future__ import annotations

import math

import pytest

from understudy.policy.microbatch import Layout, plan_microbatches
from understudy.policy.optim.schedule import Schedule, ScheduleKind


def test_learning_rate_schedules_have_the_expected_values() -> None:
    constant = Schedule(ScheduleKind.CONSTANT, peak=2.0, total_steps=10, warmup_steps=4)
    assert [constant.at(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = Schedule(ScheduleKind.LINEAR, peak=1.0, total_steps=5)
    assert [linear.at(step) for step in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    cosine = Schedule(ScheduleKind.COSINE, peak=1.0, total_steps=6, warmup_steps=2, final_ratio=0.1)
    expected = [0.5, 1.0] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * place / 4)) for place in range(5)]
    assert [cosine.at(step) for step in range(7)] == pytest.approx(expected)
    assert cosine.at(100) == pytest.approx(0.1)


def test_the_last_step_has_a_positive_learning_rate() -> None:
    for kind in ScheduleKind:
        assert Schedule(kind, peak=1.0, total_steps=3, warmup_steps=1).at(2) > 0


def test_plan_respects_the_budget_and_takes_every_row_once() -> None:
    lengths = [5, 9, 2, 7, 7, 30, 1]
    keys = [f"k{index}" for index in range(len(lengths))]
    for layout in Layout:
        for budget in (1, 10, 20, 1000):
            plan = plan_microbatches(lengths, keys, budget, layout)
            assert sorted(row for group in plan for row in group) == list(range(len(lengths)))
            for group in plan:
                longest = max(lengths[row] for row in group)
                cost = longest * len(group) if layout is Layout.PADDED else sum(lengths[row] for row in group)
                assert cost <= budget or len(group) == 1


def test_plan_does_not_depend_on_the_order_of_rows() -> None:
    lengths, keys = [3, 3, 3, 5, 2, 3], ["c", "a", "b", "x", "y", "d"]
    turned = [5, 3, 0, 2, 4, 1]
    one = plan_microbatches(lengths, keys, 7)
    other = plan_microbatches([lengths[i] for i in turned], [keys[i] for i in turned], 7)
    assert [[keys[row] for row in group] for group in one] == [
        [keys[turned[row]] for row in group] for group in other
    ]


def test_plan_refuses_a_budget_of_zero_and_lengths_without_keys() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        plan_microbatches([1], ["a"], 0)
    with pytest.raises(ValueError, match="1 lengths for 2 keys"):
        plan_microbatches([1], ["a", "b"], 5)


def test_plan_spreads_rows_evenly_over_the_micro_batches() -> None:
    """51 rows of 640 tokens fit into a micro-batch. Five full ones would leave a single row of the 256 for the last."""
    keys = [f"k{index:03d}" for index in range(256)]
    for layout in Layout:
        plan = plan_microbatches([640] * 256, keys, 32_768, layout)
        assert sorted(len(group) for group in plan) == [42, 42, 43, 43, 43, 43]
    assert plan_microbatches([9, 9, 9], list("abc"), 18, Layout.PACKED) == [[0], [1, 2]]
