"""When a rank or the critic's process is lost, the run goes back to its last checkpoint by itself.

    attempt ──rank lost──> everything of it is ended ──> attempt from the last checkpoint, on the machines there are ──> …

A student in shards cannot go on without one of them, nor without what its critic learnt, so the whole run is taken up again as `understudy resume` would: the
journal is rewound, metrics are cut back, processes are started and seated anew. Every row is trained exactly once, and under
`determinism = "full"` the figures are those of an undisturbed run.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable

import torch

from understudy.assembly.ranks import forget_group
from understudy.errors import GivenUp, RankLost
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.trainers.stopping import Interrupts

logger = logging.getLogger(__name__)


async def with_restarts(
    attempt: Callable[[], Awaitable[int]],
    allowed: int,
    saved_step: Callable[[], int],
    stop: Interrupts,
    tell: Callable[[str], None],
) -> int:
    """What `attempt` returns; made again where it lost a rank, `allowed` times between two checkpoints.

    Where somebody asked to stop and one of those who train stood still, the last checkpoint is what there is.
    """
    used, saved = 0, saved_step()
    while True:
        try:
            return await attempt()
        except GivenUp as given_up:
            now = saved_step()
            stays = f"{given_up}; without it nothing more can be saved: the run stays at {f'step {now}' if now else 'its start'}"
            logger.warning(stays)
            tell(stays)
            return now
        except RankLost as lost:
            now = saved_step()
            used, saved = (0 if now > saved else used), now
            # Somebody may ask to stop while the lost ranks are let go of, too.
            if used >= allowed or not await forget_group() or stop.requested:
                told = f"{lost}; `understudy resume` goes on from the last checkpoint"
                raise type(lost)(told) from None
            used += 1
            news = (
                f"{lost}; going back to {f'step {now}' if now else 'the start'} (restart {used} of {allowed})"
            )
        logger.warning(news)
        tell(news)
        _let_go_of_memory()


def last_checkpoint_step(run: RunDir) -> int:
    return max(CheckpointStore(run.checkpoints, 2).steps(), default=0)


def _let_go_of_memory() -> None:
    """What the lost attempt held on a device must be free for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
