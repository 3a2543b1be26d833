"""The student's first forward pass of a step, while teachers judge the rows.

    rollouts ──last one is there──┬──> teachers judge all rows (their processes) ────────────┬──> loss, backward
                                  └──> the student reads the first micro-batch (a thread) ───┘

On a CPU a sync step otherwise leaves a core idle: the trainer waits for the teachers, then they wait for it. The update takes
what was computed here only if it would compute the very same (`policy/cpu/head_start.py`), so results do not depend on it.
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
    """Collects a step's rollouts and sets the student to work on them when the last one is there."""

    def __init__(self, system: System, policy: Policy, samples: int) -> None:
        """`samples`: how many must have been seen. One that fails is never seen, and then nothing is begun."""
        self._system, self._policy, self._missing = system, policy, samples
        self._rows: list[Trajectory] = []
        self._over = False

    def saw(self, rows: Sequence[Output]) -> None:
        """All outputs of one sample."""
        if any(isinstance(row, Failed) for row in rows):
            return
        self._rows += [row for row in rows if isinstance(row, Trajectory)]
        self._missing -= 1
        if not self._missing and self._rows:
            after_turns(TURNS, self._begin)

    def over(self) -> None:
        """Every row has been judged: what was not begun by now comes too late."""
        self._over = True

    def _begin(self) -> None:
        """Once teachers have been asked: their work takes longest, and the student's thread wants Python as much as the request
        to them does."""
        if not self._over:
            self._policy.get_ahead(self._first_rows, self._system.micro_batches.tokens(self._system.recipe))

    def _first_rows(self) -> Batch | None:
        """What the first update of the step will be given, as far as it is known."""
        recipe, batch = self._system.recipe, _streams(self._rows)
        parts = rows_of_updates(recipe, batch, self._policy.step)
        if not parts:
            return None
        return batch if len(parts[0]) == len(batch) else batch.select(parts[0])


def ahead_of(system: System, samples: int) -> Ahead | None:
    """None where it cannot help (a GPU works through its queue anyway, and a single core has no time to spare) or where the rows
    of the update are not known before they are judged."""
    recipe, policy = system.recipe, system.policy
    useful = (
        system.router is not None
        and system.critic is None  # its update would need memory beside what is kept here
        and system.row_workers is None
        and recipe.loss.signal != "hidden"  # micro-batches go by teacher there
        and not recipe.rollout.filter_groups
        and _cores() > 1
    )
    if not useful or not isinstance(policy, Policy) or not policy.can_get_ahead:
        return None
    return Ahead(system, policy, samples)


def _cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _streams(rows: Sequence[Trajectory]) -> Batch:
    """What a forward pass needs of these rows."""
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
