"""The state of an embedded plane and its mutations, each in memory and in the open journal batch.

Nothing here waits, except reads of spilled columns. Callers (embedded.py, claims.py, intake.py) check leases
and await the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from understudy.dataplane.base import GroupPolicy, Retain, RowStatus
from understudy.dataplane.dead_letters import DeadLetters, detail, kind_of_reason
from understudy.dataplane.frame import SpillRef, pack
from understudy.dataplane.journal.journal import Journal
from understudy.dataplane.journal.schema import PACK_SHIFT
from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.memory.admission import Admission
from understudy.dataplane.memory.claim_view import View
from understudy.dataplane.memory.loading import Loaded
from understudy.dataplane.memory.partition import Partition, Partitions
from understudy.dataplane.memory.rows import HeldLease, Leases, StoredRow
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.prompt import split_key


class Store:
    """All partitions, leases and counters of one plane. Used on the event loop."""

    def __init__(
        self,
        *,
        journal: Journal,
        spill: SpillFiles,
        admission: Admission,
        leases: Leases,
        dead_letters: DeadLetters,
        spill_bytes: int,
        retain: Retain,
    ) -> None:
        self.journal = journal
        self.spill = spill
        self.admission = admission
        self.leases = leases
        self.dead_letters = dead_letters
        self.partitions = Partitions()
        self.last_step = 0
        self.on_change: Callable[[Partition], None] = lambda partition: None
        self.refusal: DataPlaneError | None = None
        """The error that every call raises once the plane refuses work."""
        self._spill_bytes = spill_bytes
        self._retain = retain
        self._spilling: dict[SpillRef, bytes] = {}
        """Spill frames that are not committed yet; reads are served from here."""
        self._next_id = 1
        self._next_arrival = 1

    def check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def install(self, state: Loaded) -> None:
        """Replace the state with what was loaded from the journal; group filters stay."""
        filters = {name: partition.filter for name, partition in self.partitions.items()}
        self.partitions = state.partitions
        for name, group_filter in filters.items():
            self.partitions[name].filter = group_filter
        self.last_step = state.last_step
        self._next_id = max(self._next_id, state.next_id)
        self._next_arrival = max(self._next_arrival, state.next_arrival)
        self.leases.void_all(state.epoch)
        self.dead_letters.rewrite(state.dead)

    def row(self, part: Partition, key: str) -> StoredRow:
        row = part.rows.get(key)
        if row is None:
            where = f"row {key} is not in flight in partition {part.name!r}"
            if self.is_settled(part, key):
                raise LeaseLost(f"{where}: it was settled already (trained, dead-lettered or evicted)")
            raise DataPlaneError(f"{where}: it was never issued")
        return row

    def issue(
        self,
        part: Partition,
        key: str,
        step: int,
        tags: Mapping[str, Any] | None,
        group: GroupPolicy | None,
        status: RowStatus = RowStatus.PENDING,
    ) -> StoredRow:
        """Add a new row that was admitted before; the caller calls `touch` once its columns are set."""
        row = StoredRow(self._next_id, part.name, key, step, dict(tags) if tags else {}, status)
        self._next_id += 1
        part.add(row)
        if group is not None:
            part.join(row, row.sort[0], group)
        changes = self.journal.changes
        changes.dirty[row.id] = row
        changes.facts["issued", part.name, step, None].append(key)
        return row

    def arrive(self, part: Partition, key: str, frames: dict[str, bytes], status: RowStatus) -> StoredRow:
        """`issue` and `write` in one, for a row that was not issued: it belongs to the step after the last
        acked one."""
        row_id = self._next_id
        self._next_id = row_id + 1
        step = self.last_step + 1
        arrival = 0
        if status is RowStatus.FINISHED:
            arrival = self._next_arrival
            self._next_arrival = arrival + 1
        pack_id = row_id << PACK_SHIFT
        columns, resident = self._keep(pack_id, frames)
        row = StoredRow(row_id, part.name, key, step, {}, status, columns, arrival, 1, resident)
        part.add(row)
        changes = self.journal.changes
        changes.dirty[row_id] = row
        changes.packs += (pack_id, pack(columns))
        changes.facts["issued", part.name, step, None].append(key)
        return row

    def is_settled(self, part: Partition, key: str) -> bool:
        """Whether a row that is not in flight was settled. A further output counts as settled together with
        the first output of its session: it is too late and must not be issued as a new row."""
        if key in part.settled:
            return True
        if key.endswith("_0"):
            return False
        prompt, session, index = split_key(key)
        return index > 0 and f"{prompt}_{session}_0" in part.settled

    def sibling(self, part: Partition, key: str) -> StoredRow | None:
        """The first output of the same session: further outputs belong to its step and its group."""
        prompt, session, index = split_key(key)
        return part.rows.get(f"{prompt}_{session}_0") if index > 0 else None

    def touch(self, part: Partition, rows: list[StoredRow]) -> None:
        """Mark these rows as changed, so that views and waiting claims see them."""
        part.touch(rows)
        if part.claims_waiting or part.watches:
            self.on_change(part)

    def tag(self, row: StoredRow, tags: Mapping[str, Any]) -> None:
        row.tags.update(tags)
        self.journal.changes.dirty[row.id] = row

    def write(self, part: Partition, row: StoredRow, frames: dict[str, bytes], status: RowStatus) -> None:
        """Add or replace columns of a row, and set its status."""
        changes = self.journal.changes
        columns = row.columns
        if columns:
            for name in frames:
                before = columns.get(name)
                if isinstance(before, bytes):
                    row.resident -= len(before)
                    self.admission.leave(0, len(before))
        pack_id = (row.id << PACK_SHIFT) + row.packs
        row.packs += 1
        cells, resident = self._keep(pack_id, frames)
        row.resident += resident
        columns.update(cells)
        changes.packs += (pack_id, pack(cells))  # one flat list: `Changes.packs`
        self._set_status(part, row, status)

    def _set_status(self, part: Partition, row: StoredRow, status: RowStatus) -> None:
        """After a write. A row gets its place in order of arrival when it is first finished."""
        dirty = self.journal.changes.dirty
        if row.status is not status:
            part.set_status(row, status)
            dirty[row.id] = row
        if row.arrival == 0 and status is RowStatus.FINISHED:
            row.arrival = self._next_arrival
            self._next_arrival += 1
            dirty[row.id] = row

    def _keep(self, pack_id: int, frames: dict[str, bytes]) -> tuple[dict[str, bytes | SpillRef], int]:
        """Frames that are large, or that do not fit into memory, replaced by spill references; and the bytes
        that stay in memory."""
        size = 0
        for frame in frames.values():
            size += len(frame)
        if size < self._spill_bytes and self.admission.hold(size):
            return frames, size  # type: ignore[return-value]  # made for this call, holds bytes only
        changes = self.journal.changes
        cells: dict[str, bytes | SpillRef] = {}
        resident = 0
        for name, frame in frames.items():
            if len(frame) < self._spill_bytes and self.admission.hold(len(frame)):
                resident += len(frame)
                cells[name] = frame
            else:
                ref = cells[name] = self.spill.reserve(frame)
                self._spilling[ref] = frame
                changes.spills.append((pack_id, ref, frame))
                changes.then.append(partial(self._on_disk, ref))
        return cells, resident

    def _on_disk(self, ref: SpillRef) -> None:
        del self._spilling[ref]

    def drop_lease(self, part: Partition, row: StoredRow) -> None:
        if row.lease is not None:
            part.leased -= 1
            self.leases.drop(row)

    def grant(self, part: Partition, view: View, rows: list[StoredRow], seconds: float | None) -> HeldLease:
        """Grant a lease on rows just taken from this view of the partition."""
        produces = view.spec.status is not RowStatus.FINISHED
        if produces:
            for row in rows:
                part.set_status(row, RowStatus.RUNNING)
                row.attempts += 1
                self.journal.changes.dirty[row.id] = row
        held = self.leases.grant(rows, seconds, produces)
        part.leased += len(rows)
        part.touch(rows, but=view)
        return held

    def give_back(self, row: StoredRow) -> None:
        """Release a leased row for the next claim; a row that was being made becomes pending again."""
        part = self.partitions[row.partition]
        produces = row.lease is not None and row.lease.produces
        self.drop_lease(part, row)
        if produces and row.status is RowStatus.RUNNING:
            part.set_status(row, RowStatus.PENDING)
        part.touch((row,))
        self.on_change(part)

    def mark_trained(self, part: Partition, rows: list[StoredRow], step: int) -> None:
        """Remove rows as trained in `step`."""
        changes = self.journal.changes
        keys = changes.facts["trained", part.name, step, None]
        ids = changes.trained.setdefault(step, [])
        for row in rows:
            keys.append(row.key)
            ids.append(row.id)
        if self._retain is Retain.UNTIL_ACK:
            changes.packs_gone += [row.id for row in rows]
            self._note_spills(rows)
        self._remove(part, rows)

    def take_out(self, part: Partition, rows: list[StoredRow], kind: str, reason: str) -> None:
        """Remove rows as dead or evicted."""
        changes = self.journal.changes
        part.removed[kind, kind_of_reason(reason)] += len(rows)
        for row in rows:
            changes.facts[kind, part.name, row.step, reason].append(row.key)
            changes.rows_gone.append(row.id)
            if kind == "dead":
                changes.then.append(partial(self.dead_letters.append, part.name, row.key, row.step, reason))
        self._note_spills(rows)
        self._remove(part, rows)

    def _note_spills(self, rows: list[StoredRow]) -> None:
        if any(SpillRef in map(type, row.columns.values()) for row in rows):
            self.journal.changes.spills_gone = True

    def _remove(self, part: Partition, rows: list[StoredRow]) -> None:
        size = 0
        listed: list[StoredRow] = []
        for row in rows:
            lease = row.lease
            if lease is not None:
                part.leased -= 1
                self.leases.drop(row)
            if (
                lease is None
                or lease.produces
                or row.status is not RowStatus.FINISHED
                or row.group is not None
            ):
                listed.append(row)  # the other rows left all views when they were leased
            row.gone = True
            size += row.resident
        part.remove(rows, listed)
        self.admission.leave(len(rows), size)
        self.admission.serve()
        if part.claims_waiting or part.watches:
            self.on_change(part)

    def filter_complete(self, part: Partition, rows: Iterable[StoredRow]) -> None:
        """Apply the filter to the groups of these rows that are complete, and evict those it gives a reason
        for."""
        rule = part.filter
        if rule is None:
            return
        for group in {row.group for row in rows if row.group is not None and row.key in part.rows}:
            members = sorted(group.members, key=lambda member: member.sort)
            if any(
                member.status is not RowStatus.FINISHED or rule.tag not in member.tags for member in members
            ):
                continue
            reason = rule.rule([member.tags[rule.tag] for member in members])
            if reason is not None:
                self.take_out(part, members, "evicted", detail(reason))

    def expire(self) -> None:
        """Release the rows of expired leases."""
        leases = self.leases
        if leases.clock() < leases.first_end:
            return
        for held in leases.due():
            for row in list(held.rows.values()):
                self.give_back(row)

    async def frames(self, rows: list[StoredRow], name: str) -> list[bytes]:
        """One column's frames; spilled ones are read on a thread."""
        cells = [row.columns[name] for row in rows]
        if SpillRef not in map(type, cells):
            return cells  # type: ignore[return-value]
        here = [self._spilling.get(cell, cell) if isinstance(cell, SpillRef) else cell for cell in cells]
        return await asyncio.to_thread(
            lambda: [self.spill.read(cell) if isinstance(cell, SpillRef) else cell for cell in here]
        )
