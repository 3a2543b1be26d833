"""One partition in memory: its rows, its groups, and the views its claims are served from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.dataplane.base import GroupPolicy, Order, RowStatus, Where
from understudy.dataplane.groups import GroupFilter
from understudy.dataplane.rows import Group, Row, Unit, unit_of
from understudy.dataplane.settled import SettledKeys
from understudy.dataplane.view import View, ViewSpec


@dataclass(frozen=True, slots=True)
class Watch:
    """A `wait` in progress: looked at again whenever the partition changes."""

    look: Callable[[], bool]
    answer: asyncio.Future[None]


@dataclass(slots=True)
class Partition:
    name: str
    rows: dict[str, Row] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    views: dict[ViewSpec, View] = field(default_factory=dict)
    asked: dict[tuple[Any, ...], View] = field(default_factory=dict)
    """The same views by the words of a claim, so that a claim asked again finds its view without building a spec."""
    claims_waiting: int = 0
    watches: list[Watch] = field(default_factory=list)
    settled: SettledKeys = field(default_factory=SettledKeys)
    counts: dict[RowStatus, int] = field(default_factory=lambda: dict.fromkeys(RowStatus, 0))
    leased: int = 0
    filter: GroupFilter | None = None
    serve_scheduled: bool = False

    def view(self, spec: ViewSpec) -> View:
        found = self.views.get(spec)
        if found is None:
            singles: list[Unit] = [row for row in self.rows.values() if row.group is None]
            found = self.views[spec] = View(spec, [*singles, *self.groups.values()])
        return found

    def view_for(
        self,
        status: RowStatus,
        fields: Sequence[str],
        without: Sequence[str],
        where: Where | None,
        order: Order,
    ) -> View:
        if where:
            return self.view(ViewSpec.of(status, fields, without, where, order))
        words = (status, tuple(fields), tuple(without), order)
        found = self.asked.get(words)
        if found is None:
            found = self.asked[words] = self.view(ViewSpec.of(status, fields, without, None, order))
        return found

    def ready_view(self, fields: Sequence[str], where: Where | None) -> View:
        """Rows ready under these fields, in whichever order a claim keeps them already."""
        for order in (Order.ARRIVAL, Order.KEY):
            spec = ViewSpec.of(RowStatus.FINISHED, fields, (), where, order)
            if spec in self.views:
                return self.views[spec]
        return self.view(spec)

    def add(self, row: Row) -> None:
        """Call `touch` when the row is filled."""
        self.rows[row.key] = row
        self.counts[row.status] += 1

    def join(self, row: Row, name: str, policy: GroupPolicy, group_id: int) -> None:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(group_id, name, policy)
        row.group = group
        group.rows[row.key] = row

    def set_status(self, row: Row, status: RowStatus) -> None:
        self.counts[row.status] -= 1
        self.counts[status] += 1
        row.status = status

    def remove(self, row: Row) -> None:
        """The row is settled; its lease was dropped before."""
        del self.rows[row.key]
        self.counts[row.status] -= 1
        self.settled.add(row.key)
        if row.group is not None:
            del row.group.rows[row.key]
            if not row.group.rows:
                self.groups.pop(row.group.name, None)
            self.refresh(row.group)
        else:
            for view in self.views.values():
                view.discard(row)

    def touch(self, row: Row) -> None:
        """Something about the row changed."""
        self.refresh(unit_of(row))

    def refresh(self, unit: Unit) -> None:
        for view in self.views.values():
            view.refresh(unit)
