"""Issuing and writing rows: checks leases, waits for admission, then writes to the store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from understudy.dataplane.base import Columns, GroupPolicy, Lease, RowStatus
from understudy.dataplane.frame import encode, is_plain
from understudy.dataplane.memory.partition import Partition
from understudy.dataplane.memory.rows import StoredRow
from understudy.dataplane.memory.store import Store
from understudy.errors import LeaseLost
from understudy.types.batch import BatchMeta

Tags = Mapping[str, Mapping[str, Any]]
Frames = dict[str, dict[str, bytes]]
"""By key and column."""
_NO_TAGS: Tags = {}


class Intake:
    """Implements `issue`, `put` and `put_tags` of the plane, on the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def issue(
        self,
        partition: str,
        keys: Sequence[str],
        step: int,
        group: GroupPolicy | None,
        tags: Tags | None,
        reserved: bool = False,
    ) -> tuple[str, ...]:
        store = self._store
        given = checked_tags(tags)
        new = _unknown(store.partitions[partition], keys)
        if not new:
            return ()
        if reserved:
            store.admission.take(len(new))
        else:
            await store.admission.admit(len(new), 0)
        part = store.partitions[partition]
        still = _unknown(part, new)  # another call may have issued them while this one waited
        store.admission.leave(len(new) - len(still))
        store.touch(part, [store.issue(part, key, step, given.get(key), group) for key in still])
        await store.journal.durable()
        return tuple(still)

    async def put(
        self,
        partition: str,
        rows: Mapping[str, Columns],
        tags: Tags | None,
        lease: Lease | None,
        status: RowStatus,
    ) -> BatchMeta:
        store = self._store
        store.check()
        frames = framed(rows)
        given = checked_tags(tags) if tags else _NO_TAGS
        part = store.partitions[partition]
        room = self._check_writer(part, frames, lease)
        if room and not store.admission.enter_now(room, _size_of_new(part, frames)):
            part, room = await self._admit(partition, frames, lease)
        self._write(part, frames, given, status, room)
        await store.journal.durable()
        return BatchMeta(partition, tuple(rows), shared_columns(rows.values()))

    async def _admit(self, partition: str, frames: Frames, lease: Lease | None) -> tuple[Partition, int]:
        """Check the lease and admit the new rows, waiting if necessary; returns the partition and how
        many."""
        store = self._store
        part = store.partitions[partition]
        room = self._check_writer(part, frames, lease)
        if not room or store.admission.enter_now(room, _size_of_new(part, frames)):
            return part, room
        await store.admission.admit(room, _size_of_new(part, frames))
        part = store.partitions[partition]
        try:
            self._check_writer(part, frames, lease)
        except LeaseLost:
            store.admission.leave(room)
            store.admission.serve()
            raise
        return part, room

    def _write(self, part: Partition, frames: Frames, tags: Tags, status: RowStatus, room: int) -> None:
        """Write to memory and the open journal batch without waiting; `room` new rows were admitted
        before."""
        store = self._store
        written = []
        for key, columns in frames.items():
            row = part.rows.get(key)
            if row is None and room and type(columns) is dict and key.endswith("_0"):
                room -= 1
                row = store.arrive(part, key, columns, status)
                if tags and key in tags:
                    store.tag(row, tags[key])
                written.append(row)
                continue
            if row is None:
                row = self._issue_late(part, key, status)
                if room:
                    room -= 1
                else:
                    store.admission.enter()
            if tags and key in tags:
                store.tag(row, tags[key])
            store.write(part, row, columns, status)
            if row.lease is not None and row.lease.produces and status is not RowStatus.RUNNING:
                store.drop_lease(part, row)
            written.append(row)
        if room:
            store.admission.leave(room)
        store.touch(part, written)
        if part.filter is not None:
            store.filter_complete(part, written)

    def _check_writer(self, part: Partition, keys: Iterable[str], lease: Lease | None) -> int:
        """Raise `LeaseLost` for a late writer or one without the lease; returns how many rows need
        admission."""
        store = self._store
        store.expire()
        if lease is not None:
            store.leases.check(lease, keys)
        new = 0
        for key in keys:
            row = part.rows.get(key)
            if row is None:
                if store.is_settled(part, key):
                    raise LeaseLost(
                        f"row {key} of {part.name!r} was trained, dead-lettered or evicted already; drop this work"
                    )
                if key.endswith("_0") or store.sibling(part, key) is None:
                    new += 1
            elif lease is None and row.lease is not None and row.lease.produces:
                raise LeaseLost(
                    f"row {key} of {part.name!r} is being made under lease {row.lease.id}; write with that lease"
                )
        return new

    def _issue_late(self, part: Partition, key: str, status: RowStatus) -> StoredRow:
        """Issue a row that was put without having been issued: for its session's step if that is in flight, else for the
        next."""
        sibling = None if key.endswith("_0") else self._store.sibling(part, key)
        if sibling is None:
            return self._store.issue(part, key, self._store.last_step + 1, None, None, status)
        policy = None if sibling.group is None else sibling.group.policy
        return self._store.issue(part, key, sibling.step, None, policy, status)

    async def put_tags(self, partition: str, tags: Tags) -> None:
        store = self._store
        given = checked_tags(tags)
        part = store.partitions[partition]
        rows = [store.row(part, key) for key in given]
        for row in rows:
            store.tag(row, given[row.key])
        store.touch(part, rows)
        store.filter_complete(part, rows)
        await store.journal.durable()


def _unknown(part: Partition, keys: Sequence[str]) -> list[str]:
    return [key for key in dict.fromkeys(keys) if key not in part.rows and key not in part.settled]


def _size_of_new(part: Partition, frames: Frames) -> int:
    size = 0
    for key, columns in frames.items():
        if key not in part.rows:
            for frame in columns.values():
                size += len(frame)
    return size


def framed(rows: Mapping[str, Columns]) -> Frames:
    frames: Frames = {}
    for key, columns in rows.items():
        cells = frames[key] = {}
        for name, cell in columns.items():
            cells[name] = encode(name, cell)
    return frames


def checked_tags(tags: Tags | None) -> Tags:
    """Raise now for tags that JSON cannot encode, instead of in a commit that carries other rows too."""
    for key, row_tags in (tags or {}).items():
        if not is_plain(row_tags):
            encode(f"tags of {key}", dict(row_tags))
    return tags or {}


def shared_columns(rows: Collection[Columns]) -> tuple[str, ...]:
    """The columns written to every row, in the order of the first."""
    if len(rows) == 1:
        (only,) = rows
        return tuple(only)
    first, *others = rows or [{}]
    shared = tuple(first)
    for columns in others:
        if first.keys() != columns.keys():
            shared = tuple(name for name in shared if name in columns)
    return shared
