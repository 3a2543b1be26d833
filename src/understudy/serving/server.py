"""Serves an application on a socket that is bound already, until a signal stops the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from understudy.serving.bind import url_of
from understudy.serving.process import Process

log = logging.getLogger(__name__)


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
    process: Process,
    app: ASGIApp,
    sock: socket.socket,
    *,
    what: str,
    keep_alive: int = 3600,
    hurried: bool = True,
    **facts: Any,
) -> None:
    """Serves until SIGTERM or SIGINT. The ready file holds the url and `facts`; the log says `what` is there.

    `hurried`: requests in flight are not waited for, because the launcher needs no more answers.
    """
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
        process.ready(url=url_of(sock), **facts)
        log.info("%s at %s", what, url_of(sock))
    await serving
