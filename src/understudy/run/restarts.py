"""Restarts a run from its last checkpoint when a rank or the critic's process is lost.

    attempt ──rank lost──> end its processes ──> attempt from the last checkpoint, on the machines left ──> …

A sharded student cannot continue without one of its shards, nor without its critic's state. So the whole run
is resumed as by `understudy resume`: the journal is rewound, metrics are truncated, processes are seated and
started again. Every row is trained exactly once, and under `determinism = "full"` the results are those of an
undisturbed run.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable

import torch

from understudy.assembly.ranks import forget_group
from understudy.errors import ChildDied, GivenUp, RankLost
from understudy.trainers.stopping import Interrupts

logger = logging.getLogger(__name__)


async def with_restarts(
    attempt: Callable[[], Awaitable[int]],
    allowed: int,
    saved_step: Callable[[], int],
    stop: Interrupts,
    tell: Callable[[str], None],
) -> int:
    """The result of `attempt`. It is repeated after a lost rank or critic, at most `allowed` times between
    two checkpoints.

    A process that is killed while it is started again counts as lost. A rank or critic that is lost, or stood still, after a stop
    request ends the run as stopped: the result is the step of the last checkpoint.
    """
    used, saved = 0, saved_step()
    while True:
        try:
            return await attempt()
        except ChildDied as lost:
            if not isinstance(lost, RankLost) and not (used and lost.killed):
                raise
            now = saved_step()
            used, saved = (0 if now > saved else used), now
            again = not isinstance(lost, GivenUp) and used < allowed and await forget_group()
            if isinstance(lost, GivenUp) or stop.requested:  # a request may also come during `forget_group`
                stays = f"{lost}; without it nothing more can be saved: the run stays at {f'step {now}' if now else 'its start'}"
                logger.warning(stays)
                tell(stays)
                return now
            if not again:
                message = f"{lost}; `understudy resume` continues from the last checkpoint"
                raise type(lost)(message) from None
            used += 1
            news = (
                f"{lost}; going back to {f'step {now}' if now else 'the start'} (restart {used} of {allowed})"
            )
        logger.warning(news)
        tell(news)
        _let_go_of_memory()


def _let_go_of_memory() -> None:
    """Frees the device memory of the lost attempt for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
