"""Which evaluations a fully async run makes after a resume."""

from types import SimpleNamespace
from typing import Any

import pytest

from understudy.trainers.fully_async import _AsyncRun


@pytest.mark.parametrize(
    ("step", "due"),
    [
        (0, False),
        (48, False),  # a publish: step 40's was made here
        (49, False),
        (50, True),  # due at 50, made after the publish of step 52
        (51, True),
        (52, False),
    ],
)
def test_an_evaluation_that_waits_for_a_publish_is_made_after_a_resume(step: int, due: bool) -> None:
    settings = SimpleNamespace(trainer=SimpleNamespace(eval_every=10))
    run: Any = SimpleNamespace(
        windows=SimpleNamespace(sync_every=4),
        system=SimpleNamespace(learner=SimpleNamespace(settings=settings)),
    )
    assert _AsyncRun._due_since_publish(run, step) == due
    settings.trainer.eval_every = 0
    assert not _AsyncRun._due_since_publish(run, step)
