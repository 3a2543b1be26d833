"""Joins concurrent calls of many sessions into batches for an engine or a teacher.

Many sessions are produced at once, and each makes calls, for a generation or for scores. Engines
and teachers are fastest on batches. Calls are joined under one of two rules:

`BatchByKey` (determinism "full"): batches are composed by key. Its members are a fixed set of sessions. When
    every member that has not ended waits and no batch is in flight, all waiting calls are sorted by key, cut
    into chunks and launched. Which calls wait at that moment depends on what the sessions do, not on their
    speed, so batches and results repeat to the bit. A step has several such sets, and they overlap: one is
    scored while the next one generates. A member makes one call at a time; an agent loop that asks for
    several generations at once gets them one after another.

`BatchByArrival` (determinism "fast"): a call goes out at once. Engines and teachers batch continuously, so holding
    calls back to fill a batch would only add waiting. There is no barrier. Only score calls made within two
    milliseconds, as when rows end in the same decode step, share requests: hundreds of separate requests cost
    more than their contents.

        member A ──generate──┐                       ┌─ chunk 0 ──> queue.run([...])
        member B ──generate──┼── all wait? sort, cut ┤
        member C ──score─────┘                       └─ chunk 1 ──> queue.run([...])

Under both rules one bad call fails alone. An item that fails `CallQueue.check` joins no batch. A batch that is
refused anyway is sent again in halves, in the order of its calls, until the bad call is alone. Which calls
share a batch then depends on the calls only, so results still repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from understudy.errors import ClusterError, DataPlaneError, EngineError, TeacherUnavailable

_SHARED_FAULTS = (
    ClusterError,
    DataPlaneError,
    EngineError,
    TeacherUnavailable,
    MemoryError,
    RuntimeError,  # torch raises it when memory runs out, among others
)
"""Errors that no single call causes: a batch that raises one is not halved."""

_COLLECT_S = 0.002
"""How long score calls are collected. An engine reports rows that end in one step one by one; a few dozen
take this long."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How calls that arrive together are split into batches."""

    servers: Callable[[], int]
    """How many servers answer the calls of the queue now. Calls are divided evenly among them."""
    weight: Callable[[Any], int]
    """The weight of a call's item."""
    most: int
    """The maximum total weight of one batch. A single item may exceed it."""


@dataclass(frozen=True, slots=True)
class CallQueue:
    """The destination of one kind of calls: an engine, or one teacher."""

    name: str
    run: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
    limit: int
    """The maximum number of calls in one batch."""
    split: BatchSplit | None = None
    """How `BatchByArrival` splits the calls that it has collected. None: it sends every call alone, as to an
    engine, whose rows end one by one while a batch is answered as a whole."""
    check: Callable[[Any], None] | None = None
    """Raises for an item that the destination would refuse. The caller gets that error, and the item joins no
    batch."""


class CallBatcher(Protocol):
    """Joins calls into batches. Used on the event loop by the sessions' tasks."""

    def member(self) -> AbstractAsyncContextManager[None]:
        """Entered by a session's task around everything that it does."""
        ...

    def one_at_a_time(self) -> AbstractAsyncContextManager[None]:
        """A lock for one member, which enters it around each call if it may make several at once."""
        ...

    async def call(self, queue: CallQueue, key: str, item: Any) -> Any:
        """Sends `item` to the queue in a batch, and returns its result."""
        ...

    def pause(self) -> None:
        """A member begins to wait for another member, so no batch may wait for it."""
        ...

    def resume(self) -> None:
        """Its wait is over. Called by the member that ends it, before that member makes its next call."""
        ...


@dataclass(slots=True)
class _Call:
    """One session's call and the future that its task waits for."""

    key: str
    item: Any
    result: asyncio.Future[Any]


async def _results(queue: CallQueue, items: Sequence[Any]) -> Sequence[Any]:
    results = await queue.run(items)
    if len(results) != len(items):
        raise RuntimeError(f"queue {queue.name} gave {len(results)} results for {len(items)} calls")
    return results


async def _send_once(queue: CallQueue, calls: Sequence[_Call]) -> Sequence[Sequence[_Call]]:
    """Sends one batch and gives each caller its result or error. Returns the two halves of a batch that was refused,
    which the caller sends again; nothing of any other batch."""
    try:
        results = await _results(queue, [call.item for call in calls])
    except Exception as error:
        if len(calls) > 1 and not isinstance(error, _SHARED_FAULTS):
            middle = (len(calls) + 1) // 2
            return calls[:middle], calls[middle:]
        _fail(calls, error)
    except BaseException as error:
        _fail(calls, error)
        raise
    else:
        _answer(calls, results)
    return ()


async def _run(queue: CallQueue, calls: Sequence[_Call]) -> None:
    """Sends a batch; returns when every caller has its result or error."""
    for half in await _send_once(queue, calls):
        await _run(queue, half)


@dataclass(slots=True)
class BatchByKey:
    """Batches by key (see the module's docstring). Every session enters as a member, calls, and leaves."""

    size: int
    """The number of members. The first batch waits until all of them have entered."""
    _entered: int = 0
    _running: int = 0
    _in_flight: int = 0
    _waiting: dict[str, tuple[CallQueue, list[_Call]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def member(self) -> AsyncIterator[None]:
        self._entered += 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._launch_if_all_wait()

    def one_at_a_time(self) -> AbstractAsyncContextManager[None]:
        return asyncio.Lock()  # serves those that wait in the order in which they came

    async def call(self, queue: CallQueue, key: str, item: Any) -> Any:
        if queue.check is not None:
            queue.check(item)
        call = _Call(key, item, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(queue.name, (queue, []))[1].append(call)
        self._running -= 1
        self._launch_if_all_wait()
        try:
            return await call.result
        except asyncio.CancelledError:
            # Cancelled while waiting: `_chunk` did not count this member as running.
            if call.result.cancelled():
                self._running += 1
            raise

    def pause(self) -> None:
        self._running -= 1
        self._launch_if_all_wait()

    def resume(self) -> None:
        self._running += 1

    def _launch_if_all_wait(self) -> None:
        if self._entered < self.size or self._running or self._in_flight or not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for name in sorted(waiting):
            queue, calls = waiting[name]
            calls = sorted((call for call in calls if not call.result.done()), key=lambda call: call.key)
            for start in range(0, len(calls), queue.limit):
                self._in_flight += 1
                task = asyncio.create_task(self._chunk(queue, calls[start : start + queue.limit]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _chunk(self, queue: CallQueue, calls: Sequence[_Call]) -> None:
        try:
            await _run(queue, calls)
        finally:
            # The callers wake only after this task. They count as running from now on, or another member
            # might see no running member and launch too early.
            self._running += sum(not call.result.cancelled() for call in calls)
            self._in_flight -= 1


class BatchByArrival:
    """Calls go out at once. Engines and teachers merge what arrives."""

    def __init__(self) -> None:
        self._collected: dict[str, tuple[CallQueue, list[_Call]]] = {}
        """By queue: the calls since its last batch was sent."""

    def member(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def one_at_a_time(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    async def call(self, queue: CallQueue, key: str, item: Any) -> Any:
        if queue.check is not None:
            queue.check(item)
        if queue.split is None:
            (result,) = await _results(queue, [item])
            return result
        loop = asyncio.get_running_loop()
        call = _Call(key, item, loop.create_future())
        if queue.name not in self._collected:
            self._collected[queue.name] = (queue, [])
            loop.call_later(_COLLECT_S, self._send, queue.name)
        self._collected[queue.name][1].append(call)
        return await call.result

    def _send(self, name: str) -> None:
        queue, collected = self._collected.pop(name)
        for calls in _parts(queue, [call for call in collected if not call.result.done()]):
            _launch(queue, calls)


def _parts(queue: CallQueue, calls: Sequence[_Call]) -> list[list[_Call]]:
    assert queue.split is not None
    split = queue.split
    size = min(queue.limit, -(-len(calls) // max(split.servers(), 1)))
    parts: list[list[_Call]] = []
    left = 0
    for call in calls:
        weight = split.weight(call.item)
        if not parts or len(parts[-1]) == size or weight > left:
            parts.append([])
            left = split.most
        parts[-1].append(call)
        left -= weight
    return parts


def _launch(queue: CallQueue, calls: Sequence[_Call]) -> None:
    """Launch one batch. It is cancelled when all its callers have been cancelled."""
    task = asyncio.create_task(_run_launched(queue, calls))

    def leave(_: asyncio.Future[Any]) -> None:
        if all(call.result.cancelled() for call in calls):
            task.cancel()

    for call in calls:
        call.result.add_done_callback(leave)


async def _run_launched(queue: CallQueue, calls: Sequence[_Call]) -> None:
    """As `_run`, but each half of a refused batch is launched, and cancelled, on its own."""
    for half in await _send_once(queue, calls):
        waiting = [call for call in half if not call.result.done()]
        if waiting:
            _launch(queue, waiting)


def _answer(calls: Sequence[_Call], results: Sequence[Any]) -> None:
    for call, result in zip(calls, results, strict=True):
        if not call.result.done():
            call.result.set_result(result)


def _fail(calls: Sequence[_Call], error: BaseException) -> None:
    for call in calls:
        if not call.result.done():
            call.result.set_exception(error)
