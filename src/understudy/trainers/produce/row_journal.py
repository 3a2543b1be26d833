"""Writes rows to the data plane, with one `put` for rows that are ready at the same moment.

    session A ──put──┐                               ┌─ one put of all of them ──> journal
    session B ──put──┼── next turn of the event loop ┤
    session C ──put──┘                               └─ done: the future of each put is set

A row is written whether or not its teacher answers, so a teacher outage loses no finished rollout.
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
from understudy.trainers.row_columns import PARTITION

Tags = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RowsToWrite:
    """The columns and tags that one call of `RowJournal.put` writes."""

    rows: Mapping[str, Columns]
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Put:
    """A call of `RowJournal.put` whose rows wait to be written, and its future."""

    write: Callable[[], RowsToWrite]
    durable: asyncio.Future[None]


class RowJournal:
    """Writes the rows of one step's sessions, on the event loop. If a session's group was removed meanwhile, only
    its own rows are dropped."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._open: list[_Put] = []
        self._writing: set[asyncio.Task[None]] = set()

    def put(self, write: Callable[[], RowsToWrite]) -> asyncio.Future[None]:
        """Writes all rows of a session, or further columns of them. `write` is called in the next turn to lay
        them out.

        The future is done when the rows would survive kill -9."""
        put = _Put(write, asyncio.get_running_loop().create_future())
        self._open.append(put)
        if len(self._open) == 1:
            asyncio.get_running_loop().call_soon(self._begin)
        return put.durable

    def _begin(self) -> None:
        puts, self._open = self._open, []
        task = asyncio.create_task(self._write(puts))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, puts: Sequence[_Put]) -> None:
        written: list[tuple[_Put, RowsToWrite]] = []
        for put in puts:
            try:
                written.append((put, put.write()))
            except Exception as error:  # fails this put only
                _settle(put, error)
        failure: BaseException | None = None
        try:
            await self._put([one for _, one in written])
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            for put, _ in written:
                _settle(put, failure)

    async def _put(self, written: Sequence[RowsToWrite]) -> None:
        rows = {key: columns for one in written for key, columns in one.rows.items()}
        tags = {key: row_tags for one in written for key, row_tags in one.tags.items()}
        try:
            await self._plane.put(PARTITION, rows, tags)
            point("row_journal.after_put")
        except LeaseLost:  # nothing was written: write each put alone, and drop those of removed rows
            held = await self._plane.list(PARTITION)
            for one in written:
                with suppress(LeaseLost):
                    await self._put_one(one, held)

    async def _put_one(self, one: RowsToWrite, held: Collection[str]) -> None:
        """The rows of one put in one write. If some are settled (their session is rolled out again), only those
        in flight."""
        try:
            await self._plane.put(PARTITION, one.rows, one.tags)
        except LeaseLost:
            rows = {key: columns for key, columns in one.rows.items() if key in held}
            if rows:
                await self._plane.put(
                    PARTITION, rows, {key: one.tags[key] for key in rows if key in one.tags}
                )


def _settle(put: _Put, failure: BaseException | None) -> None:
    if put.durable.done():  # the waiting task was cancelled
        return
    if failure is None:
        put.durable.set_result(None)
    else:
        put.durable.set_exception(failure)
