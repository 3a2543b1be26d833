"""Runs uvicorn in a child process, on a socket that is bound already, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """Uvicorn with our own signal handlers: its own re-raise SIGTERM after the shutdown, which the launcher
    reads as a crash."""

    should_exit: bool
    hurried = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_stop)
        yield

    def _ask_to_stop(self) -> None:
        """The first signal waits for requests in flight, unless `hurried`; the second does not."""
        self.force_exit = self.should_exit or self.hurried
        self.should_exit = True


async def serve(
    app: ASGIApp, sock: socket.socket, on_ready: Callable[[], None], *, keep_alive: int, hurried: bool
) -> None:
    """Serves until SIGTERM or SIGINT. `hurried`: does not wait for requests in flight."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=None if hurried else 10,
    )
    server = _Server(config)
    server.hurried = hurried
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        on_ready()
    await serving
