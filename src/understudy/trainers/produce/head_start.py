"""Runs the first forward pass of a step's update while the teachers score its rows (CPU only).

    rollouts ──all finished──┬──> teachers score all rows (their processes) ──────────────┬──> loss, backward
                             └──> the student's pass over the first micro-batch (thread) ─┘

On a CPU a sync step otherwise leaves a core idle: the trainer waits for the teachers, then they wait for it.
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
from understudy.trainers.produce.row_journal import TURNS, after_turns
from understudy.trainers.produce.session import Failed, Output
from understudy.trainers.system import System
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.trajectory import Trajectory


class Ahead:
    """Collects a step's rollouts on the event loop, and starts the student's forward pass after the last
    one."""

    def __init__(self, system: System, policy: Policy, samples: int) -> None:
        """`samples`: how many must be seen before the pass starts. If one fails, it never starts."""
        self._system, self._policy, self._missing = system, policy, samples
        self._rows: list[Trajectory] = []
        self._over = False

    def saw(self, rows: Sequence[Output]) -> None:
        """Called with all outputs of one sample."""
        if any(isinstance(row, Failed) for row in rows):
            return
        self._rows += [row for row in rows if isinstance(row, Trajectory)]
        self._missing -= 1
        if not self._missing and self._rows:
            after_turns(TURNS, self._begin)

    def over(self) -> None:
        """Called when every row has its scores: a pass that has not started is not worth starting."""
        self._over = True

    def _begin(self) -> None:
        """Starts the pass after the requests to teachers were sent. Teachers take longest, and the student's
        thread competes with the requests for the interpreter."""
        if not self._over:
            self._policy.get_ahead(self._first_rows, self._system.micro_batches.tokens(self._system.recipe))

    def _first_rows(self) -> Batch | None:
        """The rows of the step's first update, as far as they are known."""
        recipe, batch = self._system.recipe, _streams(self._rows)
        parts = rows_of_updates(recipe, batch, self._policy.step)
        if not parts:
            return None
        return batch if len(parts[0]) == len(batch) else batch.select(parts[0])


def ahead_of(system: System, samples: int) -> Ahead | None:
    """None if a head start cannot help, or if the rows of the update are not known before they are scored.

    It does not help on a GPU, which works through its queue anyway, nor on a single core."""
    recipe, policy = system.recipe, system.policy
    useful = (
        system.router is not None
        and system.critic is None  # its update needs memory while the states are kept
        and system.row_workers is None
        and recipe.loss.signal != "hidden"  # micro-batches are grouped by teacher then
        and not recipe.rollout.filter_groups
        and _cores() > 1
    )
    if not useful or not isinstance(policy, Policy) or not policy.can_get_ahead:
        return None
    return Ahead(system, policy, samples)


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
    )
