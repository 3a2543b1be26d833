"""Kept-alive connections to one server, as a transport for httpx whose cost does not grow with how many there are.

httpx's own pool looks at every connection (a system call each) and every waiting request whenever a request comes or goes. Rollouts and
scores come by the hundred: of 512 requests at once the event loop had nothing left for seconds. Here a request takes the connection
that was used last, or opens one, and puts it back. HTTP itself stays httpcore's.
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
    """`most` bounds how many are open at a time; further requests wait their turn, in the order they came. `uds` is the path of a
    Unix socket to speak through."""

    def __init__(self, *, uds: str | None = None, most: int | None = None, keepalive_s: float = 30.0) -> None:
        self._uds, self._keepalive_s = uds, keepalive_s
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)
        self._idle: deque[tuple[httpcore.AsyncHTTPConnection, float]] = deque()
        """With the time each came back; the newest last."""
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
        """Its answer has been read, or given up."""
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
        """Of those that nobody has needed for long, two at a time: one is added at a time."""
        for _ in range(2):
            if not self._idle or time.monotonic() - self._idle[0][1] < self._keepalive_s:
                return
            await self._idle.popleft()[0].aclose()

    async def _drop(self, connection: httpcore.AsyncHTTPConnection) -> None:
        self._busy.discard(connection)
        await connection.aclose()

    async def aclose(self) -> None:
        """Requests under way fail; one that is still connecting is let finish, and nothing of it is kept."""
        self._closed = True
        idle, busy = [connection for connection, _ in self._idle], list(self._busy)
        self._idle.clear()
        self._busy.clear()
        for connection in idle + busy:
            await connection.aclose()


class _Body(httpx.AsyncByteStream):
    """An answer's body, and whom to tell once it is no longer wanted."""

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
    """httpcore's errors have httpx's names. Of one that httpx has no name for (a connection was closed in the moment it was taken) a
    request that failed is made all the same: whoever asks knows no others."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("httpcore"):
            known = getattr(httpx, type(error).__name__, httpx.TransportError)
            raise known(str(error) or type(error).__name__) from error
        raise
