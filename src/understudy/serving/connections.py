"""Kept-alive connections to one server: an httpx transport with constant cost per request.

httpx's own pool looks at every connection (a system call each) and every waiting request whenever a request
starts or ends. Rollouts and scores come by the hundred: 512 requests at once blocked the event loop for
seconds. Here a request takes the connection that was used last, or opens one, and returns it afterwards. HTTP
itself is httpcore's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpcore
import httpx


class Connections(httpx.AsyncBaseTransport):
    """Idle and busy connections to one server; used by an httpx client on one event loop.

    `most` bounds the number of open connections; further requests wait in the order they came. `uds` is the
    path of a Unix socket to connect to.
    """

    def __init__(self, *, uds: str | None = None, most: int | None = None, keepalive_s: float = 30.0) -> None:
        self._uds, self._keepalive_s = uds, keepalive_s
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)
        self._idle: deque[tuple[httpcore.AsyncHTTPConnection, float]] = deque()
        """Each with the time it became idle; the newest last."""
        self._busy: set[httpcore.AsyncHTTPConnection] = set()
        self._closed = False
        self._tls: Any = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        asked = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        turn = self._turns
        await turn.__aenter__()
        try:
            connection = await self._take(asked.url.origin)
            self._busy.add(connection)
            try:
                with _in_words_of_httpx():
                    response = await connection.handle_async_request(asked)
            except BaseException:
                await self._drop(connection)
                raise
        except BaseException:
            await turn.__aexit__(None, None, None)
            raise
        body = _Body(response.stream, lambda: self._put_back(connection))
        return httpx.Response(
            response.status, headers=response.headers, stream=body, extensions=response.extensions
        )

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        if self._closed:
            raise httpx.CloseError("the connections were closed while this request waited for its turn")
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.can_handle_request(origin) and not connection.has_expired():
                return connection
            await connection.aclose()
        if origin.scheme == b"https" and self._tls is None:
            self._tls = httpx.create_ssl_context()
        return httpcore.AsyncHTTPConnection(
            origin, ssl_context=self._tls, keepalive_expiry=self._keepalive_s, uds=self._uds
        )

    async def _put_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        """Called when the response has been read or closed."""
        try:
            if connection.is_idle() and not self._closed:
                self._busy.discard(connection)
                self._idle.append((connection, time.monotonic()))
                await self._forget_old()
            else:
                await self._drop(connection)
        finally:
            await self._turns.__aexit__(None, None, None)

    async def _forget_old(self) -> None:
        """Closes up to two connections that have been idle too long.

        At most one is added per call, so none pile up.
        """
        for _ in range(2):
            if not self._idle or time.monotonic() - self._idle[0][1] < self._keepalive_s:
                return
            await self._idle.popleft()[0].aclose()

    async def _drop(self, connection: httpcore.AsyncHTTPConnection) -> None:
        self._busy.discard(connection)
        await connection.aclose()

    async def aclose(self) -> None:
        """Requests in flight fail. One that is still connecting may finish; its connection is then closed."""
        self._closed = True
        idle, busy = [connection for connection, _ in self._idle], list(self._busy)
        self._idle.clear()
        self._busy.clear()
        for connection in idle + busy:
            await connection.aclose()


class _Body(httpx.AsyncByteStream):
    """A response body that returns its connection when it is closed."""

    def __init__(self, stream: Any, over: Any) -> None:
        self._stream, self._over, self._closed = stream, over, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _in_words_of_httpx():
            async for part in self._stream:
                yield part

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with _in_words_of_httpx():
                await self._stream.aclose()
        finally:
            await self._over()


@contextmanager
def _in_words_of_httpx() -> Iterator[None]:
    """Raises httpcore's errors as httpx's of the same name, the only ones that callers handle.

    An error without a namesake in httpx (a connection closed at the moment it was taken) becomes a
    `TransportError`.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("httpcore"):
            known = getattr(httpx, type(error).__name__, httpx.TransportError)
            raise known(str(error) or type(error).__name__) from error
        raise
