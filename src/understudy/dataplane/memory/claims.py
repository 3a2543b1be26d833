"""Claims and waits: serves waiting claims when a partition changes. Nothing polls.

A change marks its partition. At the end of the loop iteration the partition's waiting claims are tried in
FIFO order and its watches evaluated, once, however many rows changed. One timer fires at the earliest expiry
of a lease.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from understudy.dataplane.base import Count, Depth, Lease, RowStatus
from understudy.dataplane.memory.claim_view import ClaimRequest, View, ViewSpec
from understudy.dataplane.memory.partition import Partition, Watch
from understudy.dataplane.memory.rows import StoredRow
from understudy.dataplane.memory.store import Store
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta

_SHORTEST_TIMER = 0.01


class Claims:
    """Grants leases and holds the lease timer. Called by the plane on the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timer: asyncio.TimerHandle | None = None
        self._timer_end = 0.0
        store.on_change = self._changed

    def claim_now(
        self, part: Partition, view: View, n: int, at_least: int, count: Count, seconds: float | None
    ) -> Lease | None:
        """The lease if enough rows are ready and no claim is queued; None: call `wait_in_line`."""
        store = self._store
        if n > store.admission.max_rows and n > len(part.rows):
            raise DataPlaneError(
                f"a claim of {n} rows from a plane of max_rows={store.admission.max_rows} would wait forever; "
                "raise max_rows to at least one batch"
            )
        store.expire()
        return None if view.line else self._try(part, view, n, at_least, count, seconds)

    async def record(self, lease: Lease) -> None:
        """Commit the attempt counts of a producer's lease before its work starts."""
        try:
            await self._store.journal.durable()
        except asyncio.CancelledError:
            self.give_back(lease)
            raise

    async def wait_in_line(
        self, part: Partition, view: View, request: ClaimRequest, timeout: float | None
    ) -> Lease:
        answer = request.answer = asyncio.get_running_loop().create_future()
        view.line.append(request)
        part.claims_waiting += 1
        self._store.admission.waiting_claims += 1
        self._store.admission.serve()
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except BaseException as error:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.give_back(answer.result())
            if isinstance(error, TimeoutError):
                raise TimeoutError(_missing(part, view, request, timeout)) from None
            raise
        finally:
            self._store.admission.waiting_claims -= 1
            part.claims_waiting -= 1
            if request in view.line:
                view.line.remove(request)
            self._changed(part)

    def give_back(self, lease: Lease) -> None:
        held = self._store.leases.check(lease)
        for row in list(held.rows.values()):
            self._store.give_back(row)

    def _try(
        self, part: Partition, view: View, n: int, at_least: int, count: Count, seconds: float | None
    ) -> Lease | None:
        rows = view.take(n, at_least, count)
        if rows is None:
            return None
        held = self._store.grant(part, view, rows, seconds)
        if self._timer is None or held.expires < self._timer_end:
            self._set_timer(held.expires)
        return Lease(_meta(part.name, rows), held.id, self._store.leases.epoch, held.expires)

    def _set_timer(self, end: float) -> None:
        if end == math.inf or (self._timer is not None and self._timer_end <= end):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(_SHORTEST_TIMER, end - self._store.leases.clock())
        self._timer_end = end
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._store.expire()
        end = self._store.leases.next_end()
        if end is not None:
            self._set_timer(end)

    async def wait(
        self, part: Partition, until: Callable[[Depth], bool], ready: ViewSpec, timeout: float | None
    ) -> Depth:
        self._store.expire()
        seen = self.depth(part, ready)
        if until(seen):
            return seen

        def look() -> bool:
            nonlocal seen
            seen = self.depth(part, ready)
            return until(seen)

        watch = Watch(look, asyncio.get_running_loop().create_future())
        part.watches.append(watch)
        self._store.admission.waiting_claims += 1
        self._store.admission.serve()
        try:
            async with asyncio.timeout(timeout):
                await watch.answer
        except TimeoutError:
            raise TimeoutError(f"after {timeout} s partition {part.name!r} is at {seen}") from None
        finally:
            self._store.admission.waiting_claims -= 1
            if watch in part.watches:
                part.watches.remove(watch)
        return seen

    def depth(self, part: Partition, ready: ViewSpec) -> Depth:
        """Counts of the partition (or of one step, if `ready` names one), and how many rows are ready."""
        counts = part.count(ready.step)
        return Depth(
            pending=counts[RowStatus.PENDING],
            running=counts[RowStatus.RUNNING],
            finished=counts[RowStatus.FINISHED],
            failed=counts[RowStatus.FAILED],
            leased=part.leased,
            ready=part.view(ready).ready_rows,
            resident_bytes=self._store.admission.resident,
            waiting_producers=self._store.admission.waiting,
        )

    def _changed(self, part: Partition) -> None:
        if not part.serve_scheduled and (part.claims_waiting or part.watches):
            part.serve_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve, part)

    def _serve(self, part: Partition) -> None:
        part.serve_scheduled = False
        for view in list(part.views.values()):
            while view.line:
                request = view.line[0]
                answer = request.answer
                if answer is not None and not answer.done():
                    try:
                        lease = self._try(
                            part, view, request.n, request.at_least, request.count, request.lease_seconds
                        )
                    except DataPlaneError as error:
                        answer.set_exception(error)
                    else:
                        if lease is None:
                            break
                        answer.set_result(lease)
                view.line.popleft()
        for watch in list(part.watches):
            if watch.answer.done():
                continue
            try:
                if watch.look():
                    watch.answer.set_result(None)
            except Exception as error:
                watch.answer.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting claims and watches."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for part in self._store.partitions.values():
            for view in part.views.values():
                for request in view.line:
                    if request.answer is not None and not request.answer.done():
                        request.answer.set_exception(error)
                view.line.clear()
            for watch in part.watches:
                if not watch.answer.done():
                    watch.answer.set_exception(error)
            part.watches.clear()


def _missing(part: Partition, view: View, request: ClaimRequest, timeout: float | None) -> str:
    spec = view.spec
    counts = ", ".join(f"{count} {status.value}" for status, count in part.count(spec.step).items() if count)
    wanted = f" with columns {', '.join(spec.fields)}" if spec.fields else ""
    return (
        f"after {timeout} s {view.ready(request.count)} of {request.at_least} {request.count.value} are "
        f"{spec.status.value}{wanted} in partition {part.name!r}; it holds {counts or 'nothing'}, {part.leased} leased"
    )


def _meta(partition: str, rows: list[StoredRow]) -> BatchMeta:
    """The meta of claimed rows: their keys, the columns all of them have, and their tags."""
    first = rows[0]
    fields = tuple(first.columns)
    if len(rows) == 1:
        extra = {"attempts": {first.key: first.attempts}} if first.attempts else {}
        return BatchMeta(partition, (first.key,), fields, (dict(first.tags),), extra)
    shared = first.columns.keys()
    for row in rows:
        if row.columns.keys() != shared:
            shared = shared & row.columns.keys()  # type: ignore[assignment]
    fields = tuple(name for name in fields if name in shared)
    return BatchMeta(
        partition=partition,
        keys=tuple([row.key for row in rows]),
        fields=fields,
        tags=tuple([dict(row.tags) for row in rows]),
        extra={"attempts": {row.key: row.attempts for row in rows}} if first.attempts else {},
    )
