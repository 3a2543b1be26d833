"""Tracks the best checkpoint of a run: the first step with the highest held-out accuracy.

The step follows from metrics.jsonl, so a resumed run needs no other file. Step 0, before any training, has no
checkpoint and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from understudy.errors import CheckpointError
from understudy.policy.checkpoints.checkpoint import CheckpointStore

BEST = "best"
MEASURE = "val/accuracy"


class BestSoFar:
    """The best step so far and its accuracy. The trainer calls it after each evaluation and each
    checkpoint."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step: int | None = None
        self.value: float | None = None
        for line in lines:
            self.consider(int(line["step"]), line)

    def consider(self, step: int, line: Mapping[str, Any]) -> bool:
        """Whether this step's evaluation, if it had one, is better than all before."""
        value = line.get(MEASURE)
        if value is None or step < 1 or (self.value is not None and value <= self.value):
            return False
        self.step, self.value = step, value
        return True

    def mark(self, store: CheckpointStore) -> None:
        """Updates the mark on disk, if the best step has a checkpoint."""
        if self.step is not None and self.step in store.steps() and store.marked(BEST) != self.step:
            store.mark(BEST, self.step)


def best_step(store: CheckpointStore) -> int:
    """The step that a run marked as its best."""
    step = store.marked(BEST)
    if step is None or step not in store.steps():
        raise CheckpointError(
            f"{store.root} has no best checkpoint: it needs data.eval, data.reward and trainer.keep_best = true, and one evaluation "
            "after a step; leave --best out for the latest"
        )
    return step
