"""Room in the plane: producers wait, nothing is dropped, memory stays flat.

Rows are let in when they are *issued* (or put without having been issued), first come first served. A row that is
in never waits again; otherwise the plane could be full of rows that wait for columns, or of large keys while the small
key a batch needs stands outside. So:

- `max_rows` bounds the rows in flight; issuing waits at the bound. Whoever counts its own rows against the bound issues them
  `reserved`: they enter at once. The trainers do (`planning/windows.py`), because a batch that waits for a few more rows must
  not wait for room that only this batch will free.
- `max_bytes` bounds the column bytes in memory. A row nobody issued waits for room; columns of a row that was
  issued go to the spill file when they do not fit, because whoever claims may be waiting for just this row.
- A claim that waits for more rows lifts the byte bound (never the row bound) for the others too: a batch larger
  than memory is made by way of the disk instead of never.
"""

from __future__ import annotations

import asyncio
from collections import deque

from understudy.errors import DataPlaneError


class Admission:
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
        """Take room for rows if there is room and nobody stands in line before them."""
        if self._queue:
            return False
        plenty = self.rows + rows <= self.max_rows and self.resident + size <= self.max_bytes
        if not plenty and not self._fits(rows, size):
            return False
        self.rows += rows
        return True

    async def admit(self, rows: int, size: int) -> None:
        """Wait for room for `rows` rows of `size` bytes, and take the room for the rows."""
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
        """Room for rows whose issuer keeps to the bound itself: they stand in nobody's line."""
        self.rows += rows

    def enter(self) -> None:
        """A row that may not wait: one more output of a session that is in already, or one read from the journal."""
        self.rows += 1

    def leave(self, rows: int = 1, size: int = 0) -> None:
        self.rows -= rows
        self.resident -= size

    def hold(self, size: int) -> bool:
        """Take room for bytes of a row that is in; False when they have to be spilled."""
        if self.resident + size > self.max_bytes:
            return False
        self.resident += size
        return True

    def serve(self) -> None:
        """Let in whoever fits now. Call after rows left or a claim began to wait."""
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
        """Count from nothing again; whoever waits keeps waiting."""
        self.rows = 0
        self.resident = 0
