"""Writing rows from a process that is not the plane's: columns go into the run directory and the queue, their names to the plane.

    written = await writer.write("train", {key: columns}, segment)     here, in any process of the cluster
    await plane.adopt("train", written)                                in the trainer's process, which sees no column

`segment` comes from the plane with each piece of work. Whatever is not an array (reward, sizes, stop reason) is part of the
announcement, because the ledger decides by it; arrays are not, however small. Until `adopt`, nothing of it counts: a writer that
dies before leaves bytes that nobody refers to, and the row is made again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.dataplane.base import Columns
from understudy.dataplane.frame import FIRST_ARRAY
from understudy.dataplane.intake import framed
from understudy.dataplane.lent import SegmentWriter, Written
from understudy.dataplane.transfer_queue_link import QueueAddress, QueueLink
from understudy.dataplane.transfer_queue_shelf import PATIENCE, Shelf
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

    @property
    def bytes_put(self) -> int:
        return self._shelf.bytes_put

    async def write(self, partition: str, rows: Mapping[str, Columns], segment: int) -> dict[str, Written]:
        """Every column of these rows; what to tell the plane of each."""
        frames = framed(rows)
        places = [
            (key, name) for key, cells in frames.items() for name in cells if cells[name][0] >= FIRST_ARRAY
        ]
        refs = await self._segments.append(segment, [frames[key][name] for key, name in places])
        uploads = {
            key: {name: frame for name, frame in cells.items() if len(frame) < self._disk_bytes}
            for key, cells in frames.items()
        }
        arrived = await self._shelf.put(partition, {key: cells for key, cells in uploads.items() if cells})
        cells: dict[str, dict[str, Any]] = {key: dict(columns) for key, columns in frames.items()}
        for (key, name), ref in zip(places, refs, strict=True):
            cells[key][name] = ref
        return {key: Written(cells[key], tuple(uploads[key]) if arrived else ()) for key in frames}

    async def read(
        self, partition: str, keys: Sequence[str], names: Sequence[str]
    ) -> dict[str, Jagged | list[Any]]:
        """Columns of rows from the queue; `RowsUnreachable` where it has not all of them."""
        found = await self._shelf.get(partition, keys, names)
        if found is None:
            raise RowsUnreachable(
                f"the queue lacks {', '.join(names)} of rows {keys[0]} … ({self._shelf.lost or 'not all were uploaded'})"
            )
        return found

    def forget(self, partition: str, keys: Sequence[str]) -> None:
        """These rows were written in vain."""
        self._shelf.clear(partition, keys)

    def close(self) -> None:
        self._segments.close()
        self._link.close()
