"""Helpers of the data plane tests: the implementations, a manual clock, and rows to write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from understudy.dataplane.base import DataPlane
from understudy.dataplane.embedded import EmbeddedDataPlane

Result = TypeVar("Result")
ROOMY = {"max_rows": 10_000, "max_bytes": 2**26, "spill_bytes": 2**20}


class HandClock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """One implementation, opened on one folder as often as a test likes."""

    def __init__(self, open_plane: Callable[..., DataPlane], folder: Path, reloads: bool = True) -> None:
        """`reloads`: after reopening, columns are loaded into memory up to its bound."""
        self._open = open_plane
        self.reloads = reloads
        self.folder = folder
        self.clock = HandClock()

    def open(self, **settings: Any) -> Any:
        return self._open(self.folder, clock=self.clock, **{**ROOMY, **settings})

    def run(self, body: Callable[[Any], Awaitable[Result]], **settings: Any) -> Result:
        """Opens a plane, runs `body` with it, and closes it."""

        async def whole() -> Result:
            plane = self.open(**settings)
            try:
                return await asyncio.wait_for(body(plane), 30)
            finally:
                await plane.close()

        return asyncio.run(whole())


_links: list[Any] = []


@contextmanager
def start_queue() -> Iterator[None]:
    """Starts Ray on this machine, a queue with two storage units, and the link that the planes below use."""
    pytest.importorskip("ray")
    pytest.importorskip("transfer_queue.metadata")
    connecting = import_module("understudy.cluster.ray_cluster")
    cluster = connecting.RayCluster(connecting.RaySettings(cpus=3))
    try:
        _links.append(import_module("understudy.dataplane.transfer_queue.link").QueueLink.start(units=2))
        yield
    finally:
        for one in _links:
            one.close()
        _links.clear()
        cluster.close()


def _open_on_queue(path: Path, **settings: Any) -> DataPlane:
    plane = import_module("understudy.dataplane.transfer_queue.plane").TransferQueueDataPlane
    opened: DataPlane = plane.open_on(_links[0], path, **settings)
    return opened


def _everything_on_queue(path: Path, **settings: Any) -> DataPlane:
    """Small cells too, so that every read goes through the queue."""
    return _open_on_queue(path, inline_bytes=1, **settings)


IMPLEMENTATIONS: dict[str, Callable[..., DataPlane]] = {
    "embedded": EmbeddedDataPlane.open,
    "transfer_queue": _open_on_queue,
    "transfer_queue_all": _everything_on_queue,
}
ON_THE_QUEUE = ("transfer_queue", "transfer_queue_all")


def tokens(*values: int) -> dict[str, Any]:
    return {"tokens": np.array(values, np.int32)}


def keys(prompts: int, sessions: int = 1, start: int = 0) -> list[str]:
    return [f"{start + prompt:04d}_{session}_0" for prompt in range(prompts) for session in range(sessions)]


async def put_all(plane: Any, names: list[str], partition: str = "train", **columns: Any) -> None:
    for name in names:
        await plane.put(partition, {name: {**tokens(1, 2, 3), **columns}})


async def is_waiting(task: asyncio.Task[Any], turns: int = 20) -> bool:
    """Whether the task is still not done after many turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0.002)
        if task.done():
            return False
    return True
