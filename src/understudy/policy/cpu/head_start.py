"""Starts an update's first forward pass (per lane) while the teachers still score the batch.

Hidden states depend only on tokens and weights. So while teacher processes score a batch, the student can
already run its body on it; loss and backward pass follow when the scores arrive. The update uses the states
only if it would compute the same: same weights, same micro-batch. They change the time of a step and nothing
else.

Shapes: N loss-bearing tokens, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import torch

from understudy.policy.assemble import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadStart:
    """Hidden states of an update's first micro-batches, computed before its loss is known."""

    updates: int
    """Number of optimizer steps the weights had taken when this was computed."""
    passes: list[tuple[MicroBatch, torch.Tensor]]
    """The update's first micro-batches, one per lane, and their hidden_NH with the autograd graph."""
    seconds: float

    def take(self, place: int, micro: MicroBatch, updates: int) -> torch.Tensor | None:
        """[N, H] of micro-batch number `place`, or None if it was computed from another micro-batch or other
        weights. Each can be taken once, because the backward pass consumes its graph."""
        if place >= len(self.passes):
            return None
        mine, hidden_NH = self.passes[place]
        same = (
            self.updates == updates
            and mine.layout is micro.layout
            and mine.lengths == micro.lengths
            and torch.equal(mine.ids, micro.ids)
            and torch.equal(mine.predict_N, micro.predict_N)
        )
        self.passes[place] = (mine, hidden_NH.new_empty(0))
        return hidden_NH if same else None


class HeadStarts:
    """Holds at most one head start: running on a thread of its own, or finished and not yet taken. The event
    loop calls `begin`, the update's thread `take`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._newest: Future[HeadStart] | None = None

    def begin(self, work: Callable[[], HeadStart]) -> None:
        """Returns at once; drops an earlier head start that was not taken."""
        self.take()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head-start")
        self._newest = self._thread.submit(work)

    def wait(self) -> None:
        """Waits until the head start's thread no longer uses the model."""
        if self._newest is not None:
            wait_for([self._newest])

    def take(self) -> HeadStart | None:
        """Waits. None if nothing was begun, or if it failed: the update then hits the same error and reports
        it."""
        newest, self._newest = self._newest, None
        if newest is None:
            return None
        try:
            return newest.result()
        except Exception:
            logger.debug("no head start for this update", exc_info=True)
            return None
