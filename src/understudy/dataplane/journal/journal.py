"""Group commit: many concurrent writers share one SQLite transaction.

    event loop                               journal thread
    put, ack, … change memory and add
    what changed to the *open batch*
    end of the loop iteration: hand over ──> spill frames, then one SQLite transaction
    further changes fill the next batch      …
    waiters wake            <── committed ──
    hand over the next batch ──>

While one batch is committed the next one fills, so a commit carries everything that arrived during the one
before it: a single writer waits for one commit, and under load hundreds of writers share one. Batches are
committed in the order of the calls, so an ack on disk implies that the put before it is on disk.

A small batch (`INLINE_BYTES`) is committed on the event loop itself when the thread is idle: a commit without
a flush is a few writes into the page cache, about 0.1 ms, less than two thread switches cost. Work that may
block on the disk runs on the thread: large batches, spill frames, checkpoints of the write-ahead log, `sync`,
`rewind`, `settle`.

If a commit fails (disk full), nothing of that batch or of any later one is written, every waiter gets the
error and the plane refuses further work: memory is ahead of the journal, and a resume reads only the journal.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.journal.writer import Changes, Writer
from understudy.errors import DataPlaneError

INLINE_BYTES = 64 * 2**10
LOG_BYTES = 64 * 2**20
"""Size of the write-ahead log at which it is checkpointed into the tables."""

Result = TypeVar("Result")
_Deliver = Callable[[Any, BaseException | None], None]


class Journal:
    """The open batch and the thread that commits. Called by the plane and its `Store` on the event loop."""

    def __init__(self, folder: Path, spill: SpillFiles) -> None:
        self.writer = Writer(folder, spill)
        self.on_failure: Callable[[DataPlaneError], None] = lambda error: None
        self.changes = Changes()
        """The open batch; `await durable()` after adding to it."""
        self._in_thread = 0
        """Jobs queued for or running on the thread; while there are any, only the thread uses the
        connection."""
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], _Deliver] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="understudy-journal", daemon=True)
        self._thread.start()

    def durable(self) -> Changes:
        """Returns the open batch; await it immediately. It completes when everything added so far is
        committed."""
        if self.writer.failure is not None:
            raise self.writer.failure
        changes = self.changes
        changes.awaited = True
        if not self._scheduled:
            self._schedule()
        return changes

    def _schedule(self) -> None:
        """Hand the batch over at the end of this loop iteration. While the thread is busy, `_done` schedules
        it."""
        if not self._scheduled and not self._in_thread:
            self._scheduled = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._scheduled = False
        if self.changes.empty():
            return
        batch, self.changes = self.changes, Changes()
        writer = self.writer
        try:
            batch.seal(writer.spill.segment)
        except Exception as error:  # waiters must get the error instead of waiting for ever
            writer.failure = DataPlaneError(f"rows cannot be written to the journal: {error!r}")
            self._committed(batch, writer.failure)
            return
        if self._in_thread or batch.spills or batch.size > INLINE_BYTES:
            self._to_thread(lambda: writer.commit(batch), lambda _, error: self._committed(batch, error))
        else:
            try:
                writer.commit(batch)
            except DataPlaneError as error:
                self._committed(batch, error)
            else:
                self._committed(batch, None)
        if writer.log_bytes > LOG_BYTES and writer.failure is None:
            writer.log_bytes = 0
            self._to_thread(writer.checkpoint, self._checkpointed)

    def _to_thread(self, work: Callable[[], Any], deliver: _Deliver) -> None:
        self._in_thread += 1
        self._work.put((work, deliver))

    def _done(self, deliver: _Deliver, result: Any, error: BaseException | None) -> None:
        self._in_thread -= 1
        deliver(result, error)
        if not self.changes.empty():
            self._schedule()

    def _committed(self, batch: Changes, error: BaseException | None) -> None:
        batch.end(error)
        if isinstance(error, DataPlaneError):
            self.on_failure(error)

    def _checkpointed(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self.on_failure(self.writer.failed("checkpointed", error))

    async def run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `job` on the journal thread, after everything added so far and before anything added later."""
        if self.writer.failure is not None:
            raise self.writer.failure
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._hand_over()
        answer: asyncio.Future[Result] = self._loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                elif isinstance(error, sqlite3.Error):
                    answer.set_exception(self.writer.failed("written", error))
                else:
                    answer.set_exception(error)

        self._to_thread(lambda: job(self.writer.connection), deliver)
        return await answer

    async def close(self) -> None:
        try:
            if self.writer.failure is None:
                await self.run(lambda connection: None)
        finally:
            await asyncio.to_thread(self.abandon)

    def abandon(self) -> None:
        """Stop the thread and close the file; the open batch is not written."""
        self._work.put(None)
        self._thread.join()
        self.writer.close()

    def _run(self) -> None:
        """The thread's main loop."""
        while (item := self._work.get()) is not None:
            work, deliver = item
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            loop = self._loop
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._done, deliver, result, error)
            del item, work, deliver, result, error
