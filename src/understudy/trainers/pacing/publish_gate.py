"""The gate between rollouts and publishes: many rollouts at once, or one publish and no rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PublishGate:
    """With `partial_rollouts = false`, a publish waits for the rollouts under way, and new rollouts wait for
    the publish.

    The gate closes before the wait begins, so new rollouts cannot delay a publish for ever. Producers enter
    `rollout`, the trainer's task calls `close` and `open`, all on the event loop.
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
        """Returns when no rollout is under way. None starts until `open`."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()
