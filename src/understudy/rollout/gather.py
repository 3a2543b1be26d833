"""Who shares a generation batch with whom.

Floating-point results depend on how a batch is composed. `ByKey` therefore waits until every rollout under way has
asked for its next turn and sends all requests at once, sorted by key: the batch is the same however the rollouts were
scheduled. `ByArrival` sends each request at once and lets a continuous-batching engine merge them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from understudy.engines.base import Engine, GenerateRequest, Generation


class Gather(Protocol):
    """The way from loops to the engine. Each rollout is a member from before its first request until it leaves."""

    def join(self) -> None: ...

    def leave(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Generation: ...


class ByArrival:
    """No waiting for others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def join(self) -> None:
        """Members need no counting here."""

    def leave(self) -> None:
        """Members need no counting here."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return (await self._engine.generate([request]))[0]


class ByKey:
    """Batches of all members' next requests, in key order.

    A member that neither asks nor leaves holds the others up, a tool call for instance: that is the price of results
    that do not depend on timing. All members must `join` before the first of them asks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._members = 0
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._flights: set[asyncio.Task[None]] = set()

    def join(self) -> None:
        self._members += 1

    def leave(self) -> None:
        self._members -= 1
        self._fly_if_all_wait()

    async def generate(self, request: GenerateRequest) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        entry = (request, answer)
        self._waiting.append(entry)
        self._fly_if_all_wait()
        try:
            return await answer
        finally:
            if entry in self._waiting:  # cancelled before take-off
                self._waiting.remove(entry)

    def _fly_if_all_wait(self) -> None:
        sessions = {request.session for request, _ in self._waiting}
        if self._waiting and len(sessions) >= self._members:
            batch = sorted(self._waiting, key=lambda entry: entry[0].key)
            self._waiting = []
            task = asyncio.get_running_loop().create_task(self._fly(batch))
            self._flights.add(task)
            task.add_done_callback(self._flights.discard)

    async def _fly(self, batch: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        try:
            generations = await self._engine.generate([request for request, _ in batch])
        except BaseException as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        for (_, answer), generation in zip(batch, generations, strict=True):
            if not answer.done():
                answer.set_result(generation)
