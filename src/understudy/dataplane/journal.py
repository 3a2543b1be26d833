"""Group commits: many concurrent writers share one transaction.

    event loop                               journal thread
    put, ack, … change memory and add
    what changed to the *open batch*
    end of the loop iteration: hand over ──> spill frames, then one SQLite transaction
    further changes fill the next batch      …
    waiters wake            <── committed ──
    hand over the next batch ──>

One batch is under way while the next fills, so a commit carries whatever arrived during the one before it: alone a
writer waits for one commit, in a crowd hundreds share one. Batches are committed in the order of the calls, so an
ack on disk implies the put before it on disk.

If a commit fails (disk full), nothing of that batch or of any later one is written, every waiter gets the error
and the plane refuses further work: memory is ahead of the journal, and the journal is what a resume believes.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from understudy.dataplane import journal_schema as schema
from understudy.dataplane.frame import SpillRef
from understudy.dataplane.rows import Row
from understudy.dataplane.spill import SpillFiles
from understudy.errors import DataPlaneError

Result = TypeVar("Result")
Committed = Callable[["DataPlaneError | None"], None]


@dataclass(slots=True)
class Changes:
    """What one transaction will write. Built on the event loop, read by the thread once handed over."""

    dirty: dict[int, Row] = field(default_factory=dict)
    """Rows whose line changed; written as they are when the batch is handed over."""
    lines: list[tuple[Any, ...]] = field(default_factory=list)
    packs: list[tuple[int, bytes]] = field(default_factory=list)
    spills: list[tuple[int, SpillRef, bytes]] = field(default_factory=list)
    events: list[tuple[str, int, str, str, int, str | None]] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Step → ids of rows acked in it."""
    packs_gone: list[int] = field(default_factory=list)
    rows_gone: list[int] = field(default_factory=list)
    spills_gone: bool = False
    segment: int = 0
    """The spill segment current when this was handed over; earlier ones hold committed frames only."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """Run on the event loop after the commit."""

    def empty(self) -> bool:
        return not (self.dirty or self.events or self.waiters)


class Journal:
    def __init__(self, folder: Path, spill: SpillFiles) -> None:
        self.file = folder / schema.FILE_NAME
        self.spill = spill
        self.failure: DataPlaneError | None = None
        self.on_failure: Callable[[DataPlaneError], None] = lambda error: None
        self.connection = schema.connect(self.file)
        self._open = Changes()
        self._under_way = 0
        self._scheduled = False
        self._work: queue.SimpleQueue[
            tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]] | None
        ]
        self._work = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="understudy-journal", daemon=True)
        self._thread.start()

    # ---- event loop side

    @property
    def changes(self) -> Changes:
        """The open batch; call `durable` (or `soon`) after adding to it."""
        return self._open

    def soon(self) -> None:
        """Commit the open batch at the end of this loop iteration, or when the one under way is done."""
        if not self._scheduled and not self._under_way:
            self._scheduled = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._hand_over)

    async def durable(self) -> None:
        """Wait until everything added so far is committed."""
        if self.failure is not None:
            raise self.failure
        self.soon()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.waiters.append(waiter)
        await waiter

    def _hand_over(self) -> None:
        self._scheduled = False
        if self._open.empty():
            return
        batch, self._open = self._open, Changes()
        batch.lines = [row.line() for row in batch.dirty.values()]
        batch.segment = self.spill.segment
        self._under_way += 1
        self._work.put((lambda: self._commit(batch), lambda _, error: self._committed(batch, error)))

    def _committed(self, batch: Changes, error: BaseException | None) -> None:
        self._under_way -= 1
        if isinstance(error, DataPlaneError):
            self.on_failure(error)
        if error is None:
            for action in batch.then:
                action()
        for waiter in batch.waiters:
            if not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
        if not self._open.empty():
            self.soon()

    async def run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `job` on the journal thread, after everything added so far and before anything added later."""
        if self.failure is not None:
            raise self.failure
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._hand_over()  # so that the job follows it in the thread's queue
        answer: asyncio.Future[Result] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

        self._work.put((lambda: job(self.connection), deliver))
        return await answer

    async def sync(self) -> None:
        """Flush to the disk: the log holds every commit since the last checkpoint, which was flushed itself."""
        log = self.file.with_name(self.file.name + "-wal")

        def flush(connection: sqlite3.Connection) -> None:
            self.spill.sync()
            for path in (log, self.file.parent):
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

        await self.run(flush)

    async def close(self) -> None:
        if self.failure is None:
            await self.run(
                lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            )
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)
        self.connection.close()

    # ---- thread side

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, deliver = item
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            loop = self._loop
            if loop is None or loop.is_closed():
                continue
            loop.call_soon_threadsafe(deliver, result, error)
            del item, work, deliver, result, error

    def _commit(self, batch: Changes) -> None:
        if self.failure is not None:
            raise self.failure
        connection = self.connection
        try:
            for _, ref, frame in batch.spills:
                self.spill.write(ref, frame)
            connection.execute("BEGIN IMMEDIATE")
            schema.insert_many(connection, schema.INSERT_ROWS, batch.lines)
            schema.insert_many(connection, schema.INSERT_PACKS, batch.packs)
            schema.insert_many(
                connection, schema.INSERT_SPILLS, [(pack, ref.segment) for pack, ref, _ in batch.spills]
            )
            schema.insert_many(connection, schema.INSERT_EVENTS, batch.events)
            for step, ids in batch.trained.items():
                for first, last in schema.runs(ids):
                    connection.execute(
                        "UPDATE rows SET trained=? WHERE id BETWEEN ? AND ?", (step, first, last)
                    )
            schema.delete_packs(connection, batch.packs_gone)
            schema.delete_rows(connection, batch.rows_gone)
            connection.execute("COMMIT")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self.failure = DataPlaneError(
                f"the journal {self.file} cannot be written: {error}; "
                "what was acknowledged is safe: free space or mend the disk, then resume"
            )
            raise self.failure from error
        if batch.spills_gone:
            self.sweep(batch.segment)

    def sweep(self, below: int) -> None:
        """Delete spill segments nobody refers to. On the journal thread."""
        found = self.connection.execute("SELECT DISTINCT segment FROM spills").fetchall()
        self.spill.keep_only((segment for (segment,) in found), below)
