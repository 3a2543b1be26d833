"""Rows and groups in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.dataplane.base import GroupPolicy, RowStatus, split_key
from understudy.dataplane.frame import SpillRef

if TYPE_CHECKING:
    from understudy.dataplane.leases import HeldLease

SortKey = tuple[str, int, int]
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_STATUS_LINE = {status: status.value for status in RowStatus} | {RowStatus.RUNNING: RowStatus.PENDING.value}


class Row(msgspec.Struct, eq=False):
    """One row in flight. A `Struct`, which is made in half the time of a class of our own; equal to itself alone."""

    id: int
    partition: str
    key: str
    step: int
    tags: dict[str, Any]
    status: RowStatus = RowStatus.PENDING
    columns: dict[str, bytes | SpillRef] = {}
    arrival: int = 0
    """Counts finished rows, so that a released row keeps its place in the line."""
    packs: int = 0
    resident: int = 0
    """Bytes of its columns in memory."""
    group: Group | None = None
    lease: HeldLease | None = None
    attempts: int = 0
    gone: bool = False
    """Settled: it left the plane."""
    split: SortKey | None = None
    """Its key in parts, once somebody asked."""

    @property
    def sort(self) -> SortKey:
        if self.split is None:
            self.split = split_key(self.key)
        return self.split

    @property
    def members(self) -> Iterable[Row]:
        return (self,)

    def __len__(self) -> int:
        return 1

    def line(self) -> tuple[Any, ...]:
        """Its line in the journal, but for the group. A lease does not outlive the process: running is written as pending."""
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
        self.rows: dict[str, Row] = {}
        self.sort: SortKey = (name, -1, -1)

    @property
    def members(self) -> Iterable[Row]:
        return self.rows.values()

    @property
    def id(self) -> int:
        """Its first session's."""
        return min((row.id for row in self.rows.values()), default=0)

    @property
    def arrival(self) -> int:
        """Its last session's."""
        return max((row.arrival for row in self.rows.values()), default=0)

    def __len__(self) -> int:
        return len(self.rows)


Unit = Row | Group
"""What is claimed whole: a group, or a row that has none."""
