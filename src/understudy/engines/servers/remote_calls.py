"""Generations by servers whose tokens others hold: the engine says which server and when, the bearer asks it and keeps what came.

    engine: gate open, a server chosen ──Grant: server, version, after call 3──> bearer ──prompt and tokens so far──> server
    weights change: servers stop and hand back what they have ──> bearer ──Brought: how many, aborted──> engine ──> gate …

While weights change every call must be told of before they may: a request that reached a server too late would be answered by the new
ones. Whoever still waits then is told that no answer comes (`cut`), and whoever does not say anything is not listened to any more.
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
"""How long a publish waits for bearers to say what they have, once servers have stopped."""

Lives = Callable[[Replica], Awaitable[bool]]


class CallVoid(EngineError):
    """Whatever comes of this call is not listened to any more; nothing is known of its server."""


class WayCut(EngineError):
    """The server lives, and the bearer does not reach it."""


@dataclass(slots=True)
class _Call:
    replica: str
    request: FarRequest
    void: asyncio.Future[None]
    """Fails when nobody waits for the call any more."""


class FarCalls:
    """The calls under way. `lives` asks a server by this process's own connection."""

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
        """What its bearer has then. `BearerGone`; `CallVoid`; or why the server is to be asked again, or another, or none."""
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
                await asyncio.wait([bringing])  # until whoever waits for the row knows
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
        """Servers have stopped: returns once every bearer has said what it has, or is not listened to any more."""
        await self.cut()
        try:
            async with asyncio.timeout(CUT_PATIENCE_S):
                await self._none_open.wait()
        except TimeoutError:
            self.void(
                CallVoid(f"nothing was said of it {CUT_PATIENCE_S:g} s after its server had handed it back")
            )

    async def cut(self) -> None:
        await asyncio.sleep(0)  # a grant that is being given is given first
        for number, call in list(self._open.items()):
            call.request.bearer.cut(number)

    def void(self, why: EngineError, replica: str | None = None) -> None:
        """Those of one server, or all."""
        for call in self._open.values():
            if replica in (None, call.replica) and not call.void.done():
                call.void.set_exception(why)


class FarWriting:
    """One request's progress, as its bearer told it."""

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
