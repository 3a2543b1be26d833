"""Where sessions run and where their rows lie: in the trainer's process, or with workers on other machines.

    Rollouts            what produce uses: a session becomes rows in the ledger, held by reference
    ├── LocalRollouts   rewards run and rows are journalled here; agent loops run here or in local workers
    └── RemoteRollouts  workers run loops and rewards and write the rows (`remote_rows/rollouts.py`)

Assembly chooses one of them for a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from understudy.dataplane.base import DataPlane
from understudy.engines.base import Sampling
from understudy.errors import DataError
from understudy.observability.spans import Spans
from understudy.rollout.agents.agent import (
    LoopContext,
    LostOutput,
    check_ids,
    check_kinds,
    check_streams,
    checked_outputs,
)
from understudy.rollout.agents.given import GivenAnswer
from understudy.rollout.agents.registry import Loops
from understudy.rollout.rewards.rewards import Rewards
from understudy.rollout.timing import BatchTimings
from understudy.rollout.user_code import awaited
from understudy.trainers.produce.failures import as_timeout, reason_of, sample_fault
from understudy.trainers.produce.row_journal import RowJournal, RowsToWrite
from understudy.trainers.row_columns import CANDIDATES, MEDIA, ORIGIN, PARTITION, rollout_columns, storable
from understudy.types.batch import BatchMeta
from understudy.types.prompt import Prompt
from understudy.types.references import RowRef
from understudy.types.trajectory import FEEDBACK, Origin, StopReason, Trajectory

TagsOf = Callable[[float | None, str], Mapping[str, Any]]
"""(reward, why it failed or "") → the tags of an output."""


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """An output that cannot be trained on, and its error."""

    key: str
    error: Exception


Output = RowRef | FailedOutput


@dataclass(frozen=True, slots=True)
class Session:
    """One attempt at a prompt, ready to run."""

    key: str
    """The key of its first output."""
    prompt: Prompt
    context: LoopContext
    clock: asyncio.Timeout
    """Its deadline, not entered yet. The context stops it while the loop waits for the engine."""
    limit: float
    """`rollout.deadline_seconds`."""
    tags_of: TagsOf
    journal: RowJournal


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The outputs of a session."""

    outputs: Sequence[Output]
    durable: Awaitable[None] | None = None
    """Done when the outputs would survive kill -9. None: they would already."""


class Rollouts(Protocol):
    """Runs sessions. Used by produce on the trainer's event loop."""

    async def run(self, session: Session) -> RolledOut:
        """Runs the session's agent loop and its rewards, and puts all its outputs into the ledger in one
        write, so that a resume finds all of them or none. Raises if the agent loop fails.

        A failed output has no columns and a tag with the reason, so a resume dead-letters it too."""
        ...

    async def stored(self, key: str) -> RowRef:
        """A row that an earlier launch wrote without scores."""
        ...

    def metrics(self) -> dict[str, float]:
        """Bytes between the trainer's process and workers, since the launch."""
        ...


@dataclass(slots=True)
class LocalRollouts:
    """Agent loops in this process or in local workers; rewards and rows in this process."""

    loops: Loops
    rewards: Rewards
    plane: DataPlane
    sampling: Sampling
    spans: Spans
    timings: BatchTimings
    pictures: bool = False
    """Whether the student reads pictures, so that rows name them."""
    with_feedback: bool = False
    """Whether stored rows are read with their reward and its feedback, for teachers' prompts that show them."""

    async def run(self, session: Session) -> RolledOut:
        clock, context = session.clock, session.context
        try:
            async with clock:
                with self.spans.span("rollout", key=session.key):
                    loop = GivenAnswer() if context.given else self.loops.of(session.prompt)
                    outputs = checked_outputs(await awaited(loop.run(session.prompt, context)), context)
                due = clock.when()
        except Exception as error:
            raise as_timeout(error, clock, f"agent loop timed out: {session.key}", session.limit) from error
        for one in outputs:
            if isinstance(one, LostOutput):
                continue
            self.timings.add(one.key, one.extra.get("seconds", {}))
            self.timings.lengths(one.key, one.length, one.loss_length)
        # `due` is None if the loop returned while a generation was still running, which stops the clock.
        left = session.limit if due is None else due - asyncio.get_running_loop().time()
        rewarded = [await self._rewarded(session, one, left) for one in outputs]
        return RolledOut(rewarded, self._journal(session, rewarded))

    async def _rewarded(
        self, session: Session, trajectory: Trajectory | LostOutput, seconds: float
    ) -> Trajectory | FailedOutput:
        """Each reward gets the time that the loop left, so that one hanging reward fails its own output
        only."""
        if isinstance(trajectory, LostOutput):
            return FailedOutput(trajectory.key, DataError(trajectory.reason))
        key, clock = trajectory.key, asyncio.timeout(seconds)
        try:
            check_kinds(trajectory)
            check_streams(trajectory, session.context.context)
            check_ids(trajectory, self.sampling)
            if not self.rewards:
                return storable(trajectory)
            with self.spans.span("reward", key=key), self.timings.during(key, "reward"):
                async with clock:
                    return storable(await self.rewards.score(session.prompt, trajectory))
        except Exception as error:
            what = f"reward {self.rewards.names} timed out: {key}"
            return FailedOutput(key, sample_fault(as_timeout(error, clock, what, session.limit)))

    def _journal(self, session: Session, outputs: Sequence[Trajectory | FailedOutput]) -> Awaitable[None]:
        """If the session's group was removed meanwhile (a sibling failed, or there was no signal), its rows are
        dropped. They are scored all the same: their speed relative to their siblings must not decide what else is in a teacher's batch."""

        def write() -> RowsToWrite:
            rows: dict[str, Mapping[str, Any]] = {}
            tags = {}
            for one in outputs:
                if isinstance(one, FailedOutput):
                    rows[one.key], tags[one.key] = {}, session.tags_of(None, reason_of(one.error))
                else:
                    rows[one.key], tags[one.key] = rollout_columns(one), session.tags_of(one.reward, "")
            return RowsToWrite(rows, tags)

        return session.journal.put(write)

    async def stored(self, key: str) -> Trajectory:
        names = ["tokens", "loss_mask", "behaviour_logprobs", "weight_versions", "stop_reason", ORIGIN]
        names += [CANDIDATES] if self.sampling.candidates else []
        names += [MEDIA] if self.pictures else []
        names += ["reward", FEEDBACK] if self.with_feedback else []
        columns = await self.plane.get(BatchMeta(PARTITION, (key,)), names)
        cells: dict[str, Any] = {name: columns[name][0] for name in names}
        return Trajectory(
            key,
            np.asarray(cells["tokens"]),
            np.asarray(cells["loss_mask"]),
            np.asarray(cells["behaviour_logprobs"]),
            np.asarray(cells["weight_versions"]),
            StopReason(str(cells["stop_reason"])),
            reward=cells.get("reward"),
            extra={FEEDBACK: str(cells[FEEDBACK])} if self.with_feedback else {},
            candidate_ids=np.asarray(cells[CANDIDATES]) if CANDIDATES in cells else None,
            media=tuple(cells[MEDIA]) if MEDIA in cells else None,
            origin=Origin(str(cells[ORIGIN])),
        )

    def metrics(self) -> dict[str, float]:
        return {}
