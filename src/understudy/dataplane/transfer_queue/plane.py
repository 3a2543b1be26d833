"""The data plane of a cluster: ledger and journal in the trainer's process, columns in TransferQueue.

    this process                         the cluster                          any process
    ┌───────────────────────────┐        ┌──────────────────────────┐        ┌──────────────────────────┐
    │ ledger: keys, statuses,   │ names  │ TransferQueue            │ bytes  │ QueueReader.get(meta)    │
    │ leases, acks, groups      │───────>│ controller, storage units│───────>│ a rank fetches its rows  │
    │ journal, spill files      │        └──────────────────────────┘        └──────────────────────────┘
    └───────────────────────────┘

TransferQueue alone delivers rows at most once: a consumer that dies loses its rows, a full queue raises, and
its contents are lost when it dies. So claims, writes and acks are decided by the same ledger as in the
embedded plane, and every column is in the run directory before `put` returns. The queue only transports
columns: it holds copies, which count against `max_bytes`, and columns that it lacks are read from disk.

A remote process that makes rows writes their columns itself, into the run directory and the queue
(`transfer_queue/writer.py`), and announces them; `adopt` records the announcement in the ledger.

Claims wait on the ledger's events, never in TransferQueue, whose own `fetch` has to be polled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import transfer_queue

from understudy.dataplane.base import Lease, Retain, RowStatus
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.frame import SpillRef, decode
from understudy.dataplane.journal.folder_lock import FolderLock
from understudy.dataplane.memory.store import Store
from understudy.dataplane.transfer_queue.link import QueueAddress, QueueLink
from understudy.dataplane.transfer_queue.segments import WriterSegments, WrittenRow
from understudy.dataplane.transfer_queue.store import INLINE_BYTES, QueueIntake, QueueStore
from understudy.dataplane.transfer_queue.uploads import TIMEOUT_S, QueueUploads
from understudy.dataplane.transfer_queue.write_ids import row_of
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged


class TransferQueueDataPlane(EmbeddedDataPlane):
    """An `EmbeddedDataPlane` whose large columns are also in TransferQueue. Runs on the trainer's event
    loop."""

    store_kind: ClassVar[type[Store]] = QueueStore
    _store: QueueStore

    def __init__(self, store: Store, lock: FolderLock) -> None:
        super().__init__(store, lock)
        assert isinstance(store, QueueStore)
        self._intake: QueueIntake = QueueIntake(store)

    @classmethod
    def open_on(
        cls,
        link: QueueLink,
        path: Path,
        *,
        max_rows: int,
        max_bytes: int,
        spill_bytes: int | None = None,
        inline_bytes: int = INLINE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        retain: Retain = Retain.UNTIL_SETTLED,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Open or create the plane in folder `path`; columns go through `link`, which the caller closes.

        `max_bytes` bounds what the queue and the ledger hold together. Columns beyond it, those of
        `spill_bytes` or more, and those written before a restart are read from the folder. Cells below
        `inline_bytes` stay in the ledger. A queue that does not answer within `timeout_s` seconds is given up;
        no row is lost by that.
        """
        plane = cls.open(
            path, max_rows=max_rows, max_bytes=max_bytes, spill_bytes=inline_bytes, clock=clock, retain=retain
        )
        plane._store.inline_bytes = inline_bytes
        plane._store.disk_bytes = math.inf if spill_bytes is None else spill_bytes
        plane._store.uploads = QueueUploads(link, timeout_s)
        return plane

    @property
    def uploads(self) -> QueueUploads:
        assert self._store.uploads is not None
        return self._store.uploads

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        rows, names = self._wanted(meta, fields)
        store = self._store
        in_queue = [
            name for name in names if rows and all(store.is_best_read_there(row, name) for row in rows)
        ]
        marks = store.marks(rows, in_queue)
        found = await self.uploads.get(meta.partition, meta.keys, in_queue, marks) if in_queue else None
        if not found:
            return await super().get(meta, names)
        rest = [name for name in names if name not in found]
        others = await super().get(meta, rest) if rest else {}
        return {name: found[name] if name in found else others[name] for name in names}

    async def hand_over(self, meta: BatchMeta, fields: Sequence[str]) -> BatchMeta:
        """The meta of these rows for a remote `QueueReader`; columns that the queue lacks are uploaded
        first."""
        rows, _ = self._wanted(meta, fields)
        store, part = self._store, self._part(meta.partition)
        frames: dict[str, dict[str, bytes]] = {row.key: {} for row in rows}
        for name in fields:
            lacking = [row for row in rows if not store.is_shelved(row, name)]
            for row, frame in zip(lacking, await store.frames(lacking, name), strict=True):
                frames[row.key][name] = frame
        frames = {key: columns for key, columns in frames.items() if columns}
        if frames:
            store.uploading(part, frames)
            try:
                arrived = await self.uploads.put(meta.partition, frames)
            finally:
                store.uploaded(part, frames)
            if not arrived:
                raise DataPlaneError(
                    f"TransferQueue is lost ({self.uploads.lost}); read rows from the plane itself"
                )
            for key, columns in frames.items():
                if key in part.rows:
                    new = [name for name in columns if not store.is_shelved(part.rows[key], name)]
                    store.shelve(part, part.rows[key], dict.fromkeys(new, 0))
        marks = store.marks(rows, fields)
        return BatchMeta(meta.partition, meta.keys, tuple(fields), meta.tags, meta.extra, marks)

    # ---- rows whose columns other processes write

    @property
    def writer_segments(self) -> WriterSegments:
        """The spill segment that each remote writer appends to."""
        return self._store.writer_segments

    async def adopt(
        self,
        partition: str,
        rows: Mapping[str, WrittenRow],
        tags: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        status: RowStatus = RowStatus.FINISHED,
        lease: Lease | None = None,
    ) -> BatchMeta:
        """`put` for rows whose columns a remote process has written; they become part of the ledger here."""
        self._store.check()
        return await self._intake.adopt(partition, rows, tags, status, lease)

    async def cells(self, written: WrittenRow) -> dict[str, Any]:
        """Columns that a remote process has written, adopted or not, read from the run directory."""
        spill = self._store.spill
        return await asyncio.to_thread(
            lambda: {
                name: decode(spill.read(cell) if isinstance(cell, SpillRef) else cell)
                for name, cell in written.cells.items()
            }
        )

    async def clear_orphans(self) -> int:
        """Remove from the queue what dead or late writers left there; returns how many copies of rows."""
        found = 0
        for name, part in list(self._store.partitions.items()):
            known = await self.uploads.keys(name)
            gone = self._store.orphans(part, known)
            self.uploads.clear(name, gone)
            found += len(gone)
        return found

    async def settle(self, step: int) -> None:
        self._store.writer_segments.roll()
        await super().settle(step)
        await self.clear_orphans()

    # ---- TransferQueue's own names for rows (meta.py)

    def partition_of(self, partition_id: str) -> str:
        return self.uploads.link.partition_of(partition_id)

    async def keys_of(self, global_indexes: Sequence[int], partition_id: str) -> tuple[str, ...]:
        return tuple(row_of(name) for name in await self.uploads.link.keys_of(global_indexes, partition_id))

    async def columnar(self, meta: BatchMeta) -> transfer_queue.BatchMeta:
        return await self.uploads.link.columnar(meta.partition, self._queue_keys(meta))

    def keyed(self, meta: BatchMeta) -> transfer_queue.KVBatchMeta:
        """These rows for code that uses TransferQueue: `tq.kv_batch_get_by_meta(plane.keyed(lease.meta))`."""
        return transfer_queue.KVBatchMeta(
            keys=self._queue_keys(meta),
            tags=[dict(tags) for tags in meta.tags] or [{} for _ in meta.keys],
            partition_id=self.uploads.link.partition_id(meta.partition),
            fields=list(meta.fields),
            extra_info=dict(meta.extra),
        )

    def _queue_keys(self, meta: BatchMeta) -> list[str]:
        rows = self._part(meta.partition).rows
        return [
            self._store.queue_key(rows[key], meta.fields or tuple(rows[key].columns)) if key in rows else key
            for key in meta.keys
        ]

    async def close(self) -> None:
        """Clears this run's rows from the queue and closes the plane."""
        try:
            self._store.forget_all()
            for name in list(self._store.partitions):
                self.uploads.clear(name, await self.uploads.keys(name))
            await self.uploads.drain()
        finally:
            await super().close()


class QueueReader:
    """Reads columns of rows in a remote process, such as a rank. It needs the meta and the address, but no
    Ray."""

    def __init__(self, address: QueueAddress, *, prefix: str = "") -> None:
        self._link = QueueLink.connect(address, prefix=prefix)
        self.bytes_got = 0

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        names = tuple(fields or meta.fields)
        if not meta.keys or not names:
            return {}
        found = await self._link.get(meta.partition, meta.keys, names, meta.marks)
        if found is None:
            raise DataPlaneError(
                f"TransferQueue lacks columns {', '.join(names)} of rows {meta.keys[0]} …: `hand_over` uploads them, and "
                "they stay until the rows are acked"
            )
        self.bytes_got += sum(column.values.nbytes for column in found.values() if isinstance(column, Jagged))
        return found

    def close(self) -> None:
        self._link.close()
