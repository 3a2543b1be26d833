"""Rows on their way into the data plane: those that are ready in the same moment are written together.

    sample A ──put──┐                     ┌─ one put of all of them ──> journal
    sample B ──put──┼── a few turns later ┤
    sample C ──put──┘                     └─ each sample is told that its rows are safe

Writing a row is Python's work, and so is asking a teacher about it. What a teacher is waiting for comes first; rows are written
while it works. They are written whatever becomes of the question, so an outage still costs no finished rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from understudy.dataplane.base import Columns, DataPlane
from understudy.errors import LeaseLost
from understudy.observability.faults import point
from understudy.trainers.system import PARTITION

TURNS = 16
"""Of the event loop, in which requests to teachers are encoded and sent: httpx needs four for one, and three for every other."""

Tags = Mapping[str, Mapping[str, Any]]


def after_turns(turns: int, work: Callable[[], None]) -> None:
    """Calls `work` once everybody who is ready now, and whom that wakes, has had this many turns."""
    if turns == 0:
        work()
    else:
        asyncio.get_running_loop().call_soon(after_turns, turns - 1, work)


@dataclass(frozen=True, slots=True)
class Written:
    """What is put of one sample."""

    rows: Mapping[str, Columns]
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sample:
    write: Callable[[], Written]
    safe: asyncio.Future[None]


class RowJournal:
    """Of one step's samples. A sample that is no longer wanted (its group was taken out meanwhile) is dropped by itself."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._open: list[_Sample] = []
        self._writing: set[asyncio.Task[None]] = set()

    def put(self, write: Callable[[], Written], *, turns: int = 1) -> asyncio.Future[None]:
        """All rows of a sample, or more columns of them, as `write` lays them out so many turns later; done when they survive
        kill -9."""
        sample = _Sample(write, asyncio.get_running_loop().create_future())
        self._open.append(sample)
        if len(self._open) == 1:
            after_turns(turns, self._begin)
        return sample.safe

    def _begin(self) -> None:
        samples, self._open = self._open, []
        task = asyncio.create_task(self._write(samples))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, samples: Sequence[_Sample]) -> None:
        written: list[tuple[_Sample, Written]] = []
        for sample in samples:
            try:
                written.append((sample, sample.write()))
            except Exception as error:  # that sample's own trouble
                _settle(sample, error)
        trouble: BaseException | None = None
        try:
            await self._put([one for _, one in written])
        except BaseException as error:
            trouble = error
            if not isinstance(error, Exception):
                raise
        finally:
            for sample, _ in written:
                _settle(sample, trouble)

    async def _put(self, written: Sequence[Written]) -> None:
        rows = {key: columns for one in written for key, columns in one.rows.items()}
        tags = {key: told for one in written for key, told in one.tags.items()}
        try:
            await self._plane.put(PARTITION, rows, tags)
            point("row_journal.after_put")
        except LeaseLost:  # nothing was written: find out whose work is not wanted
            held = await self._plane.list(PARTITION)
            for one in written:
                with suppress(LeaseLost):
                    await self._put_one(one, held)

    async def _put_one(self, one: Written, held: Collection[str]) -> None:
        """A sample's rows in one write. Where some are settled (their session is rolled out once more), only those in flight."""
        try:
            await self._plane.put(PARTITION, one.rows, one.tags)
        except LeaseLost:
            rows = {key: columns for key, columns in one.rows.items() if key in held}
            if rows:
                await self._plane.put(
                    PARTITION, rows, {key: one.tags[key] for key in rows if key in one.tags}
                )


def _settle(sample: _Sample, trouble: BaseException | None) -> None:
    if sample.safe.done():  # whoever waited was cancelled
        return
    if trouble is None:
        sample.safe.set_result(None)
    else:
        sample.safe.set_exception(trouble)
