"""Admission control: producers wait while the plane is full; memory is bounded, no row is dropped.

Rows are admitted when they are *issued* (or put without having been issued), first come first served. An
admitted row never waits again. Otherwise the plane could fill up with rows that wait for columns, or with
large keys while the small key that a batch needs is not admitted. So:

- `max_rows` bounds the rows in flight; `issue` waits at the bound. A caller that counts its own rows against
  the bound issues them `reserved`, and they are admitted at once. The trainers do so (`planning/windows.py`),
  because a batch that waits for a few more rows must not wait for room that only this batch will free.
- `max_bytes` bounds the column bytes in memory. A row that was not issued waits for room. Columns of an issued
  row go to the spill file when they do not fit, because a claim may be waiting for this very row.
- While a claim waits for more rows, the byte bound is lifted (never the row bound): a batch larger than memory
  then goes through the disk instead of deadlocking.
"""

from __future__ import annotations

import asyncio
from collections import deque

from understudy.errors import DataPlaneError


class Admission:
    """Counts of rows and bytes in the plane, and the queue of calls that wait. Used on the event loop."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        if max_rows < 1 or max_bytes < 1:
            raise DataPlaneError(f"max_rows={max_rows} and max_bytes={max_bytes} must be at least 1")
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.rows = 0
        self.resident = 0
        self.waiting_claims = 0
        self._queue: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    def _fits(self, rows: int, size: int) -> bool:
        if self.rows + rows > self.max_rows:
            return False
        return self.resident + size <= self.max_bytes or self.rows == 0 or self.waiting_claims > 0

    def enter_now(self, rows: int, size: int) -> bool:
        """Admit rows if there is room and no call is queued; returns whether they were admitted."""
        if self._queue:
            return False
        plenty = self.rows + rows <= self.max_rows and self.resident + size <= self.max_bytes
        if not plenty and not self._fits(rows, size):
            return False
        self.rows += rows
        return True

    async def admit(self, rows: int, size: int) -> None:
        """Wait until `rows` rows of `size` bytes fit, and admit them. Bytes are counted later, by `hold`."""
        if rows > self.max_rows:
            raise DataPlaneError(
                f"{rows} rows at once in a plane of max_rows={self.max_rows}: raise max_rows, or write fewer at a time"
            )
        if self.enter_now(rows, size):
            return
        entry = (rows, size, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        try:
            await entry[2]
        except asyncio.CancelledError:
            if entry[2].done() and not entry[2].cancelled():
                self.leave(rows)
            elif entry in self._queue:
                self._queue.remove(entry)
            self.serve()
            raise

    def take(self, rows: int) -> None:
        """Admit reserved rows without waiting: their issuer keeps to the bound itself."""
        self.rows += rows

    def enter(self) -> None:
        """Admit a row that must not wait: another output of an admitted session, or a row read from the
        journal."""
        self.rows += 1

    def leave(self, rows: int = 1, size: int = 0) -> None:
        self.rows -= rows
        self.resident -= size

    def hold(self, size: int) -> bool:
        """Count bytes of an admitted row; False when they do not fit and have to be spilled."""
        if self.resident + size > self.max_bytes:
            return False
        self.resident += size
        return True

    def serve(self) -> None:
        """Admit queued calls that fit now. Call it after rows left or a claim began to wait."""
        while self._queue:
            rows, size, future = self._queue[0]
            if not future.done():
                if not self._fits(rows, size):
                    return
                self.rows += rows
                future.set_result(None)
            self._queue.popleft()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def fail(self, error: BaseException) -> None:
        for _, _, future in self._queue:
            if not future.done():
                future.set_exception(error)
        self._queue.clear()

    def reset(self) -> None:
        """Set the counts to zero; queued calls keep waiting."""
        self.rows = 0
        self.resident = 0
