"""Malformed rows from an agent loop that makes its trajectories itself."""

from collections.abc import Callable
from typing import Any

import pytest

import understudy
from understudy.dataplane.ledger import audit

WRONG = {
    0: "behaviour_logprobs = nan at a token that the student wrote",
    1: "behaviour_logprobs = -inf at a token that the student wrote",
    2: "behaviour_logprobs = 0.5 at a token that the student wrote",
    3: "loss on its first token",
    4: "a loss mask of int32",
    5: "1",  # the first digit of its number of tokens, which is above 128
    6: "turns = 2.5; expected a whole number",
}


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_malformed_rows_of_an_agent_loop_become_dead_letters(
    recipe: Callable[..., dict[str, Any]], workers: int
) -> None:
    """Without teachers, because a teacher would refuse some of these rows."""
    table = recipe(
        teachers={}, loss={"distill_coef": 0.0, "task_coef": 1.0, "advantage": "reinforce++"},
        rollout__agent="troubled_loop:Misshapes", rollout__workers=workers, data__shuffle=False,
        trainer__steps=1, trainer__batch_size=8, trainer__max_dead_letters=1.0,
    )  # fmt: skip
    run = understudy.train(table, progress=False)
    report = audit(run.dir)
    assert report.balanced and report.trained == 8 - len(WRONG) + workers
    for place, reason in WRONG.items():
        if workers and place == 4:
            continue  # a worker's message carries the mask as bool
        assert any(f"row 00000-{place:07d}_0_0 came with {reason}" in found for found in report.reasons), (
            reason
        )
