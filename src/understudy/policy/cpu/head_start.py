"""The first forward pass of an update (of each lane, where there are several), made before its loss is known.

Hidden states depend on tokens and weights alone. While teachers judge a batch in processes of their own, the student can
therefore go through its body already; the loss and the backward pass follow when the scores are there. The update takes the
states only if they are what it would compute itself: same weights, same micro-batch. So nothing but time depends on them.

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
    updates: int
    """Optimizer steps behind the weights it was made with."""
    passes: list[tuple[MicroBatch, torch.Tensor]]
    """The update's first micro-batches, as many as it works on at a time, and their hidden_NH with the graph that leads back
    to the weights."""
    seconds: float

    def take(self, place: int, micro: MicroBatch, updates: int) -> torch.Tensor | None:
        """[N, H] of the update's micro-batch at this place, if they are this one's under these weights; given once, because
        their graph is used up."""
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
    """At most one of them, under way on a thread of its own or waiting to be taken."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._newest: Future[HeadStart] | None = None

    def begin(self, work: Callable[[], HeadStart]) -> None:
        """Returns at once; what is left of an earlier one is dropped."""
        self.take()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head-start")
        self._newest = self._thread.submit(work)

    def wait(self) -> None:
        """Until nobody uses the model here."""
        if self._newest is not None:
            wait_for([self._newest])

    def take(self) -> HeadStart | None:
        """Waits; None where nothing was begun, or where it failed: the update meets the same trouble, and has words for it."""
        newest, self._newest = self._newest, None
        if newest is None:
            return None
        try:
            return newest.result()
        except Exception:
            logger.debug("no head start for this update", exc_info=True)
            return None
