"""The gate between work under one version of the weights and publishes: many at once, or one publish alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PublishGate:
    """A publish waits for the work under way, and new work waits for the publish. The work is rollouts (with
    `partial_rollouts = false`), or the scoring of rows by teachers that follow the student.

    The gate closes before the wait begins, so new work cannot delay a publish for ever. Producers `enter`, the
    trainer's task calls `close` and `open`, all on the event loop.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if self.inside == 0:
                self._empty.set()

    async def close(self) -> None:
        """Returns when no work is under way. None starts until `open`."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()
