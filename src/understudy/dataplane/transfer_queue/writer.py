"""Writing rows from a process that is not the plane's: columns go into the run directory and the queue, their names to the plane.

    written = await writer.write("train", {key: columns}, segment)     here, in any process of the cluster
    await plane.adopt("train", written)                                in the trainer's process, which sees no column

`segment` comes from the plane with each piece of work. Whatever is not an array (reward, sizes, stop reason) is part of the
announcement, because the ledger decides by it; arrays are not, however small. Until `adopt`, nothing of it counts: a writer that
dies before leaves bytes that nobody refers to, and the row is made again. Every write has a name of its own in the queue
(`write_ids.py`), so one that comes late, or twice, changes nothing that the ledger took.
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
from understudy.dataplane.transfer_queue.segments import SegmentWriter, Written
from understudy.dataplane.transfer_queue.uploads import PATIENCE, Shelf
from understudy.dataplane.transfer_queue.write_ids import Marking, Marks, queue_key
from understudy.errors import RowsUnreachable
from understudy.types.jagged import Jagged


class RowWriter:
    def __init__(
        self,
        folder: Path,
        address: QueueAddress,
        *,
        prefix: str = "",
        patience: float = PATIENCE,
        disk_bytes: float = math.inf,
    ) -> None:
        """`folder` is the plane's own, seen from here; columns of `disk_bytes` or more do not go into the queue."""
        self._segments = SegmentWriter(folder / "spill")
        self._link = QueueLink.connect(address, prefix=prefix)
        self._shelf = Shelf(self._link, patience)
        self._disk_bytes = disk_bytes
        self._marking = Marking()

    @property
    def bytes_put(self) -> int:
        return self._shelf.bytes_put

    async def write(
        self, partition: str, rows: Mapping[str, Columns], segment: int, *, queue: bool = True
    ) -> dict[str, Written]:
        """Every column of these rows; what to tell the plane of each. Cancelled, nothing of them stays in the queue.

        Without `queue` they are in the run directory alone.
        """
        frames, mark = framed(rows), self._marking.new()
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
            arrived = bool(names) and await self._shelf.put(partition, names)
        except asyncio.CancelledError:
            self._shelf.clear(partition, list(names))
            raise
        cells: dict[str, dict[str, Any]] = {key: dict(columns) for key, columns in frames.items()}
        for (key, name), ref in zip(places, refs, strict=True):
            cells[key][name] = ref
        return {key: Written(cells[key], tuple(uploads[key]) if arrived else (), mark) for key in frames}

    async def read(
        self, partition: str, keys: Sequence[str], names: Sequence[str], marks: Marks | None = None
    ) -> dict[str, Jagged | list[Any]]:
        """Columns of rows from the queue; `RowsUnreachable` where it has not all of them."""
        found = await self._shelf.get(partition, keys, names, marks)
        if found is None:
            raise RowsUnreachable(
                f"the queue lacks {', '.join(names)} of rows {keys[0]} … ({self._shelf.lost or 'not all were uploaded'})"
            )
        return found

    async def arrays(self, cells: Sequence[bytes | SpillRef]) -> list[Any]:
        """Cells that some writer announced, from the run directory; `RowsUnreachable` where they are not there."""
        refs = [cell for cell in cells if isinstance(cell, SpillRef)]
        frames = iter(await self._segments.read(refs) if refs else ())
        return [decode(next(frames) if isinstance(cell, SpillRef) else cell) for cell in cells]

    def close(self) -> None:
        self._segments.close()
        self._link.close()
