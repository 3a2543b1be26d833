"""A fully async run that stops before its engines took the last weights: no row is written that a resume must refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import troubled_loop

import understudy
from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics
from understudy.trainers import stopping


def test_no_prompt_is_admitted_for_weights_that_were_not_published(
    recipe: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publish after step 1 waits for the rollouts of step 2, which never end. Prompts of step 3 must wait
    for it too."""
    monkeypatch.setattr(stopping, "STOP_WAIT_S", 4.0)
    monkeypatch.setattr(troubled_loop.HoldsPublish, "holding", range(4, 8))
    table = recipe(
        trainer__mode="fully_async", trainer__max_staleness=1.0, trainer__partial_rollouts=False,
        trainer__steps=3, trainer__batch_size=4, data__shuffle=False, rollout__agent="troubled_loop:HoldsPublish",
        run__determinism="fast",
    )  # fmt: skip
    stopped = understudy.train(table, progress=False)
    report = audit(stopped.dir)
    assert stopped.steps == 1 and report.trained == 4
    assert report.issued == 8, (
        "prompts of step 3 were begun with the first weights, two publishes before they are trained"
    )
    monkeypatch.setattr(troubled_loop.HoldsPublish, "holding", range(0))
    assert understudy.resume(stopped.dir, progress=False).steps == 3
    lines = read_metrics(Path(stopped.dir) / "metrics.jsonl")
    assert [line["async/staleness/max"] <= 1 for line in lines] == [True] * 3
