"""The HTTP face of an engine process: who may ask, what is refused, and how.

    POST /v1/generate   one composed batch in, its generations in the same order out (frames of `host_wire`)
    POST /v1/weights    load a snapshot from the folder both sides know, under a new version
    POST /v1/pause      answered once no token is being computed       POST /v1/resume
    POST /v1/abort      ends every call up to the one named
    GET  /health        the only route that needs no token

Refusals are JSON {"error": {"kind", "message"}} with a 4xx; the server stays up whatever it is sent.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from understudy.engines.base import Engine, Generation
from understudy.engines.host_wire import (
    CONTENT_TYPE,
    AbortOrder,
    FrameError,
    WeightsOrder,
    decode_call,
    encode_answer,
)
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 1 << 30
_SNAPSHOT = re.compile(r"v-?\d{1,18}\.safetensors")
_LARGEST_ORDER = 4096
Handler = Callable[[Request], Awaitable[Response]]
Order = TypeVar("Order")


class Refused(Exception):
    """A request that will not be served, with the status and the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


class HostApp:
    """One engine behind HTTP. `weights` is the only folder snapshots are read from."""

    def __init__(self, engine: Engine, *, token: str | None, weights: Path | None) -> None:
        self._engine, self._weights = engine, weights
        self._aborted_through = -1
        routes = {
            "/v1/generate": self.generate,
            "/v1/weights": self.load_weights,
            "/v1/pause": self.pause,
            "/v1/resume": self.resume,
            "/v1/abort": self.abort,
        }
        app = Starlette(
            routes=[
                *(Route(path, answering(handler), methods=["POST"]) for path, handler in routes.items()),
                Route("/health", answering(self.health)),
            ]
        )
        self.asgi: ASGIApp = _Gate(app, token)

    async def generate(self, http: Request) -> Response:
        call, requests = decode_call(await read_body(http, MAX_CALL_BYTES))
        if call <= self._aborted_through:  # the abort overtook it on the way
            generations = [_nothing_written() for _ in requests]
        else:
            generations = await unless_gone(http, asyncio.ensure_future(self._engine.generate(requests)))
        return Response(encode_answer(self._engine.version, generations), media_type=CONTENT_TYPE)

    async def load_weights(self, http: Request) -> Response:
        order = await read_order(http, WeightsOrder)
        await self._engine.update_weights(order.version, self._tensors(order.file))
        return _json({"version": self._engine.version})

    def _tensors(self, file: str | None) -> Iterator[tuple[str, Tensor]]:
        """One tensor after another, so that a snapshot is never held twice."""
        if file is None:
            return
        if self._weights is None or not _SNAPSHOT.fullmatch(file):
            raise Refused(400, "weights", f"{file!r} is no snapshot in this engine's weights folder")
        try:
            with safe_open(self._weights / file, framework="pt", device="cpu") as snapshot:
                for name in snapshot.keys():  # noqa: SIM118 - not a mapping
                    yield name, snapshot.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the snapshot {file} cannot be read: {error}") from error

    async def pause(self, _: Request) -> Response:
        await self._engine.pause()
        return _json({})

    async def resume(self, _: Request) -> Response:
        await self._engine.resume()
        return _json({})

    async def abort(self, http: Request) -> Response:
        order = await read_order(http, AbortOrder)
        self._aborted_through = max(self._aborted_through, order.through)
        await self._engine.abort()
        return _json({})

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok", "version": self._engine.version})


def _nothing_written() -> Generation:
    ids, logprobs = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    return Generation(ids, logprobs, ids, StopReason.ABORTED)


class _Gate:
    """Lets a request pass that carries the token, or asks for /health.

    Without a token (loopback only) the request must at least be addressed to this machine: a web page that makes its
    own name point here would carry that name in the Host header.
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


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal(status: int, kind: str, message: str) -> Response:
    return _json({"error": {"kind": kind, "message": message}}, status)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def answering(handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Every outcome becomes a response: refusals with their reason, surprises with a 500 and a log entry."""

    async def answered(http: Request) -> Response:
        try:
            return await handler(http)
        except Refused as error:
            return refusal(error.status, error.kind, error.message)
        except FrameError as error:
            return refusal(400, "frame", str(error))
        except EngineError as error:
            return refusal(422, "engine", str(error))
        except ClientDisconnect:
            return refusal(400, "disconnected", "the client went away")
        except Exception as error:
            log.exception("%s failed", http.url.path)
            return refusal(500, "internal", f"{type(error).__name__}: {error}")

    return answered


async def unless_gone(http: Request, writing: asyncio.Future[list[Generation]]) -> list[Generation]:
    """The generations, unless the client hangs up first: then the engine stops writing for it."""
    leaving = asyncio.ensure_future(_hung_up(http))
    waiting: list[asyncio.Future[Any]] = [writing, leaving]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise ClientDisconnect
        return writing.result()
    finally:
        leaving.cancel()
        writing.cancel()


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def read_order(http: Request, kind: type[Order]) -> Order:
    body = await read_body(http, _LARGEST_ORDER)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"expected a {kind.__name__} as JSON: {error}") from error


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
    return parts[0] if len(parts) == 1 else b"".join(parts)
