"""One partition in memory: its rows, its groups, and the views that serve its claims."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from understudy.dataplane.base import GroupPolicy, RowStatus
from understudy.dataplane.groups import GroupFilter
from understudy.dataplane.memory.claim_view import View, ViewSpec
from understudy.dataplane.memory.rows import Group, StoredRow, Unit
from understudy.dataplane.memory.settled import SettledKeys

MOST_VIEWS = 8
_MOST_EXCESS_CHANGES = 64
"""A view is dropped when its list of changed units exceeds the number of rows by this many."""
_NONE = dict.fromkeys(RowStatus, 0)


@dataclass(frozen=True, slots=True)
class Watch:
    """A `wait` in progress: evaluated whenever the partition changes."""

    look: Callable[[], bool]
    answer: asyncio.Future[None]


class Partitions(dict[str, "Partition"]):
    """By name; a missing one is created on access."""

    def __missing__(self, name: str) -> Partition:
        found = self[name] = Partition(name)
        return found


@dataclass(slots=True)
class Partition:
    name: str
    rows: dict[str, StoredRow] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    views: dict[ViewSpec, View] = field(default_factory=dict)
    """Least recently used first."""
    latest: View | None = None
    claims_waiting: int = 0
    watches: list[Watch] = field(default_factory=list)
    settled: SettledKeys = field(default_factory=SettledKeys)
    counts: dict[int, dict[RowStatus, int]] = field(default_factory=dict)
    """Rows by the step they were issued for, and by status."""
    leased: int = 0
    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows dead-lettered or evicted since the last `take_removed`, by which of the two and kind of reason."""
    filter: GroupFilter | None = None
    serve_scheduled: bool = False

    def view(self, spec: ViewSpec) -> View:
        """The view of this spec; a new one is built from all rows."""
        if self.latest is not None and self.latest.spec is spec:
            return self.latest
        found = self.views.pop(spec, None)
        if found is None:
            singles: list[Unit] = [row for row in self.rows.values() if row.group is None]
            found = View(spec, [*singles, *self.groups.values()])
            self._make_room()
        self.views[spec] = self.latest = found
        return found

    def _make_room(self) -> None:
        """Drop the least recently used view: claims by step or tag keep making new ones, and a row change
        costs every view."""
        if len(self.views) >= MOST_VIEWS:
            oldest = next((spec for spec, view in self.views.items() if not view.line), None)
            if oldest is not None:
                del self.views[oldest]

    def add(self, row: StoredRow) -> None:
        """Add a row; the caller calls `touch` once its columns are set."""
        self.rows[row.key] = row
        of_step = self.counts.get(row.step)
        if of_step is None:
            of_step = self.counts[row.step] = _NONE.copy()
        of_step[row.status] += 1

    def count(self, step: int | None) -> dict[RowStatus, int]:
        """Rows by status, of one step or of all."""
        if step is not None:
            return self.counts.get(step, _NONE)
        return {status: sum(of_step[status] for of_step in self.counts.values()) for status in RowStatus}

    def join(self, row: StoredRow, name: str, policy: GroupPolicy) -> None:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name, policy)
        row.group = group
        group.rows[row.key] = row

    def set_status(self, row: StoredRow, status: RowStatus) -> None:
        of_step = self.counts[row.step]
        of_step[row.status] -= 1
        of_step[status] += 1
        row.status = status

    def remove(self, rows: Iterable[StoredRow], listed: Collection[StoredRow]) -> None:
        """Remove settled rows, whose leases are dropped already; views may still have entries of `listed`."""
        for row in rows:
            key = row.key
            del self.rows[key]
            of_step = self.counts[row.step]
            of_step[row.status] -= 1
            if of_step[row.status] == 0 and not any(of_step.values()):
                del self.counts[row.step]
            self.settled.add(key)
            group = row.group
            if group is not None:
                del group.rows[key]
                if not group.rows:
                    self.groups.pop(group.name, None)
        if listed:
            self.touch(listed)

    def touch(self, rows: Collection[StoredRow], but: View | None = None) -> None:
        """Mark these rows as changed in all views except `but`, which is up to date."""
        if len(self.views) <= (but is not None):
            return
        if len(rows) == 1:
            (row,) = rows
            units: dict[Unit, None] = {row if row.group is None else row.group: None}
        else:
            units = {row if row.group is None else row.group: None for row in rows}
        stale: ViewSpec | None = None
        for view in self.views.values():
            if view is not but:
                view.changed.update(units)
                if len(view.changed) > len(self.rows) + _MOST_EXCESS_CHANGES and not view.line:
                    stale = view.spec
        if stale is not None:
            self._forget(stale)

    def _forget(self, spec: ViewSpec) -> None:
        """Drop a view whose update would cost more than building a new one."""
        view = self.views.pop(spec)
        if self.latest is view:
            self.latest = None
