"""Rows, groups and leases in memory."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from understudy.dataplane.base import GroupPolicy, Lease, RowStatus
from understudy.dataplane.frame import SpillRef
from understudy.errors import LeaseLost
from understudy.types.prompt import split_key

SortKey = tuple[str, int, int]
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_STATUS_LINE = {status: status.value for status in RowStatus} | {RowStatus.RUNNING: RowStatus.PENDING.value}


class StoredRow(msgspec.Struct, eq=False):
    """One row in flight. A `Struct` is created in half the time of a plain class. Compared by identity."""

    id: int
    partition: str
    key: str
    step: int
    tags: dict[str, Any]
    status: RowStatus = RowStatus.PENDING
    columns: dict[str, bytes | SpillRef] = {}
    arrival: int = 0
    """Sequence number of its finish, so that a released row keeps its place in arrival order; 0 before."""
    packs: int = 0
    """How many packs of its columns the journal has: one per write."""
    resident: int = 0
    """Bytes of its columns in memory."""
    group: Group | None = None
    lease: HeldLease | None = None
    attempts: int = 0
    gone: bool = False
    """Whether it is settled and has left the plane."""
    split: SortKey | None = None
    """The parsed key, computed on first use."""

    @property
    def sort(self) -> SortKey:
        if self.split is None:
            self.split = split_key(self.key)
        return self.split

    @property
    def members(self) -> Iterable[StoredRow]:
        return (self,)

    def __len__(self) -> int:
        return 1

    def line(self) -> tuple[Any, ...]:
        """Its entry in the journal, without the group. Leases end with the process, so running is written as
        pending."""
        return (
            self.id,
            self.partition,
            self.key,
            _STATUS_LINE[self.status],
            self.step,
            self.arrival,
            self.attempts,
            _to_json(self.tags) if self.tags else "{}",
        )


class Group:
    """The sessions of one prompt that are still in flight: claimed together or not at all."""

    __slots__ = ("name", "policy", "rows", "sort")

    def __init__(self, name: str, policy: GroupPolicy) -> None:
        self.name = name
        self.policy = policy
        self.rows: dict[str, StoredRow] = {}
        self.sort: SortKey = (name, -1, -1)

    @property
    def members(self) -> Iterable[StoredRow]:
        return self.rows.values()

    @property
    def id(self) -> int:
        """The smallest of its rows' ids."""
        return min((row.id for row in self.rows.values()), default=0)

    @property
    def arrival(self) -> int:
        """The largest of its rows' arrivals."""
        return max((row.arrival for row in self.rows.values()), default=0)

    def __len__(self) -> int:
        return len(self.rows)


Unit = StoredRow | Group
"""What a claim takes as a whole: a group, or a row without one."""


class HeldLease(msgspec.Struct, eq=False):
    """The plane's record of a lease."""

    id: int
    expires: float
    rows: dict[str, StoredRow]
    """The rows it still covers."""
    produces: bool
    """A producer's lease on pending or failed rows, not a trainer's on finished ones."""


class Leases:
    """All live leases and their expiries. Used by `Store` on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.epoch = 0
        self._held: dict[int, HeldLease] = {}
        self._ends: list[tuple[float, int]] = []
        self.first_end = math.inf
        """No lease expires before this time."""
        self._next_id = 1

    def grant(self, rows: Iterable[StoredRow], seconds: float | None, produces: bool) -> HeldLease:
        end = math.inf if seconds is None else self.clock() + seconds
        covered: dict[str, StoredRow] = {}
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
            # Acked leases leave entries in the heap; at thousands per second they would accumulate for
            # minutes.
            self._ends = [(held.expires, held.id) for held in self._held.values() if held.expires != math.inf]
            heapq.heapify(self._ends)

    def check(self, lease: Lease, keys: Iterable[str] | None = None) -> HeldLease:
        """The held lease; raises `LeaseLost`, saying why it is void or which row it does not cover."""
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

    def drop(self, row: StoredRow) -> None:
        """Remove one row from its lease; the lease ends with its last row."""
        held = row.lease
        if held is None:
            return
        row.lease = None
        del held.rows[row.key]
        if not held.rows:
            del self._held[held.id]

    def due(self) -> list[HeldLease]:
        """The leases that have expired; the caller releases their rows."""
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
        """The earliest expiry of a live lease."""
        while self._ends:
            expires, lease_id = self._ends[0]
            held = self._held.get(lease_id)
            if held is not None and held.expires == expires:
                return expires
            heapq.heappop(self._ends)
        return None

    def void_all(self, epoch: int) -> None:
        """Start a new epoch; all leases become void."""
        self.epoch = epoch
        self._held.clear()
        self._ends.clear()
        self.first_end = math.inf


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
