"""The head start: the student reads a step's rows while teachers still score them. The metrics do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import understudy
from understudy.observability.metrics import without_clock
from understudy.trainers.produce import produce

Make = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"rollout__n": 2, "trainer__mini_batch_size": 3, "trainer__micro_batch_tokens": 96},
            marks=pytest.mark.slow,
        ),
        pytest.param({"run__threads": 2, "trainer__batch_size": 100}, marks=pytest.mark.slow),
    ],
    ids=["one-update", "several", "lanes"],
)
def test_the_head_start_does_not_change_the_metrics(
    recipe: Make, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    ahead = understudy.train(recipe("ahead", trainer__steps=2, **more), progress=False)
    assert all(line["time/update/ahead"] > 0 for line in ahead.metrics)
    monkeypatch.setattr(produce, "head_start_of", lambda learner, samples: None)
    plain = understudy.train(recipe("plain", trainer__steps=2, **more), progress=False)
    assert all(line["time/update/ahead"] == 0 for line in plain.metrics)
    assert [without_clock(line) for line in ahead.metrics] == [without_clock(line) for line in plain.metrics]
