"""Calls in flight of remote requests: a rollout worker asks the server that the engine chose.

    from      message                                                         to
    engine    `Grant`: server, version, the call it continues (gate open)     worker
    worker    prompt and tokens so far                                        server
    server    the next tokens, aborted if weights change                      worker
    worker    `Brought`: how many tokens, stop reason; if aborted, repeat     engine

All calls must end before weights change: the new weights would answer a request that reaches the server too
late. So once the servers have stopped, the engine tells each waiting worker that no answer will come
(`cut`). Calls of workers that still do not report within `CUT_PATIENCE_S` are void: their results are
ignored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from understudy.engines.base import Generation
from understudy.engines.remote_tokens import (
    BearerGone,
    Brought,
    FarRequest,
    Grant,
    NotBrought,
    Trouble,
    told_of,
)
from understudy.engines.replicas import Replica
from understudy.engines.servers.continuation import RefusedError, ServerOrder, UnreachableError
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

CUT_PATIENCE_S = 30.0
"""How long a publish waits for workers' reports, once servers have stopped."""

Lives = Callable[[Replica], Awaitable[bool]]


class CallVoid(EngineError):
    """The call was dropped and its result is ignored; this says nothing about the server."""


class WayCut(EngineError):
    """The server is alive, but the worker cannot reach it."""


@dataclass(slots=True)
class _Call:
    """One call that a worker has been granted."""

    replica: str
    request: FarRequest
    void: asyncio.Future[None]
    """Set to an exception when the call is dropped."""


class FarCalls:
    """The calls in flight of one engine, on its event loop. `lives` checks a server from this process."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._numbers = itertools.count(1)
        self._open: dict[int, _Call] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def number(self) -> int:
        return next(self._numbers)

    async def bring(self, replica: Replica, request: FarRequest, grant: Grant) -> Brought:
        """Sends the grant and returns the worker's report.

        Raises `BearerGone`, `CallVoid`, `WayCut` (ask again, rather another server), `RefusedError` (do not
        ask again), or another `EngineError` (a failure of this server).
        """
        assert grant.server is not None
        call = _Call(replica.name, request, asyncio.get_running_loop().create_future())
        self._open[grant.call] = call
        self._none_open.clear()
        bringing = asyncio.ensure_future(request.bearer.bring(grant))
        try:
            either: list[asyncio.Future[Any]] = [bringing, call.void]
            patience = grant.server.timeout_s + request.patience_s
            done, _ = await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                request.bearer.give_up()
                await asyncio.wait([bringing])  # until the row's caller is told
                raise BearerGone(f"{request.key} was not brought to {replica.name} in time")
            if not bringing.done():
                call.void.result()
            return bringing.result()
        except NotBrought as error:
            raise await self._reason(replica, error) from error
        finally:
            bringing.cancel()
            if call.void.done():
                call.void.exception()
            call.void.cancel()
            del self._open[grant.call]
            if not self._open:
                self._none_open.set()

    async def _reason(self, replica: Replica, error: NotBrought) -> EngineError:
        text = f"a worker's request: {error}"
        if error.trouble is Trouble.REFUSED:
            return RefusedError(text)
        if error.trouble is Trouble.SERVER:
            return EngineError(text)
        if await self._lives(replica):
            return WayCut(f"{replica.name} lives, and a worker could not reach it: {error}")
        return UnreachableError(text)

    async def come_home(self) -> None:
        """After servers have stopped: returns once every worker has reported or its call is void."""
        await self.cut()
        try:
            async with asyncio.timeout(CUT_PATIENCE_S):
                await self._none_open.wait()
        except TimeoutError:
            self.void(
                CallVoid(f"nothing was said of it {CUT_PATIENCE_S:g} s after its server had handed it back")
            )

    async def cut(self) -> None:
        await asyncio.sleep(0)  # let grants that are being sent go first
        for number, call in list(self._open.items()):
            call.request.bearer.cut(number)

    def void(self, why: EngineError, replica: str | None = None) -> None:
        """Drops the calls of one server, or all calls."""
        for call in self._open.values():
            if replica in (None, call.replica) and not call.void.done():
                call.void.set_exception(why)


class FarWriting:
    """The progress of one remote request, as its worker reported it."""

    def __init__(self, request: FarRequest, calls: FarCalls) -> None:
        self.request = request
        self._calls = calls
        self._told = Brought(0, StopReason.ABORTED)
        self._after: int | None = None

    @property
    def written(self) -> int:
        return self._told.tokens

    @property
    def stop_reason(self) -> StopReason:
        return self._told.stop_reason

    async def fetch(self, replica: Replica, order: ServerOrder) -> None:
        request, call, place = self.request, self._calls.number(), replica.endpoint
        grant = Grant(
            call, place.url, place.key, request.key, request.session, request.seed, self._after, order
        )
        self._told = await self._calls.bring(replica, request, grant)
        self._after = call

    def generation(self) -> Generation:
        return told_of(self._told)
