"""Runs the first forward pass of a step's update while the teachers score its rows (CPU only).

    rollouts ──all finished──┬──> teachers score all rows (their processes) ──────────────┬──> loss, backward
                             └──> the student's pass over the first micro-batch (thread) ─┘

Without it a sync step on a CPU leaves cores idle: the trainer waits for the teachers, then they wait for it.
The update uses the result only if it would compute exactly the same (`policy/cpu/head_start.py`), so results
do not depend on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from understudy.policy.policy import Policy
from understudy.trainers.learn.prepare import rows_of_updates
from understudy.trainers.produce.rollouts import FailedOutput, Output
from understudy.trainers.system import Learner
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.trajectory import Trajectory


class HeadStartTrigger:
    """Collects a step's rollouts on the event loop, and starts the student's forward pass after the last
    one."""

    def __init__(self, learner: Learner, policy: Policy, sessions: int) -> None:
        """`sessions`: how many must be added before the pass starts. If an output of one failed or is remote, the
        pass never starts."""
        self._learner, self._policy, self._missing = learner, policy, sessions
        self._rows: list[Trajectory] = []

    def add(self, rows: Sequence[Output]) -> None:
        """Called with all outputs of one session."""
        here = [None if isinstance(row, FailedOutput) else row.here for row in rows]
        found = [row for row in here if row is not None]
        if len(found) < len(rows):
            return
        self._rows += found
        self._missing -= 1
        if not self._missing and self._rows:
            self._policy.begin_head_start(self._first_rows, self._learner.micro_batches.tokens)

    def _first_rows(self) -> Batch | None:
        """The rows of the step's first update, as far as they are known. Called on the thread of the head start."""
        batch = _streams(self._rows)
        parts = rows_of_updates(self._learner.settings, batch, self._policy.step)
        if not parts:
            return None
        return batch if len(parts[0]) == len(batch) else batch.select(parts[0])


def head_start_of(learner: Learner, sessions: int) -> HeadStartTrigger | None:
    """None if a head start cannot help, or if the rows of the update are not known before they are scored.

    It does not help on a GPU, which works through its queue anyway, nor on a single core."""
    settings, policy = learner.settings, learner.policy
    useful = (
        settings.scored
        and learner.critic is None  # its update needs memory while the states are kept
        and settings.loss.signal != "hidden"  # micro-batches are grouped by teacher then
        and not settings.rollout.filter_groups
        and _cores() > 1
    )
    if not useful or not isinstance(policy, Policy) or not policy.can_head_start:
        return None
    return HeadStartTrigger(learner, policy, sessions)


def _cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _streams(rows: Sequence[Trajectory]) -> Batch:
    """The columns of these rows that a forward pass needs."""
    offsets = torch.tensor([0, *(len(row.tokens) for row in rows)], dtype=torch.int64).cumsum(0)

    def column(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Jagged:
        return Jagged(torch.from_numpy(np.concatenate(arrays)).to(dtype), offsets)

    return Batch(
        keys=tuple(row.key for row in rows),
        tokens=column([row.tokens for row in rows], torch.int64),
        loss_mask=column([row.loss_mask for row in rows], torch.bool),
        behaviour_logprobs=column([row.behaviour_logprobs for row in rows], torch.float32),
        stop_reasons=tuple(str(row.stop_reason) for row in rows),
        origins=tuple(str(row.origin) for row in rows),
    )
