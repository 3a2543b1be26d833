"""Leases in memory: who holds which rows, until when, on an injected clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import msgspec

from understudy.dataplane.base import Lease
from understudy.dataplane.memory.rows import Row
from understudy.errors import LeaseLost


class HeldLease(msgspec.Struct, eq=False):
    """The plane's side of a lease."""

    id: int
    expires: float
    rows: dict[str, Row]
    """Those it still covers."""
    produces: bool
    """Claimed to be made (pending or failed rows), not to be trained."""


class Leases:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.epoch = 0
        self._held: dict[int, HeldLease] = {}
        self._ends: list[tuple[float, int]] = []
        self.first_end = math.inf
        """No lease ends before."""
        self._next_id = 1

    def grant(self, rows: Iterable[Row], seconds: float | None, produces: bool) -> HeldLease:
        end = math.inf if seconds is None else self.clock() + seconds
        covered: dict[str, Row] = {}
        held = HeldLease(self._next_id, end, covered, produces)
        self._next_id += 1
        self._held[held.id] = held
        for row in rows:
            covered[row.key] = row
            row.lease = held
        if seconds is not None:
            self._remember_end(held)
        return held

    def _remember_end(self, held: HeldLease) -> None:
        heapq.heappush(self._ends, (held.expires, held.id))
        if held.expires < self.first_end:
            self.first_end = held.expires
        if len(self._ends) > 64 and len(self._ends) > 4 * len(self._held):
            # Acked leases leave their ends behind; at thousands a second those would pile up for minutes.
            self._ends = [(held.expires, held.id) for held in self._held.values() if held.expires != math.inf]
            heapq.heapify(self._ends)

    def check(self, lease: Lease, keys: Iterable[str] | None = None) -> HeldLease:
        """The held lease, or `LeaseLost` saying why it is void or which row it does not cover."""
        held = self._held.get(lease.id) if lease.epoch == self.epoch else None
        if held is None:
            why = (
                "the plane was reopened or rewound since"
                if lease.epoch != self.epoch
                else ("it expired, or its rows were acked, released or taken out")
            )
            raise LeaseLost(f"lease {lease.id} on {_some(lease.meta.keys)} is void: {why}; drop this work")
        if keys is not None:
            lost = [key for key in keys if key not in held.rows]
            if lost:
                raise LeaseLost(f"lease {lease.id} does not cover {_some(lost)} (any more); drop this work")
        return held

    def renew(self, held: HeldLease, seconds: float | None) -> None:
        held.expires = math.inf if seconds is None else self.clock() + seconds
        if seconds is not None:
            self._remember_end(held)

    def drop(self, row: Row) -> None:
        """Take one row out of its lease; the last one ends it."""
        held = row.lease
        if held is None:
            return
        row.lease = None
        del held.rows[row.key]
        if not held.rows:
            del self._held[held.id]

    def due(self) -> list[HeldLease]:
        """The leases whose time is up; the caller gives their rows back."""
        now = self.clock()
        found: list[HeldLease] = []
        while self._ends and self._ends[0][0] <= now:
            expires, lease_id = heapq.heappop(self._ends)
            held = self._held.get(lease_id)
            if held is not None and held.expires == expires:
                found.append(held)
        self.first_end = self._ends[0][0] if self._ends else math.inf
        return found

    def next_end(self) -> float | None:
        """When to look again."""
        while self._ends:
            expires, lease_id = self._ends[0]
            held = self._held.get(lease_id)
            if held is not None and held.expires == expires:
                return expires
            heapq.heappop(self._ends)
        return None

    def void_all(self, epoch: int) -> None:
        """A new life begins."""
        self.epoch = epoch
        self._held.clear()
        self._ends.clear()
        self.first_end = math.inf


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
