"""After which steps a run evaluates."""

from types import SimpleNamespace
from typing import Any

import pytest

from understudy.planning.windows import Windows
from understudy.trainers.evaluation.evaluate import evaluation_due


def settings(sync_every: int, eval_every: int) -> Any:
    windows = Windows(batch_size=8, sync_every=sync_every, max_staleness=1.0, steps=54)
    return SimpleNamespace(windows=windows, trainer=SimpleNamespace(eval_every=eval_every, steps=54))


@pytest.mark.parametrize(
    ("step", "due"),
    [
        (40, True),
        (48, False),  # a publish, but the evaluation of step 40 was made at step 40
        (
            50,
            False,
        ),  # due, but waits for the publish of step 52, also after a resume from step 50 or 51
        (51, False),
        (52, True),
        (53, False),
        (54, True),  # the last step; its window is shorter
    ],
)
def test_an_evaluation_due_inside_a_window_waits_for_the_windows_publish(step: int, due: bool) -> None:
    assert evaluation_due(settings(sync_every=4, eval_every=10), step) == due
    assert evaluation_due(settings(sync_every=4, eval_every=0), step) == (step == 54)


def test_evaluations_are_made_when_due_if_every_step_is_published() -> None:
    due = [step for step in range(1, 55) if evaluation_due(settings(sync_every=1, eval_every=10), step)]
    assert due == [10, 20, 30, 40, 50, 54]
