"""The embedded data plane: memory in the trainer's process, a crash-safe journal in the run directory.

    plane = EmbeddedDataPlane.open(run / "dataplane", max_rows=65536, max_bytes=2**31, spill_bytes=2**20)
    await plane.issue("train", keys, step=7, group=GroupPolicy.TRAIN_REST)
    await plane.put("train", {key: {"tokens": tokens, "loss_mask": mask}}, tags={key: {"reward": 1.0}})
    await plane.put("train", {key: {"teacher_logprobs": scores}})
    lease = await plane.claim("train", 256, fields=("tokens", "teacher_logprobs"), order=Order.KEY)
    columns = await plane.get(lease.meta)
    await plane.ack(lease, step=7)

Every operation changes memory at once, on the event loop, and then waits for the commit that holds the
change. A row can therefore be claimed before its `put` returns. That is safe: commits keep the order of
calls, so the row's ack is never on disk without the row. Files in the folder: `journal.sqlite`, `spill/`,
`dead_letters.jsonl`, `lock`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from understudy.dataplane.base import (
    Columns,
    Count,
    Depth,
    GroupPolicy,
    Lease,
    Order,
    Retain,
    RowInfo,
    RowStatus,
    Where,
)
from understudy.dataplane.columns import gather
from understudy.dataplane.dead_letters import GROUP_LOST, DeadLetters, detail
from understudy.dataplane.groups import GroupFilter
from understudy.dataplane.journal import rewind as journal_rewind
from understudy.dataplane.journal.folder_lock import FolderLock
from understudy.dataplane.journal.journal import Journal
from understudy.dataplane.journal.schema import read_meta, write_meta
from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.memory.admission import Admission
from understudy.dataplane.memory.claim_view import ClaimRequest, ViewSpec
from understudy.dataplane.memory.claims import Claims
from understudy.dataplane.memory.intake import Intake
from understudy.dataplane.memory.loading import Loaded, load
from understudy.dataplane.memory.partition import Partition
from understudy.dataplane.memory.rows import Leases, StoredRow
from understudy.dataplane.memory.store import Store
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged


class EmbeddedDataPlane:
    """Implements `DataPlane` over a `Store`. All methods run on one event loop, in the process that
    trains."""

    store_kind: ClassVar[type[Store]] = Store

    def __init__(self, store: Store, lock: FolderLock) -> None:
        self._store = store
        self._lock = lock
        self._claims = Claims(store)
        self._intake = Intake(store)
        store.journal.on_failure = self._refuse

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        max_rows: int,
        max_bytes: int,
        spill_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        retain: Retain = Retain.UNTIL_SETTLED,
    ) -> Self:
        """Open or create the plane in folder `path`. Rows are restored from its journal; leases are not.

        `max_rows` and `max_bytes` bound what is in flight (see memory/admission.py). Columns of `spill_bytes`
        or more are kept on disk from the start. `clock` times the leases.
        """
        admission = Admission(max_rows, max_bytes)
        with ExitStack() as opened:
            lock = FolderLock(path)
            opened.callback(lock.release)
            spill = SpillFiles(path / "spill")
            opened.callback(spill.close)
            journal = Journal(path, spill)
            opened.callback(journal.abandon)
            connection = journal.writer.connection
            try:
                write_meta(connection, "epoch", read_meta(connection, "epoch", 0) + 1)
            except sqlite3.OperationalError as error:
                raise journal.writer.failed("written", error) from error
            store = cls.store_kind(
                journal=journal,
                spill=spill,
                admission=admission,
                leases=Leases(clock),
                dead_letters=DeadLetters(path),
                spill_bytes=spill_bytes,
                retain=retain,
            )
            store.install(load(connection, spill, admission))
            journal.writer.sweep(spill.segment)
            opened.pop_all()
        return cls(store, lock)

    # ---- making rows

    async def issue(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        step: int,
        group: GroupPolicy | None = None,
        tags: Mapping[str, Mapping[str, Any]] | None = None,
        reserved: bool = False,
    ) -> tuple[str, ...]:
        self._store.check()
        return await self._intake.issue(partition, keys, step, group, tags, reserved)

    def put(
        self,
        partition: str,
        rows: Mapping[str, Columns],
        tags: Mapping[str, Mapping[str, Any]] | None = None,
        lease: Lease | None = None,
        *,
        status: RowStatus = RowStatus.FINISHED,
    ) -> Coroutine[Any, Any, BatchMeta]:
        return self._intake.put(partition, rows, tags, lease, status)

    async def put_tags(self, partition: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
        self._store.check()
        await self._intake.put_tags(partition, tags)

    def filter_groups(self, partition: str, group_filter: GroupFilter | None) -> None:
        """Apply this filter to every group of the partition when it is complete; see `GroupFilter`."""
        self._part(partition).filter = group_filter

    # ---- handing rows out

    async def claim(
        self,
        partition: str,
        n: int,
        *,
        fields: Sequence[str] = (),
        without: Sequence[str] = (),
        where: Where | None = None,
        step: int | None = None,
        order: Order = Order.ARRIVAL,
        status: RowStatus = RowStatus.FINISHED,
        count: Count = Count.ROWS,
        at_least: int | None = None,
        timeout: float | None = None,
        lease_seconds: float | None = 600.0,
    ) -> Lease:
        part = self._part(partition)
        least = n if at_least is None else at_least
        if not 1 <= least <= n:
            raise DataPlaneError(f"a claim of n={n}, at_least={least}: ask for 1 ≤ at_least ≤ n")
        if status == RowStatus.RUNNING:
            raise DataPlaneError(
                "rows with status running belong to another claim; claim pending, finished or failed"
            )
        # Plain strings are accepted. Enum members, the common case, skip the lookup.
        wanted = status if type(status) is RowStatus else RowStatus(status)
        sequence = order if type(order) is Order else Order(order)
        kind = count if type(count) is Count else Count(count)
        view = part.view(ViewSpec.of(wanted, fields, without, where, step, sequence))
        lease = self._claims.claim_now(part, view, n, least, kind, lease_seconds)
        if lease is None:
            request = ClaimRequest(n, least, kind, lease_seconds)
            lease = await self._claims.wait_in_line(part, view, request, timeout)
        if wanted is not RowStatus.FINISHED:
            await self._claims.record(lease)
        return lease

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        rows, names = self._wanted(meta, fields)
        columns: dict[str, Jagged | list[Any]] = {}
        for name in names:
            frames = await self._store.frames(rows, name)
            if sum(map(len, frames)) > 2**20:
                columns[name] = await asyncio.to_thread(gather, name, frames, meta.keys)
            else:
                columns[name] = gather(name, frames, meta.keys)
        return columns

    def _wanted(self, meta: BatchMeta, fields: Sequence[str] | None) -> tuple[list[StoredRow], Sequence[str]]:
        """The rows of a `get`, and the columns: those requested, or those the meta names, or those all rows
        have."""
        part = self._part(meta.partition)
        rows = [self._store.row(part, key) for key in meta.keys]
        if fields is None:
            names: Sequence[str] = meta.fields or [
                name for name in (rows[0].columns if rows else ()) if all(name in row.columns for row in rows)
            ]
        else:
            names = fields
        for name in names:
            lacking = [row.key for row in rows if name not in row.columns]
            if lacking:
                raise DataPlaneError(
                    f"column {name!r} is missing on {len(lacking)} of {len(rows)} rows ({lacking[0]} …), "
                    f"which has {', '.join(part.rows[lacking[0]].columns) or 'no columns'}; claim with fields=({name!r},)"
                )
        return rows, names

    async def ack(self, lease: Lease, step: int, keys: Sequence[str] | None = None) -> None:
        store = self._store
        store.check()
        store.expire()
        held = store.leases.check(lease, keys)
        if held.produces:
            raise DataPlaneError(
                f"lease {lease.id} is for making rows: `put` them with it, then claim them finished"
            )
        rows = list(held.rows.values()) if keys is None else [held.rows[key] for key in dict.fromkeys(keys)]
        store.mark_trained(store.partitions[lease.meta.partition], rows, step)
        if step > store.last_step:
            store.last_step = step
        await store.journal.durable()

    async def release(self, lease: Lease, keys: Sequence[str] | None = None) -> None:
        self._store.check()
        self._store.expire()
        held = self._store.leases.check(lease, keys)
        for key in list(held.rows) if keys is None else dict.fromkeys(keys):
            self._store.give_back(held.rows[key])

    async def renew(self, lease: Lease, lease_seconds: float | None = 600.0) -> Lease:
        self._store.check()
        self._store.expire()
        held = self._store.leases.check(lease)
        self._store.leases.renew(held, lease_seconds)
        return Lease(lease.meta, lease.id, lease.epoch, held.expires)

    # ---- taking rows out

    async def dead_letter(
        self, partition: str, key: str, reason: str, evidence: Mapping[str, Any] | None = None
    ) -> None:
        part, store = self._part(partition), self._store
        row = self._store.row(part, key)
        group = row.group
        store.take_out(part, [row], "dead", detail(reason, evidence))
        if group is not None and group.policy is GroupPolicy.DROP_GROUP:
            store.take_out(part, list(group.members), "evicted", detail(f"{GROUP_LOST} {key}: {reason}"))
        elif group is not None and group.rows:
            store.filter_complete(part, list(group.members)[:1])
        await store.journal.durable()

    async def evict(
        self, partition: str, keys: Sequence[str], reason: str, lease: Lease | None = None
    ) -> None:
        part, store = self._part(partition), self._store
        store.expire()
        if lease is not None:
            store.leases.check(lease, keys)
        rows = [store.row(part, key) for key in dict.fromkeys(keys)]
        store.take_out(part, rows, "evicted", detail(reason))
        await store.journal.durable()

    async def clear(self, partition: str, keys: Sequence[str] | None = None) -> None:
        part = self._part(partition)
        gone = list(part.rows) if keys is None else [key for key in keys if key in part.rows]
        if gone:
            await self.evict(partition, gone, "cleared")

    # ---- looking

    async def list(self, partition: str) -> dict[str, RowInfo]:
        self._store.expire()
        return {
            key: RowInfo(
                row.status,
                dict(row.tags),
                tuple(row.columns),
                None if row.group is None else row.group.name,
                row.step,
                row.attempts,
                row.lease is not None,
            )
            for key, row in self._part(partition).rows.items()
        }

    async def depth(
        self,
        partition: str,
        *,
        fields: Sequence[str] = (),
        where: Where | None = None,
        step: int | None = None,
    ) -> Depth:
        self._store.expire()
        return self._claims.depth(self._part(partition), _finished(fields, where, step))

    async def wait(
        self,
        partition: str,
        until: Callable[[Depth], bool],
        *,
        fields: Sequence[str] = (),
        where: Where | None = None,
        step: int | None = None,
        timeout: float | None = None,
    ) -> Depth:
        return await self._claims.wait(self._part(partition), until, _finished(fields, where, step), timeout)

    def take_removed(self, partition: str) -> Mapping[tuple[str, str], int]:
        part = self._part(partition)
        found, part.removed = part.removed, Counter()
        return found

    # ---- checkpoints, start and end

    async def settle(self, step: int) -> None:
        self._store.check()
        journal, segment = self._store.journal, self._store.spill.roll()

        def job(connection: Any) -> None:
            journal_rewind.settle(connection, step)
            journal.writer.sweep(segment)

        await journal.run(job)

    async def rewind(self, step: int, *, keep_rows: bool) -> None:
        self._store.check()
        store = self._store
        await store.journal.run(lambda connection: journal_rewind.check(connection, step))
        self._refuse(DataPlaneError("the plane is being rewound; wait for `rewind` to return"))

        def job(connection: Any) -> Loaded:
            journal_rewind.rewind(connection, step, keep_rows)
            store.admission.reset()
            return load(connection, store.spill, store.admission)

        state = await store.journal.run(job)
        store.install(state)
        self._store.refusal = None

    async def sync(self) -> None:
        self._store.check()
        writer = self._store.journal.writer
        await self._store.journal.run(lambda connection: writer.flush())

    async def close(self) -> None:
        """Commit the open batch and release the folder. Waiting calls fail with `DataPlaneError`."""
        closed = DataPlaneError("the data plane is closed")
        if self._store.refusal is not None and str(self._store.refusal) == str(closed):
            return
        self._refuse(closed)
        # A stack, so that all of this happens even if the last commit fails: the next attempt of this process opens
        # the folder again.
        with ExitStack() as last:
            last.callback(self._lock.release)
            last.callback(self._store.spill.close)
            last.callback(self._store.dead_letters.flush)
            await self._store.journal.close()

    def _refuse(self, error: DataPlaneError) -> None:
        """Fail every waiting call, and every call from now on."""
        self._store.refusal = error
        self._claims.fail(error)
        self._store.admission.fail(error)

    def _part(self, partition: str) -> Partition:
        self._store.check()
        return self._store.partitions[partition]


def _finished(fields: Sequence[str], where: Where | None, step: int | None) -> ViewSpec:
    return ViewSpec.of(RowStatus.FINISHED, fields, (), where, step)
