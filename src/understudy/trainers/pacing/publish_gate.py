"""Who may roll out now: many rollouts at once, or one publish and no rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turnstile:
    """`partial_rollouts = false`: a publish waits for the rollouts under way, and new ones wait for the publish.

    It is closed before the wait begins, so that a stream of new rollouts cannot put a publish off for ever.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[None]:
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
        """Returns once nobody rolls out; nobody will until `open`."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()
