"""The HTTP client of one server, and the errors of talking to it.

    ServerError
    ├── ServerGone      no connection, a broken one, a damaged body, or the client was closed: the request may go elsewhere
    ├── ServerTimeout   connected, and no whole answer within the deadline
    ├── ServerRefused   4xx: the request is at fault
    └── ServerFailed    any other status

A role gives them its own classes: `gone`, `timeout` and `refusal` of a subclass. HTTP is aiohttp's: a request
costs a quarter of httpx's CPU time and no more with hundreds at once (docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from understudy.errors import UnderstudyError
from understudy.serving.checksum import DAMAGED, HEADER, checksum, is_damaged
from understudy.serving.endpoint import Endpoint

JSON = "application/json"
_KEEP_ALIVE_S = 30.0
_READ_BYTES = 1 << 20
_ASK_TO_WAIT = (429, 503)
"""Statuses whose `Retry-After` header is read."""


class ServerError(UnderstudyError):
    """A request to a server failed."""


class ServerGone(ServerError):
    """There is no connection to the server: its process or machine is gone, or the client was closed."""


class ServerTimeout(ServerError):
    """The server did not answer within the deadline."""


class ServerRefused(ServerError):
    """The server refused the request (4xx)."""


class ServerFailed(ServerError):
    """The server answered that it could not carry out the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's whole answer."""

    status: int
    body: bytes
    kind: str
    """Its content type."""
    retry_after: float | None = None
    """Seconds that a busy server (429, 503) asks to wait before the next request; None if it names no time."""

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    @property
    def ours(self) -> bool:
        """Whether it is a refusal of our servers (`serving/http.py`)."""
        error = self._error()
        return isinstance(error, dict) and "message" in error

    @property
    def has_kind(self) -> bool:
        """Whether a refusal has our servers' form (`kind` and `message`), which other servers' refusals lack."""
        error = self._error()
        return isinstance(error, dict) and {"kind", "message"} <= error.keys()

    @property
    def reason(self) -> str:
        """The message of an error in one of the usual JSON shapes, else the start of the body."""
        error = self._error()
        if isinstance(error, dict):
            error = error.get("message")
        return re.sub(r"\s+", " ", self.text[:200]) if error is None else str(error)

    def _error(self) -> Any:
        try:
            answer: Any = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return answer.get("error", answer) if isinstance(answer, dict) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds of a `Retry-After` header: a number, or a date, which is compared with the server's own clock (`Date`)."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    until = _seconds_of(value)
    if until is None:
        return None
    now = _seconds_of(headers.get("Date", ""))
    return max(0.0, until - (time.time() if now is None else now))


def _seconds_of(date: str) -> float | None:
    try:
        found = parsedate_to_datetime(date)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


class ServerClient:
    """Kept-alive connections to one server, and its name in errors. Used on one event loop.

    `most` bounds the requests under way; further ones wait in the order they came. `connect_s` bounds a
    connection attempt. `timeout_s` is the deadline of a whole exchange, unless a request has its own; None: no
    deadline, for servers whose processes are monitored otherwise (`give_up`). `by_proxy`: through the proxy
    that the environment names, if it does.
    """

    gone: type[UnderstudyError] = ServerGone
    timeout: type[UnderstudyError] = ServerTimeout

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        *,
        most: int | None = None,
        connect_s: float | None = 10.0,
        timeout_s: float | None = None,
        keep_alive_s: float = _KEEP_ALIVE_S,
        by_proxy: bool = False,
    ) -> None:
        self.name, self.endpoint = name, endpoint
        self._url = endpoint.url.rstrip("/")
        self._connect_s, self._timeout_s = connect_s, timeout_s
        self._keep_alive_s, self._by_proxy = keep_alive_s, by_proxy
        self._turns: AbstractAsyncContextManager[Any] = (
            nullcontext() if most is None else asyncio.Semaphore(most)
        )
        self._session: aiohttp.ClientSession | None = None
        self._under_way: set[asyncio.Timeout] = set()
        self._given_up: str | None = None

    async def ask(
        self,
        path: str,
        body: bytes | None = None,
        kind: str = JSON,
        *,
        method: str = "POST",
        timeout_s: float | None = None,
    ) -> Reply:
        """The reply of a request that succeeded (2xx)."""
        reply = await self.request(path, body, kind, method=method, timeout_s=timeout_s)
        if not 200 <= reply.status < 300:
            raise self.refusal(path, reply)
        return reply

    async def request(
        self,
        path: str,
        body: bytes | None = None,
        kind: str | None = JSON,
        *,
        method: str = "POST",
        timeout_s: float | None = None,
    ) -> Reply:
        """The reply, whatever its status. Raises `gone` or `timeout`."""
        seconds = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(None) as scope:
                self._under_way.add(scope)
                try:
                    async with self._turns:
                        if seconds is not None:  # waiting for the turn does not count
                            scope.reschedule(asyncio.get_running_loop().time() + seconds)
                        return await self._exchange(method, path, body, kind)
                finally:
                    self._under_way.discard(scope)
        except (aiohttp.ClientError, OSError) as error:  # aiohttp's timeout of a connection is both
            if self._given_up is not None:
                raise self.gone(self._given_up) from error
            late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)
            if late and seconds is not None:
                raise self.timeout(f"{self.name}: no answer to {path} within {seconds:.1f} s") from error
            raise self.gone(f"{self.name}: {path} failed: {type(error).__name__}: {error}") from error
        except ValueError as error:  # a port above 65535, a host name that is none, a token beside a password
            raise self.gone(f"{self.name}: {path} failed: its address cannot be used: {error}") from error

    async def _exchange(self, method: str, path: str, body: bytes | None, kind: str | None) -> Reply:
        if self._given_up is not None:
            raise ConnectionError(self._given_up)
        headers = {} if body is None or kind is None else {"Content-Type": kind}
        if body is not None:
            headers[HEADER] = checksum(body)
        # Redirects are not followed: they would carry the token to another server.
        async with self._open().request(
            method, URL(self._url + path, encoded=True), data=body, headers=headers, allow_redirects=False
        ) as response:
            answer = await response.read()
            if response.status == DAMAGED or is_damaged(response.headers, answer):
                which = "request" if response.status == DAMAGED else "answer"
                raise ConnectionError(f"the body of the {which} was damaged on its way")
            wait = retry_after(response.headers) if response.status in _ASK_TO_WAIT else None
            return Reply(response.status, answer, response.headers.get("Content-Type", JSON), wait)

    def _open(self) -> aiohttp.ClientSession:
        """The session, made at the first request: it belongs to the event loop of the requests."""
        if self._session is None:
            socket, keep = self.endpoint.socket, self._keep_alive_s
            connector: aiohttp.BaseConnector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=keep)
                if socket is None
                else aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=keep)
            )
            token = self.endpoint.token
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={"Authorization": f"Bearer {token}"} if token else None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BYTES,
                trust_env=self._by_proxy,
            )
        return self._session

    def refusal(self, path: str, reply: Reply) -> UnderstudyError:
        """The error of a reply that is not a success."""
        kind, what = (ServerRefused, "refused") if 400 <= reply.status < 500 else (ServerFailed, "failed")
        return kind(f"{self.name}: {path} {what} ({reply.status}): {reply.reason}")

    async def answers(self, within: float, path: str = "/health") -> bool:
        """Whether the server answers a health check now, in any way but with a failure of its own (5xx)."""
        try:
            return (await self.request(path, method="GET", timeout_s=within)).status < 500
        except UnderstudyError:
            return False

    def give_up(self, problem: str) -> None:
        """Fails all pending and later requests: a dead machine does not close its connections."""
        self._given_up = self._given_up or problem
        for scope in self._under_way:
            if not scope.expired():
                scope.reschedule(0.0)

    async def close(self) -> None:
        """Requests under way fail."""
        self.give_up(f"{self.name}: its connections were closed while a request waited")
        if self._session is not None:
            await self._session.close()
