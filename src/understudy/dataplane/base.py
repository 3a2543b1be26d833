"""The data plane's vocabulary and the `DataPlane` protocol that every implementation follows.

A **partition** holds rows of one purpose ("train"). A row has a **key** `{prompt}_{session}_{index}`,
**columns** (numpy arrays or JSON values, written at different times by different writers), **tags** (a small
dict that claims select by) and a **status**. Work is claimed under a **lease** and finished by an **ack**:

    issue ──> pending ──claim(status=pending)──> running ──put──> finished ──claim──> (leased) ──ack(step)──> trained
                 ^                                  │                 ^                   │
                 └────── lease expired, released ───┘                 └─ expired, released ┘
              any of them ──dead_letter(reason)──> dead          ──evict(reason)──> evicted

Delivery is at least once: when a lease expires, its rows can be claimed again. Training is exactly once: only
the holder of a live lease can ack, a row leaves the plane with its ack, and a key that was ever settled
(trained, dead or evicted) is neither issued nor written again. `rewind` restores the state of a checkpoint.

In-process producers need no producer lease: `issue` the keys, make the rows, `put` them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from understudy.dataplane.groups import GroupFilter
from understudy.types.batch import BatchMeta

if TYPE_CHECKING:
    from understudy.types.jagged import Jagged

Value: TypeAlias = Any
"""A cell: `np.ndarray` (bool, int32, int64, float32 or uint16; 1-D or 2-D), or a JSON value; NaN allowed."""
Columns: TypeAlias = Mapping[str, Value]
Where: TypeAlias = Mapping[str, Any]
"""Tag name → the value to match, or a list of accepted values. Plain data: can be serialised and indexed."""


class RowStatus(StrEnum):
    PENDING = "pending"
    """Issued; no producer has made it yet."""
    RUNNING = "running"
    """Being made, under a producer's lease or by an in-process producer that wrote part of it."""
    FINISHED = "finished"
    """Rolled out. Later columns (teacher scores, advantages) may still be missing: `claim(fields=…)` waits
    for them."""
    FAILED = "failed"
    """Making it failed; it is retried (`claim(status=failed)`) or dead-lettered. Until then claims in key
    order wait for it."""


class Order(StrEnum):
    KEY = "key"
    """The n smallest keys **in flight**. The claim waits for the slowest of them, so batches do not depend on
    timing."""
    ARRIVAL = "arrival"
    """The rows that finished first."""


class Count(StrEnum):
    """What the `n` of a claim counts."""

    ROWS = "rows"
    GROUPS = "groups"


class GroupPolicy(StrEnum):
    """What happens to a prompt's other sessions when one is dead-lettered."""

    DROP_GROUP = "drop_group"
    TRAIN_REST = "train_rest"


class Retain(StrEnum):
    """How long the journal keeps the columns of trained rows."""

    UNTIL_SETTLED = "until_settled"
    """Until `settle(step)`: after a rewind the rows are complete (determinism "fast": nothing is rolled out
    twice)."""
    UNTIL_ACK = "until_ack"
    """Deleted with the ack: after a rewind the rows are made again (determinism "full" does so anyway; saves
    disk)."""


class Lease(msgspec.Struct, frozen=True):
    """The right to write or ack these rows, until `expires`."""

    meta: BatchMeta
    id: int
    epoch: int
    """The plane's epoch at the grant. Every open and every rewind starts a new epoch and voids older
    leases."""
    expires: float
    """On the plane's clock; infinity for a lease that never expires."""


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What `list` returns for one row."""

    status: RowStatus
    tags: Mapping[str, Any]
    columns: tuple[str, ...]
    group: str | None
    step: int
    """The training step it was issued for."""
    attempts: int
    """How often a producer has claimed it. Counted before the work starts, so a row that crashes its worker
    shows."""
    leased: bool


@dataclass(frozen=True, slots=True)
class Depth:
    """Counts of one partition, maintained incrementally."""

    pending: int
    running: int
    finished: int
    failed: int
    leased: int
    """How many of them are under a lease."""
    ready: int
    """How many could be claimed now, under the fields and tags asked about."""
    resident_bytes: int
    """Of the whole plane: column bytes held in memory. Spilled columns do not count."""
    waiting_producers: int
    """Of the whole plane: calls that wait because it is full."""

    @property
    def rows(self) -> int:
        return self.pending + self.running + self.finished + self.failed


class DataPlane(Protocol):
    """The interface of every data plane. Every call may wait; none polls. All arguments except
    `filter_groups`' rule and `wait`'s predicate are plain data, so calls can cross a process boundary."""

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
        """Record that these rows will be made for training step `step`; returns the keys that are new.

        A key in flight or settled already is left as it is and not returned: after a resume, issuing the same
        prompts again makes only what is missing. Waits while the plane is full; a row that was issued never
        waits again. With `group`, the keys of this call that share a prompt are claimed together. `reserved`
        rows do not wait: the caller keeps its own rows below the bound.
        """
        ...

    async def put(
        self,
        partition: str,
        rows: Mapping[str, Columns],
        tags: Mapping[str, Mapping[str, Any]] | None = None,
        lease: Lease | None = None,
        *,
        status: RowStatus = RowStatus.FINISHED,
    ) -> BatchMeta:
        """Write whole rows, or more columns of existing rows; returns once they survive kill -9.

        All or nothing. A row that was never issued is issued by this call (for the step after the last one
        acked) and waits for room. Raises `LeaseLost` when the lease is void or does not cover a row, when
        another producer's lease covers it, or when the row was settled meanwhile: the caller drops the work.
        """
        ...

    async def put_tags(self, partition: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Merge tags into rows."""
        ...

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
        """Wait for `n` rows that have `status` and all of `fields` (and none of `without`), and lease them.

        With `step`, only rows issued for that step: after a resume that kept rows, the plane holds rows of
        several steps. Groups are never split: the claim stops before a group that would exceed `n`. It
        returns when `at_least` (default `n`) are there. Raises `TimeoutError` after `timeout` seconds, saying
        what is missing; no row changes. `lease_seconds=None`: until ack or release.
        """
        ...

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        """Columns of these rows in the order of `meta.keys`: arrays as `Jagged`, everything else as a
        list."""
        ...

    async def ack(self, lease: Lease, step: int, keys: Sequence[str] | None = None) -> None:
        """Mark these rows (default: all of the lease) trained in `step`. Await it before saving the
        checkpoint."""
        ...

    async def release(self, lease: Lease, keys: Sequence[str] | None = None) -> None:
        """Give up the lease on rows, unchanged; the next claim can take them."""
        ...

    async def renew(self, lease: Lease, lease_seconds: float | None = 600.0) -> Lease:
        """The same lease with a later expiry."""
        ...

    async def dead_letter(
        self, partition: str, key: str, reason: str, evidence: Mapping[str, Any] | None = None
    ) -> None:
        """Remove a row that cannot be made or trained, add it to the dead-letter file, apply its group's
        policy."""
        ...

    async def evict(
        self, partition: str, keys: Sequence[str], reason: str, lease: Lease | None = None
    ) -> None:
        """Remove valid rows on purpose (no signal, too stale); counted apart from dead letters."""
        ...

    def filter_groups(self, partition: str, group_filter: GroupFilter | None) -> None:
        """Apply this filter to every group of the partition once it is complete. Called in the plane's own
        process."""
        ...

    async def clear(self, partition: str, keys: Sequence[str] | None = None) -> None:
        """Evict these rows, or all of the partition, leased or not."""
        ...

    async def list(self, partition: str) -> dict[str, RowInfo]:
        """Every row in flight, by key."""
        ...

    async def depth(
        self,
        partition: str,
        *,
        fields: Sequence[str] = (),
        where: Where | None = None,
        step: int | None = None,
    ) -> Depth:
        """The current counts, of the partition or of the rows issued for one step."""
        ...

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
        """Wait for the first depth for which `until` holds; it is evaluated whenever the partition
        changes."""
        ...

    def take_removed(self, partition: str) -> Mapping[tuple[str, str], int]:
        """Counts of rows removed since the last call, by ("dead" or "evicted", kind of reason)."""
        ...

    async def settle(self, step: int) -> None:
        """Free what was kept for a rewind before `step`: its checkpoint is safe and older ones are
        deleted."""
        ...

    async def rewind(self, step: int, *, keep_rows: bool) -> None:
        """Restore the state of the checkpoint of `step`; `journal/rewind.py` says what that means."""
        ...

    async def sync(self) -> None:
        """Make everything so far survive a power cut too. Await it before a checkpoint is made final."""
        ...

    async def close(self) -> None: ...


ARRAY_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("bool", "int32", "int64", "float32", "uint16")
)
