"""HTTP rules common to our servers: token check, refusals, body limits, clients that disconnect.

A refusal is JSON {"error": {"kind", "message"}} with a 4xx status. No request can bring a server down.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from understudy.serving.bind import is_loopback
from understudy.serving.checksum import DAMAGED, HEADER, checksum, is_damaged

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


class Refused(Exception):
    """Raised by a handler to refuse a request, with the status and the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


def as_json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(status: int, kind: str, message: str) -> Response:
    return as_json({"error": {"kind": kind, "message": message}}, status)


class Gate:
    """ASGI middleware: passes requests that carry the token, and all requests for /health.

    Without a token (loopback only) the Host header must name loopback. This stops DNS rebinding: a web page
    whose host name resolves to this machine would send that name.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if self._expected is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
            if is_loopback(name):
                return None
            return refusal(403, "host", f"this server answers to loopback, not to {host!r}")
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return refusal(
                401, "token", "missing or wrong bearer token; send 'Authorization: Bearer <token>'"
            )
        return None


def answering(
    handler: Handler, *refused: tuple[type[Exception], int, str]
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Wraps a handler so that every error becomes a response: a refusal with its reason, else a 500 and a log
    entry.

    `refused` lists errors of the handler that are the client's fault as (type, status, kind); the first match
    is used.
    """

    async def answered(http: Request) -> Response:
        response = await attempted(http)
        response.headers[HEADER] = checksum(bytes(response.body))
        return response

    async def attempted(http: Request) -> Response:
        try:
            return await handler(http)
        except Refused as error:
            return refusal(error.status, error.kind, error.message)
        except ClientDisconnect:
            return refusal(400, "disconnected", "the client went away")
        except Exception as error:
            for kind_of_error, status, kind in refused:
                if isinstance(error, kind_of_error):
                    return refusal(status, kind, str(error))
            log.exception("%s failed", http.url.path)
            return refusal(500, "internal", f"{type(error).__name__}: {error}")

    return answered


async def unless_gone(http: Request, work: asyncio.Future[Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects first."""
    leaving = asyncio.ensure_future(_disconnected(http))
    waiting: Sequence[asyncio.Future[Any]] = [work, leaving]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        leaving.cancel()
        work.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def read_body(http: Request, most: int) -> bytes:
    """The whole body, never holding more than `most` bytes."""
    promised = http.headers.get("content-length", "0")
    if promised.isdigit() and int(promised) > most:
        raise Refused(413, "bytes", f"a request of {promised} bytes; at most {most} are taken")
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > most:
            raise Refused(413, "bytes", f"a request of more than {most} bytes")
        parts.append(part)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if is_damaged(http.headers, body):
        raise Refused(DAMAGED, "damaged", "the body is not the one that was sent; send it again")
    return body
