"""Serves an application on a socket that is bound already, until a signal stops the process.

Connections that do not send a request head cannot block others: a head has a deadline, and the number
of connections is bounded below the limit of open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from understudy.serving.bind import url_of
from understudy.serving.process import Process

log = logging.getLogger(__name__)

HEAD_SECONDS = 20.0
"""How long a client may take to send the head of a request, from its first byte or from the connection."""
_OTHER_FILES = 128
"""Open files that are left for everything but connections."""
_MOST_CONNECTIONS = 16_384


class _Connection(H11Protocol):
    """Uvicorn's connection, closed if no head arrives in time.

    When all places are taken, a new connection takes the place of the one that has waited longest for a head;
    if none waits, it is refused.
    """

    limit = _MOST_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        if len(self.server_state.connections) >= self.limit:
            silent = [
                one
                for one in self.server_state.connections
                if isinstance(one, _Connection) and one._deadline is not None
            ]
            if not silent:
                transport.abort()
                return
            min(silent, key=lambda one: one._deadline.when() if one._deadline else 0.0)._abandon()
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self.transport is not None:  # None: it was refused
            super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._abandon)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abandon(self) -> None:
        self._stop_watching()
        self.transport.abort()


def _connection_limit() -> int:
    """Raises the limit of open files as far as this process may; returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS: less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(soft - _OTHER_FILES, soft // 2))


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
    server = _Server(_config(app, keep_alive, None if hurried else 10))
    server.hurried = hurried
    serving = await _started(server, sock)
    if not serving.done():
        process.ready(url=url_of(sock), **facts)
        log.info("%s at %s", what, url_of(sock))
    await serving


class _EmbeddedServer(uvicorn.Server):
    """A server in a process that has other work and its own signal handlers."""

    should_exit: bool

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_here(app: ASGIApp, sock: socket.socket) -> AsyncIterator[str]:
    """Serves on the running event loop, beside the process's other work. Yields the url."""
    server = _EmbeddedServer(_config(app, keep_alive=3600, grace_s=1))
    serving = await _started(server, sock)
    if serving.done():
        await serving
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        await serving


def _config(app: ASGIApp, keep_alive: int, grace_s: int | None) -> uvicorn.Config:
    """`grace_s`: seconds that requests in flight may take after a stop."""
    _Connection.limit = _connection_limit()
    return uvicorn.Config(
        app,
        http=_Connection,
        # asyncio accepts this many connections before it reports the first one.
        backlog=max(16, min(2048, _Connection.limit // 8)),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=grace_s,
    )


async def _started(server: uvicorn.Server, sock: socket.socket) -> asyncio.Task[None]:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    return serving
