"""Concurrent calls become batches.

Many samples are in the making at once, and each asks for one generation or one score at a time. An engine and a
teacher work best on batches. This file joins the calls, under one of two rules:

`Cohort` (determinism "full"): a batch is composed by KEY. A cohort is a fixed set of samples. Whenever every living
    member is waiting and nothing is in flight, all waiting calls are sorted by key, cut into chunks and launched.
    Which calls wait at such a moment depends on what the samples do, never on who was quicker; so batches, and with them
    every bit of every result, repeat. Cohorts overlap: one is scored while the next one generates. A batch whose tokens
    are held by a worker that left comes back: its other calls wait until the sample that lost them asks again.

`Arrivals` (determinism "fast"): a call goes out the moment it is made. Engines batch continuously and so do teachers, so
    holding calls back to fill a batch would only add waiting. No barrier anywhere. Only calls for scores that are made within
    two milliseconds, as when rows end with the same decode step, share requests: hundreds of requests cost more than what
    they carry.

        member A ──generate──┐                       ┌─ chunk 0 ──> lane.run([...])
        member B ──generate──┼── all wait? sort, cut ┤
        member C ──score─────┘                       └─ chunk 1 ──> lane.run([...])

Under both rules one bad call costs one call. What a lane is known to refuse (`Lane.check`) fails before it joins a batch. A batch
that is refused all the same is asked again in halves, in the order of its calls, until the bad call is alone: which calls share
a batch then depends on the calls alone, so results still repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from understudy.engines.remote_tokens import BearerGone
from understudy.errors import ClusterError, DataPlaneError, EngineError, TeacherUnavailable

_NOT_ONE_CALLS_FAULT = (
    ClusterError,
    DataPlaneError,
    EngineError,
    TeacherUnavailable,
    MemoryError,
    RuntimeError,  # torch's word for memory that ran out, among others
)
"""Asking again for fewer calls would not tell which of them is bad."""

_AT_ONCE_S = 0.002
"""An engine tells of rows that ended with one step one after another; so long it takes for a few dozen."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How calls that arrive together go in one batch."""

    servers: Callable[[], int]
    """How many share the lane's work now; each gets its part."""
    weight: Callable[[Any], int]
    """Of a call's item."""
    most: int
    """What the items of one batch weigh together, unless there is but one."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where calls of one kind go: an engine, or one teacher."""

    name: str
    run: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
    limit: int
    """Calls in one batch at most."""
    sharing: Sharing | None = None
    """None where every arriving call goes alone: rows of an engine end one by one, and a batch is answered whole."""
    check: Callable[[Any], None] | None = None
    """Raises for an item that the lane would refuse: the caller gets that error, and its item joins no batch."""


class Gather(Protocol):
    def member(self) -> AbstractAsyncContextManager[None]: ...
    async def call(self, lane: Lane, key: str, item: Any) -> Any: ...


@dataclass(slots=True)
class _Call:
    key: str
    item: Any
    result: asyncio.Future[Any]


async def _results(lane: Lane, calls: Sequence[_Call]) -> Sequence[Any]:
    results = await lane.run([call.item for call in calls])
    if len(results) != len(calls):
        raise RuntimeError(f"lane {lane.name} gave {len(results)} results for {len(calls)} calls")
    return results


def _halves(calls: Sequence[_Call]) -> tuple[Sequence[_Call], Sequence[_Call]]:
    middle = (len(calls) + 1) // 2
    return calls[:middle], calls[middle:]


async def _run(lane: Lane, calls: Sequence[_Call]) -> None:
    """Launch one batch and hand each caller its own result or error. Raises `BearerGone`."""
    try:
        results = await _results(lane, calls)
    except BearerGone:
        raise
    except BaseException as error:
        if not isinstance(error, Exception):
            _fail(calls, error)
            raise
        if len(calls) == 1 or isinstance(error, _NOT_ONE_CALLS_FAULT):
            _fail(calls, error)
        else:
            for half in _halves(calls):
                await _run(lane, half)
    else:
        _answer(calls, results)


@dataclass(slots=True)
class Cohort:
    """Batches by key; see the head of the file."""

    size: int
    """How many members will come; the first batch waits for all of them."""
    _entered: int = 0
    _running: int = 0
    _in_flight: int = 0
    _waiting: dict[str, tuple[Lane, list[_Call]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def member(self) -> AbstractAsyncContextManager[None]:
        return _Member(self)

    def enter(self) -> None:
        self._entered += 1
        self._running += 1

    def leave(self) -> None:
        self._running -= 1
        self._launch_if_all_wait()

    async def call(self, lane: Lane, key: str, item: Any) -> Any:
        if lane.check is not None:
            lane.check(item)
        call = _Call(key, item, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(lane.name, (lane, []))[1].append(call)
        self._running -= 1
        self._launch_if_all_wait()
        try:
            return await call.result
        except asyncio.CancelledError:
            if call.result.cancelled():  # given up while waiting: this member was not counted back in
                self._running += 1
            raise

    def _launch_if_all_wait(self) -> None:
        if self._entered < self.size or self._running or self._in_flight or not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for name in sorted(waiting):
            lane, calls = waiting[name]
            calls = sorted((call for call in calls if not call.result.done()), key=lambda call: call.key)
            for start in range(0, len(calls), lane.limit):
                self._in_flight += 1
                task = asyncio.create_task(self._chunk(lane, calls[start : start + lane.limit]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _chunk(self, lane: Lane, calls: Sequence[_Call]) -> None:
        back: Sequence[_Call] = ()
        try:
            await _run(lane, calls)
        except BearerGone:
            back = [call for call in calls if not call.result.done()]
        finally:
            # The callers only wake after this task. They count as running from now on, or another member might see
            # nobody running and launch too early.
            self._running += sum(not call.result.cancelled() for call in calls) - len(back)
            self._in_flight -= 1
        if back:
            self._waiting.setdefault(lane.name, (lane, []))[1].extend(back)
            self._launch_if_all_wait()


class _Member(AbstractAsyncContextManager[None]):
    """A sample's time in its cohort; a class, because every sample has one and a generator costs several times as much."""

    __slots__ = ("_cohort",)

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort

    async def __aenter__(self) -> None:
        self._cohort.enter()

    async def __aexit__(self, *raised: object) -> None:
        self._cohort.leave()


class Arrivals:
    """Calls go at once; engines and teachers merge what arrives."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Lane, list[_Call]]] = {}
        """Since the last were sent."""

    def member(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def call(self, lane: Lane, key: str, item: Any) -> Any:
        if lane.check is not None:
            lane.check(item)
        if lane.sharing is None:
            return await _alone(lane, item)
        loop = asyncio.get_running_loop()
        call = _Call(key, item, loop.create_future())
        if lane.name not in self._made:
            self._made[lane.name] = (lane, [])
            loop.call_later(_AT_ONCE_S, self._send, lane.name)
        self._made[lane.name][1].append(call)
        return await call.result

    def _send(self, name: str) -> None:
        lane, made = self._made.pop(name)
        for calls in _parts(lane, [call for call in made if not call.result.done()]):
            _together(lane, calls)


def _parts(lane: Lane, calls: Sequence[_Call]) -> list[list[_Call]]:
    assert lane.sharing is not None
    sharing = lane.sharing
    size = min(lane.limit, -(-len(calls) // max(sharing.servers(), 1)))
    parts: list[list[_Call]] = []
    left = 0
    for call in calls:
        weight = sharing.weight(call.item)
        if not parts or len(parts[-1]) == size or weight > left:
            parts.append([])
            left = sharing.most
        parts[-1].append(call)
        left -= weight
    return parts


def _together(lane: Lane, calls: Sequence[_Call]) -> None:
    """One batch, given up when every caller has gone."""
    task = asyncio.create_task(_each(lane, calls))

    def leave(_: asyncio.Future[Any]) -> None:
        if all(call.result.cancelled() for call in calls):
            task.cancel()

    for call in calls:
        call.result.add_done_callback(leave)


async def _each(lane: Lane, calls: Sequence[_Call]) -> None:
    """As `_run`; the halves of a batch that was refused are given up by themselves."""
    try:
        results = await _results(lane, calls)
    except Exception as error:
        if len(calls) == 1 or isinstance(error, _NOT_ONE_CALLS_FAULT):
            _fail(calls, error)
        else:
            for half in _halves(calls):
                waiting = [call for call in half if not call.result.done()]
                if waiting:
                    _together(lane, waiting)
    except BaseException as error:
        _fail(calls, error)
        raise
    else:
        _answer(calls, results)


def _answer(calls: Sequence[_Call], results: Sequence[Any]) -> None:
    for call, result in zip(calls, results, strict=True):
        if not call.result.done():
            call.result.set_result(result)


def _fail(calls: Sequence[_Call], error: BaseException) -> None:
    for call in calls:
        if not call.result.done():
            call.result.set_exception(error)


async def _alone(lane: Lane, item: Any) -> Any:
    results = await lane.run([item])
    if len(results) != 1:
        raise RuntimeError(f"lane {lane.name} gave {len(results)} results for 1 call")
    return results[0]
