"""Writes rows from a remote process: columns to the run directory and the queue, references to the plane.

    written = await writer.write("train", {key: columns}, segment)     in any process of the cluster
    await plane.adopt("train", written)                                in the trainer's process, which sees no array

`segment` comes from the plane with each piece of work. Cells that are not arrays (reward, sizes, stop reason)
are part of the announcement, because the ledger uses them; arrays are not, however small. A row exists only
after `adopt`: if the writer dies before, its bytes stay unreferenced and the row is made again. Every write
has its own name in the queue (`write_ids.py`), so a late or repeated write cannot change what the ledger
adopted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.dataplane.base import Columns
from understudy.dataplane.frame import FIRST_ARRAY, SpillRef, decode
from understudy.dataplane.memory.intake import framed
from understudy.dataplane.transfer_queue.link import QueueAddress, QueueLink
from understudy.dataplane.transfer_queue.segments import SegmentWriter, WrittenRow
from understudy.dataplane.transfer_queue.uploads import TIMEOUT_S, QueueUploads
from understudy.dataplane.transfer_queue.write_ids import Marks, queue_key, write_ids
from understudy.errors import RowsUnreachable
from understudy.types.jagged import Jagged


class RowWriter:
    """The remote counterpart of the plane's `put` and `get`. Used on the event loop of a rollout worker
    process."""

    def __init__(
        self,
        folder: Path,
        address: QueueAddress,
        *,
        prefix: str = "",
        timeout_s: float = TIMEOUT_S,
        disk_bytes: float = math.inf,
    ) -> None:
        """`folder` is the plane's folder as this process sees it; columns of `disk_bytes` or more skip the
        queue."""
        self._segments = SegmentWriter(folder / "spill")
        self._link = QueueLink.connect(address, prefix=prefix)
        self._uploads = QueueUploads(self._link, timeout_s)
        self._disk_bytes = disk_bytes
        self._marks = write_ids()

    @property
    def bytes_put(self) -> int:
        return self._uploads.bytes_put

    async def write(
        self, partition: str, rows: Mapping[str, Columns], segment: int, *, queue: bool = True
    ) -> dict[str, WrittenRow]:
        """Write all columns of these rows; returns each row's announcement. On cancellation the queue is
        cleared.

        Without `queue` the columns go to the run directory only.
        """
        frames, mark = framed(rows), next(self._marks)
        places = [
            (key, name) for key, cells in frames.items() for name in cells if cells[name][0] >= FIRST_ARRAY
        ]
        refs = await self._segments.append(segment, [frames[key][name] for key, name in places])
        uploads = {
            key: {name: frame for name, frame in cells.items() if queue and len(frame) < self._disk_bytes}
            for key, cells in frames.items()
        }
        names = {queue_key(key, mark): cells for key, cells in uploads.items() if cells}
        try:
            arrived = bool(names) and await self._uploads.put(partition, names)
        except asyncio.CancelledError:
            self._uploads.clear(partition, list(names))
            raise
        cells: dict[str, dict[str, Any]] = {key: dict(columns) for key, columns in frames.items()}
        for (key, name), ref in zip(places, refs, strict=True):
            cells[key][name] = ref
        return {key: WrittenRow(cells[key], tuple(uploads[key]) if arrived else (), mark) for key in frames}

    async def read(
        self, partition: str, keys: Sequence[str], names: Sequence[str], marks: Marks | None = None
    ) -> dict[str, Jagged | list[Any]]:
        """Columns of rows from the queue; raises `RowsUnreachable` if any is missing."""
        found = await self._uploads.get(partition, keys, names, marks)
        if found is None:
            raise RowsUnreachable(
                f"the queue lacks {', '.join(names)} of rows {keys[0]} … ({self._uploads.lost or 'not all were uploaded'})"
            )
        return found

    async def arrays(self, cells: Sequence[bytes | SpillRef]) -> list[Any]:
        """Announced cells of any writer, read from the run directory; raises `RowsUnreachable` if any is
        missing."""
        refs = [cell for cell in cells if isinstance(cell, SpillRef)]
        frames = iter(await self._segments.read(refs) if refs else ())
        return [decode(next(frames) if isinstance(cell, SpillRef) else cell) for cell in cells]

    def close(self) -> None:
        self._segments.close()
        self._link.close()
