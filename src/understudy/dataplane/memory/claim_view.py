"""Views: ordered indexes of the rows that can be claimed, one per kind of claim, updated incrementally.

A claim names a status, columns, tags and an order. The first claim of a kind builds its view from all rows.
After that, the partition marks changed rows in `changed`, and the next use of the view checks each of them
once, however often it changed. Taking n rows costs O(n) when rows arrived in order, O(n log rows) at most. No
claim scans all rows.

Stale entries are not searched for and removed: `_members` holds the one valid entry of each unit, and any
other is skipped when it comes up. The order is rebuilt when more than half of its entries are stale.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from understudy.dataplane.base import Count, Lease, Order, RowStatus, Where
from understudy.dataplane.memory.in_order import InOrder
from understudy.dataplane.memory.rows import SortKey, StoredRow, Unit
from understudy.errors import DataPlaneError


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """Which rows a claim accepts, and in which order."""

    status: RowStatus
    fields: tuple[str, ...]
    without: tuple[str, ...]
    where: tuple[tuple[str, frozenset[Any]], ...]
    step: int | None
    order: Order

    @staticmethod
    def of(
        status: RowStatus,
        fields: Iterable[str] = (),
        without: Iterable[str] = (),
        where: Where | None = None,
        step: int | None = None,
        order: Order = Order.ARRIVAL,
    ) -> ViewSpec:
        if not where:
            return _plain_spec(status, tuple(fields), tuple(without), step, order)
        try:
            wanted = tuple(
                (
                    tag,
                    frozenset(value)
                    if isinstance(value, list | tuple | set | frozenset)
                    else frozenset((value,)),
                )
                for tag, value in sorted(where.items())
            )
        except TypeError:
            raise DataPlaneError(
                f"where={where!r}: tags are compared with plain values or lists of them"
            ) from None
        return ViewSpec(status, tuple(sorted(set(fields))), tuple(sorted(set(without))), wanted, step, order)

    def accepts(self, row: StoredRow) -> bool:
        """Whether this row can be claimed now."""
        if row.lease is not None or row.status is not self.status or row.gone:
            return False
        if self.step is not None and row.step != self.step:
            return False
        columns = row.columns
        for name in self.fields:
            if name not in columns:
                return False
        for name in self.without:
            if name in columns:
                return False
        return not self.where or all(row.tags.get(tag) in wanted for tag, wanted in self.where)

    def awaits(self, row: StoredRow) -> bool:
        """Whether the row can still become claimable without a lease being released. Claims in key order wait
        for it."""
        if row.gone or (row.lease is not None and row.status is not RowStatus.RUNNING):
            return False
        if self.step is not None and row.step != self.step:
            return False
        if any(name in row.columns for name in self.without):
            return False
        done = row.status is RowStatus.FINISHED
        return all(
            row.tags.get(tag) in wanted or (not done and tag not in row.tags) for tag, wanted in self.where
        )


@lru_cache(maxsize=256)
def _plain_spec(
    status: RowStatus, fields: tuple[str, ...], without: tuple[str, ...], step: int | None, order: Order
) -> ViewSpec:
    return ViewSpec(status, tuple(sorted(set(fields))), tuple(sorted(set(without))), (), step, order)


@dataclass(slots=True)
class ClaimRequest:
    n: int
    at_least: int
    count: Count
    lease_seconds: float | None
    answer: asyncio.Future[Lease] | None = None
    """Set when the claim has to wait."""


Entry = tuple[SortKey | int, int, Unit]
"""(sort value, id to break ties, unit)."""


class View:
    """The index of one `ViewSpec`. In key order of finished rows (`_strict`) the members are all units that
    may become ready; otherwise only those ready now. Used on the event loop."""

    def __init__(self, spec: ViewSpec, units: Iterable[Unit]) -> None:
        self.spec = spec
        self.changed: dict[Unit, None] = {}
        """Units that were added, removed or changed since the view was last used."""
        self.line: deque[ClaimRequest] = deque()
        """Waiting claims in FIFO order: a large claim is not starved by small ones."""
        self._by_key = spec.order is Order.KEY
        self._strict = self._by_key and spec.status is RowStatus.FINISHED
        self._ready: dict[Unit, int] = {}
        """Units that can be claimed now, with the number of rows each was counted for."""
        self._ready_rows = 0
        self._members: dict[Unit, Entry] = {}
        self._order: InOrder[Entry] = InOrder()
        self._blocker: Unit | None = None
        """The unit that is not ready at which the last claim stopped. Until it is ready or a smaller unit
        changes, the next claim would stop there too, with at most `_before_blocker`."""
        self._before_blocker = {Count.ROWS: 0, Count.GROUPS: 0}
        for unit in units:
            self._refresh(unit)

    @property
    def ready_rows(self) -> int:
        """How many rows can be claimed now."""
        self.catch_up()
        return self._ready_rows

    def ready(self, count: Count) -> int:
        if self.changed:
            self.catch_up()
        return len(self._ready) if count is Count.GROUPS else self._ready_rows

    def catch_up(self) -> None:
        """Process the changed units."""
        changed = self.changed
        if changed:
            self.changed = {}
            for unit in changed:
                self._refresh(unit)

    def _refresh(self, unit: Unit) -> None:
        """Recompute whether this unit is ready, and update its entry."""
        accepts = self.spec.accepts
        if isinstance(unit, StoredRow):
            if accepts(unit):
                if unit not in self._ready:
                    self._ready[unit] = 1
                    self._ready_rows += 1
                    if unit not in self._members:
                        self._place_row(unit)
                    elif self._blocker is not None:
                        self._unblock(unit)
                return
            size = 0
        else:
            size = len(unit.rows)
            for row in unit.rows.values():
                if not accepts(row):
                    size = 0
                    break
        self._ready_rows += size - self._ready.pop(unit, 0)
        if size:
            self._ready[unit] = size
            self._unblock(unit)
            self._place(unit)
        elif self._strict and self._awaits(unit):
            self._place(unit)
        elif unit in self._members:
            self._remove_unit(unit)

    def _awaits(self, unit: Unit) -> bool:
        members = list(unit.members)
        return bool(members) and all(map(self.spec.awaits, members))

    def _remove_unit(self, unit: Unit) -> None:
        del self._members[unit]
        self._tidy()

    def _tidy(self) -> None:
        entries = len(self._order)
        if entries > 64 and entries > 2 * len(self._members):
            self._order = InOrder(self._members.values())

    def _place_row(self, row: StoredRow) -> None:
        """`_place` for a row that has no entry yet."""
        entry = (row.sort if self._by_key else row.arrival, row.id, row)
        self._members[row] = entry
        self._order.push(entry)
        if self._blocker is not None:
            self._unblock(row)

    def _place(self, unit: Unit) -> None:
        """Insert the unit's entry. A group's sort value changes when it loses a session; then a new entry
        replaces it."""
        before = self._members.get(unit)
        if isinstance(unit, StoredRow):
            if before is None:
                self._place_row(unit)
            return
        entry = (unit.sort if self._by_key else unit.arrival, unit.id, unit)
        if before is not None and before[:2] == entry[:2]:
            return
        self._put_back(entry)
        self._tidy()
        self._unblock(unit)

    def _put_back(self, entry: Entry) -> None:
        self._members[entry[2]] = entry
        self._order.push(entry)

    def take(self, n: int, at_least: int, count: Count) -> list[StoredRow] | None:
        """Remove and return the first rows in order, whole groups only; None when there are too few. The
        caller leases them."""
        if self.ready(count) < at_least:
            return None
        if self._blocker is not None:
            if self._is_blocked(at_least, count):
                return None
            self._blocker = None
        if n == 1:
            row = self._take_single()
            if row is not None:
                return [row]
        taken: list[Entry] = []
        total = 0
        overflow = False
        while total < n and (entry := self._first()) is not None:
            unit = entry[2]
            weight = 1 if count is Count.GROUPS else len(unit)
            ready = unit in self._ready
            # A group that is not ready may still lose a session and then fit, so it blocks instead of
            # overflowing: the result of a claim must not depend on timing.
            overflow = ready and total + weight > n
            if overflow or not ready:
                if not ready:
                    self._blocker = unit
                    self._before_blocker = {
                        Count.ROWS: sum(len(one[2]) for one in taken),
                        Count.GROUPS: len(taken),
                    }
                break
            self._order.take_out(entry)
            del self._members[unit]
            taken.append(entry)
            total += weight
        if total >= at_least or (overflow and taken):
            return self._hand_out([entry[2] for entry in taken])
        for entry in taken:
            self._put_back(entry)
        if overflow:
            raise DataPlaneError(
                f"a claim of {n} rows cannot hold the next group, which has more; claim at least a group"
            )
        return None

    def _is_blocked(self, at_least: int, count: Count) -> bool:
        blocker = self._blocker
        if blocker is None or blocker not in self._members or blocker in self._ready:
            return False
        return at_least > self._before_blocker[count]

    def _unblock(self, unit: Unit) -> None:
        """This unit was added or became ready: clear the blocker if the unit sorts before it."""
        if self._blocker is not None and unit.sort < self._blocker.sort:
            self._blocker = None

    def _take_single(self) -> StoredRow | None:
        """Take the first unit if it is a ready row without a group; otherwise change nothing."""
        entry = self._first()
        if entry is None:
            return None
        row = entry[2]
        if not isinstance(row, StoredRow) or self._ready.pop(row, None) is None:
            return None
        self._order.take_out(entry)
        del self._members[row]
        self._ready_rows -= 1
        return row

    def _first(self) -> Entry | None:
        """The smallest valid entry; stale ones before it are removed."""
        while (entry := self._order.first()) is not None and self._members.get(entry[2]) is not entry:
            self._order.take_out(entry)
        return entry

    def _hand_out(self, units: list[Unit]) -> list[StoredRow]:
        rows: list[StoredRow] = []
        for unit in units:
            self._ready_rows -= self._ready.pop(unit)
            if isinstance(unit, StoredRow):
                rows.append(unit)
            else:
                rows += sorted(unit.members, key=_sort)
        return rows


def _sort(row: StoredRow) -> SortKey:
    return row.sort
