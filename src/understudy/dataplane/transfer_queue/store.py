"""The cluster plane's `Store` and `Intake`, which track the columns that are also in TransferQueue.

A large column is in the run directory (a spill file, as in the embedded plane) and, while memory allows, also
in TransferQueue. `_shelved` records which columns are there and counts them against `max_bytes`. Small cells
stay in the ledger. A column is read from the queue only while it is shelved; if the queue fails, or an upload
is refused, the copy in the run directory is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from understudy.dataplane.base import Columns, Lease, RowStatus
from understudy.dataplane.frame import SpillRef, pack
from understudy.dataplane.journal.schema import PACK_SHIFT
from understudy.dataplane.memory.intake import Frames, Intake, Tags, checked_tags, framed, shared_columns
from understudy.dataplane.memory.loading import Loaded
from understudy.dataplane.memory.partition import Partition
from understudy.dataplane.memory.rows import StoredRow
from understudy.dataplane.memory.store import Store
from understudy.dataplane.transfer_queue.segments import WriterSegments, WrittenRow
from understudy.dataplane.transfer_queue.uploads import QueueUploads
from understudy.dataplane.transfer_queue.write_ids import queue_key, row_of
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta
from understudy.types.prompt import split_key

INLINE_BYTES = 512
"""Default of `inline_bytes`: cells below this size stay in the ledger."""
Held = dict[str, dict[str, int]]
"""By key and column to be uploaded: bytes counted against `max_bytes`."""


class QueueStore(Store):
    """A `Store` that tracks what is in the queue (`uploads`); without a queue it behaves like `Store`."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.uploads: QueueUploads | None = None
        self.inline_bytes = INLINE_BYTES
        self.disk_bytes: float = math.inf
        """Columns of this size or more are on disk only."""
        self._shelved: dict[int, dict[str, int]] = {}
        """By row id: columns that can be read from the queue, with the bytes counted for each."""
        self._marks: dict[int, dict[str, str]] = {}
        """By row id: the write id of columns that are in the queue under another name than the row's key."""
        self._uploaded: dict[str, dict[str, set[str]]] = {}
        """By partition and key: every name the queue may hold for a row, whether or not the upload
        succeeded."""
        self._on_the_way: Counter[tuple[str, str, str]] = Counter()
        """By partition, key and column: uploads in progress."""
        self.writer_segments = WriterSegments(self.spill)
        """The segments of remote writers."""

    def is_shelved(self, row: StoredRow, name: str) -> bool:
        return name in self._shelved.get(row.id, ())

    def is_best_read_there(self, row: StoredRow, name: str) -> bool:
        """Whether the column is in the queue and not also in the ledger's memory."""
        return self._shelved.get(row.id, {}).get(name, 0) > 0

    def marks(self, rows: Sequence[StoredRow], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """By column: the write id of each row's copy in the queue; only columns with any id are listed."""
        write_ids = {name: tuple(self._marks.get(row.id, {}).get(name, "") for row in rows) for name in names}
        return {name: marks for name, marks in write_ids.items() if any(marks)}

    def queue_key(self, row: StoredRow, names: Iterable[str]) -> str:
        """The name of these columns of a row in the queue; raises if they have several."""
        marks = {self._marks.get(row.id, {}).get(name, "") for name in names}
        if len(marks) > 1:
            raise DataPlaneError(
                f"columns {', '.join(names)} of row {row.key} were written by several processes and lie under "
                f"{len(marks)} names in the queue; name the columns of one of them, or read with `hand_over` and `QueueReader`"
            )
        return queue_key(row.key, marks.pop() if marks else "")

    def overwriting(self, part: Partition, frames: Mapping[str, Iterable[str]]) -> None:
        """Call before these columns change: the queue's current copies are no longer read."""
        for key, columns in frames.items():
            row = part.rows.get(key)
            if row is not None and row.id in self._shelved:
                marks = self._marks.get(row.id, {})
                for name in columns:
                    marks.pop(name, None)
                size = sum(self._shelved[row.id].pop(name, 0) for name in columns)
                row.resident -= size
                self.admission.leave(0, size)

    def uploading(self, part: Partition, frames: Mapping[str, Iterable[str]]) -> None:
        """Record the start of an upload: from now on the queue may hold any value in these columns."""
        for key in frames:
            self._known(part.name, key).add(key)
        self._on_the_way.update((part.name, key, name) for key, names in frames.items() for name in names)

    def uploaded(self, part: Partition, frames: Mapping[str, Iterable[str]]) -> None:
        """Record the end of an upload, successful or not."""
        for key, names in frames.items():
            for name in names:
                place = (part.name, key, name)
                self._on_the_way[place] -= 1
                if not self._on_the_way[place]:
                    del self._on_the_way[place]

    def shelve(self, part: Partition, row: StoredRow, sizes: Mapping[str, int]) -> None:
        """Record columns that arrived and whose bytes are counted, except where another upload is replacing
        them."""
        uploads = self._shelved.setdefault(row.id, {})
        for name, size in sizes.items():
            if (part.name, row.key, name) in self._on_the_way:
                self.admission.leave(0, size)
            else:
                uploads[name] = size
                row.resident += size

    def _known(self, partition: str, key: str) -> set[str]:
        return self._uploaded.setdefault(partition, {}).setdefault(key, set())

    def write(
        self, part: Partition, row: StoredRow, frames: dict[str, bytes] | WrittenRow, status: RowStatus
    ) -> None:
        if not isinstance(frames, WrittenRow):
            super().write(part, row, frames, status)
            return
        self._adopt(part, row, frames)
        self._set_status(part, row, status)

    def _adopt(self, part: Partition, row: StoredRow, written: WrittenRow) -> None:
        """Record columns that a remote process wrote into the run directory and perhaps the queue."""
        changes = self.journal.changes
        self.overwriting(part, {row.key: written.cells})
        pack_id = (row.id << PACK_SHIFT) + row.packs
        row.packs += 1
        for name, cell in written.cells.items():
            before = row.columns.get(name)
            if isinstance(before, bytes):
                row.resident -= len(before)
                self.admission.leave(0, len(before))
            if isinstance(cell, SpillRef):
                # Already written: with empty bytes the journal's thread only opens the file, for later
                # flushes.
                changes.spills.append((pack_id, cell, b""))
            else:
                row.resident += len(cell)
                self.admission.resident += len(cell)
        row.columns.update(written.cells)
        changes.packs += (pack_id, pack(written.cells))
        self.writer_segments.noted(written)
        self._shelve_adopted(part, row, written)

    def _shelve_adopted(self, part: Partition, row: StoredRow, written: WrittenRow) -> None:
        """Count the adopted columns that are in the queue; if they exceed `max_bytes`, clear them from the
        queue."""
        if self.uploads is None or self.uploads.lost is not None or not written.queued:
            return
        cells = written.cells
        sizes = {
            name: cell.length if isinstance(cell := cells[name], SpillRef) else 0 for name in written.queued
        }
        if not self.admission.hold(sum(sizes.values())):
            self.reject(part.name, {row.key: written})
            return
        # The name is unique to this write, so other uploads of this row cannot overwrite it.
        self._known(part.name, row.key).add(queue_key(row.key, written.mark))
        self._shelved.setdefault(row.id, {}).update(sizes)
        self._marks.setdefault(row.id, {}).update(dict.fromkeys(sizes, written.mark))
        row.resident += sum(sizes.values())

    def reject(self, partition: str, rows: Mapping[str, WrittenRow]) -> None:
        """Clear copies in the queue that will not be read."""
        if self.uploads is not None:
            self.uploads.clear(
                partition, [queue_key(key, written.mark) for key, written in rows.items() if written.queued]
            )

    def orphans(self, part: Partition, names: Iterable[str]) -> list[str]:
        """Those of the queue's names whose row and session are not in flight: their writer died before it
        announced them, or was too late."""
        return [
            name
            for name in names
            if (key := row_of(name)) not in part.rows
            and "{}_{}_0".format(*split_key(key)[:2]) not in part.rows
        ]

    def forget(self, partition: str, keys: Iterable[str]) -> None:
        """Clear these rows from the queue."""
        known = self._uploaded.get(partition, {})
        gone = [name for key in keys for name in known.pop(key, ())]
        if self.uploads is not None:
            self.uploads.clear(partition, gone)

    def forget_all(self) -> None:
        for partition, keys in self._uploaded.items():
            self.forget(partition, list(keys))
        self._shelved.clear()
        self._marks.clear()

    def _remove(self, part: Partition, rows: list[StoredRow]) -> None:
        super()._remove(part, rows)
        for row in rows:
            self._shelved.pop(row.id, None)
            self._marks.pop(row.id, None)
        self.forget(part.name, [row.key for row in rows])

    def install(self, state: Loaded) -> None:
        self.forget_all()
        super().install(state)


class QueueIntake(Intake):
    """Admits rows, uploads them, then writes them to the ledger unless they were settled meanwhile."""

    def __init__(self, store: QueueStore) -> None:
        super().__init__(store)
        self._queue = store

    async def put(
        self,
        partition: str,
        rows: Mapping[str, Columns],
        tags: Tags | None,
        lease: Lease | None,
        status: RowStatus,
    ) -> BatchMeta:
        store = self._queue
        store.check()
        frames, given = framed(rows), checked_tags(tags)
        part, room = await self._admit(partition, frames, lease)
        store.overwriting(part, frames)
        epoch, held = store.leases.epoch, self._hold(frames)
        try:
            arrived = await self._upload(part, frames, held)
            store.check()
            if store.leases.epoch != epoch:
                raise DataPlaneError("the plane was rewound while these rows were on their way")
            self._check_writer(part, frames, lease)
        except BaseException:
            if store.leases.epoch == epoch and store.refusal is None:
                # Otherwise the plane is closed or rewound, and all counts start anew.
                self._undo(part, frames, held, room)
            raise
        # Again: a remote writer's columns may have been adopted during the upload.
        store.overwriting(part, frames)
        self._write(part, frames, given, status, room)
        for key, sizes in held.items():
            if arrived and key in part.rows:
                store.shelve(part, part.rows[key], sizes)
            else:
                store.admission.leave(0, sum(sizes.values()))
        await store.journal.durable()
        return BatchMeta(partition, tuple(rows), shared_columns(rows.values()))

    async def adopt(
        self,
        partition: str,
        rows: Mapping[str, WrittenRow],
        tags: Tags | None,
        status: RowStatus,
        lease: Lease | None,
    ) -> BatchMeta:
        """`put` of rows whose columns a remote process has written."""
        store, given = self._queue, checked_tags(tags)
        part = store.partitions[partition]
        try:
            room = self._check_writer(part, rows, lease)
            if room:
                await store.admission.admit(room, 0)
                part = store.partitions[partition]
                try:
                    self._check_writer(part, rows, lease)
                except BaseException:
                    store.admission.leave(room)
                    store.admission.serve()
                    raise
        except LeaseLost:
            store.reject(partition, rows)
            raise
        self._write(part, rows, given, status, room)  # type: ignore[arg-type]
        await store.journal.durable()
        return BatchMeta(partition, tuple(rows), shared_columns([one.cells for one in rows.values()]))

    def _hold(self, frames: Frames) -> Held:
        """Choose what to upload and count its bytes; large columns that do not fit go to disk only.

        Small cells stay in the ledger and are uploaded too, for readers that see only the queue.
        """
        uploads, admission = self._queue.uploads, self._queue.admission
        if uploads is None or uploads.lost is not None:
            return {}
        held: Held = {key: {} for key in frames}
        for key, columns in frames.items():
            for name, frame in columns.items():
                if len(frame) < self._queue.inline_bytes:
                    held[key][name] = 0
                elif len(frame) < self._queue.disk_bytes and admission.hold(len(frame)):
                    held[key][name] = len(frame)
        return held

    async def _upload(self, part: Partition, frames: Frames, held: Held) -> bool:
        uploads = self._queue.uploads
        if uploads is None or not any(held.values()):
            return False
        self._queue.uploading(part, held)
        try:
            return await uploads.put(
                part.name,
                {key: {name: frames[key][name] for name in names} for key, names in held.items() if names},
            )
        finally:
            self._queue.uploaded(part, held)

    def _undo(self, part: Partition, frames: Frames, held: Held, room: int) -> None:
        """Revert the counts of rows that were refused after the upload; their copies in the queue are never
        read."""
        admission = self._queue.admission
        self._queue.overwriting(part, frames)
        admission.leave(room, sum(sum(sizes.values()) for sizes in held.values()))
        self._queue.forget(part.name, [key for key in frames if key not in part.rows])
        admission.serve()
