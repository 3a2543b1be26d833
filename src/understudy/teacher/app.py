"""The HTTP face of a replica: who may ask, what is refused, and how.

    POST /v1/score        a request frame in, a reply frame out
    GET  /v1/head         the output projection, once per client that asks for `hidden`
    GET  /v1/vocabulary   the token→id map, JSON
    GET  /manifest        what this replica is, JSON
    GET  /metrics         Prometheus text
    GET  /health          the only route that needs no token

Refusals are JSON {"error": {"kind", "message"}} with a 4xx; the server stays up whatever it is sent.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from understudy.teacher.head_frame import encode_head
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.prometheus import replica_metrics
from understudy.teacher.protocol import (
    CONTENT_TYPE,
    ProtocolError,
    ScoreReply,
    ScoreRequest,
    decode_request,
    encode_reply,
)
from understudy.teacher.vocabulary import Vocabulary
from understudy.teacher.worker import ScoringWorker
from understudy.types.scores import Signal

log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that will not be served, with the status and the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


def refusal(status: int, kind: str, message: str) -> Response:
    body = msgspec.json.encode({"error": {"kind": kind, "message": message}})
    return Response(body, status, media_type="application/json")


class Gate:
    """Lets a request pass that carries the token, or asks for /health.

    Without a token (loopback only) the request must at least be addressed to this machine: a web page that makes its
    own name point here would carry that name in the Host header.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        await (refused or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if self.expected is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
            return (
                None
                if is_loopback(name)
                else refusal(403, "host", f"this server answers to loopback, not to {host!r}")
            )
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return refusal(
                401, "token", "missing or wrong bearer token; send 'Authorization: Bearer <token>'"
            )
        return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_app(
    worker: ScoringWorker, manifest: Manifest, vocabulary: Vocabulary, token: str | None
) -> ASGIApp:
    limits = manifest.limits

    async def score(http: Request) -> Response:
        body = await read_body(http, limits.max_request_bytes)
        request = decode_request(body)
        check_limits(request, limits, manifest.vocab_size)
        try:
            reply = await unless_gone(http, asyncio.wrap_future(worker.submit(request)))
        except (MemoryError, RuntimeError) as error:
            raise Refused(503, "scoring", f"scoring failed: {error}") from error
        return Response(encode_reply(reply), media_type=CONTENT_TYPE)

    async def head(_: Request) -> Response:
        frame = await run_in_threadpool(lambda: encode_head(worker.scorer.wire_head))
        return Response(frame, media_type=CONTENT_TYPE)

    async def show_vocabulary(_: Request) -> Response:
        body = msgspec.json.encode({"ids": vocabulary.ids, "special": vocabulary.special})
        return Response(body, media_type="application/json")

    async def show_manifest(_: Request) -> Response:
        return Response(msgspec.json.encode(manifest), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(
            replica_metrics(worker.counts, manifest.teacher), media_type="text/plain; version=0.0.4"
        )

    async def health(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    app = Starlette(
        routes=[
            Route("/v1/score", answering(score), methods=["POST"]),
            Route("/v1/head", answering(head)),
            Route("/v1/vocabulary", answering(show_vocabulary)),
            Route("/manifest", answering(show_manifest)),
            Route("/metrics", answering(metrics)),
            Route("/health", answering(health)),
        ]
    )
    return Gate(app, token)


Endpoint = Callable[[Request], Awaitable[Response]]


def answering(endpoint: Endpoint) -> Endpoint:
    """Every outcome becomes a response: refusals with their reason, surprises with a 500 and a log entry."""

    async def answered(http: Request) -> Response:
        try:
            return await endpoint(http)
        except Refused as error:
            return refusal(error.status, error.kind, error.message)
        except ProtocolError as error:
            return refusal(400, "frame", str(error))
        except ClientDisconnect:
            return refusal(400, "disconnected", "the client went away")
        except Exception as error:
            log.exception("%s failed", http.url.path)
            return refusal(500, "internal", f"{type(error).__name__}: {error}")

    return answered


async def unless_gone(http: Request, scoring: asyncio.Future[ScoreReply]) -> ScoreReply:
    """The reply, unless the client hangs up first: then its place in the queue is given up."""
    leaving = asyncio.create_task(_hung_up(http))
    waiting: list[asyncio.Future[Any]] = [scoring, leaving]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            scoring.cancel()
            raise ClientDisconnect
        return scoring.result()
    finally:
        leaving.cancel()


async def _hung_up(http: Request) -> None:
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
    return parts[0] if len(parts) == 1 else b"".join(parts)


def check_limits(request: ScoreRequest, limits: Limits, vocab: int) -> None:
    """Everything a well-formed frame can still ask wrongly."""
    if not len(request):
        raise Refused(400, "empty", "a request needs at least one sequence")
    longest = int(request.token_counts_N.argmax())
    if request.token_counts_N[longest] > limits.max_length:
        raise Refused(
            413,
            "length",
            f"row {request.keys[longest]!r} has {request.token_counts_N[longest]} tokens; "
            f"a sequence may have {limits.max_length}",
        )
    if len(request.tokens_T) > limits.max_request_tokens:
        raise Refused(
            413,
            "tokens",
            f"a request of {len(request.tokens_T)} tokens; at most {limits.max_request_tokens} are taken",
        )
    widest = max(request.k_N)
    if widest > min(limits.max_k, vocab):
        raise Refused(
            400, "k", f"K = {widest}; at most {limits.max_k} are given, and the vocabulary has {vocab} tokens"
        )
    check_ids(request, vocab)
    columns = np.array(request.k_N, dtype=np.int64)
    reply_bytes = int((request.position_counts_N * (8 + 8 * columns)).sum())
    if reply_bytes > limits.max_reply_bytes:
        raise Refused(
            413,
            "reply",
            f"the reply would have {reply_bytes} bytes; at most {limits.max_reply_bytes} are sent",
        )


def check_ids(request: ScoreRequest, vocab: int) -> None:
    outside = (request.tokens_T < 0) | (request.tokens_T >= vocab)
    if outside.any():
        at = int(outside.argmax())
        row = int(np.searchsorted(np.cumsum(request.token_counts_N, dtype=np.int64), at, side="right"))
        raise Refused(
            400,
            "ids",
            f"row {request.keys[row]!r}: token id {request.tokens_T[at]} at position {at - int(request.starts_N[row])} "
            f"is outside this teacher's vocabulary of {vocab}",
        )
    named = (request.ids < 0) | (request.ids >= vocab)
    if named.any():
        rows = [
            key for key, signal in zip(request.keys, request.signals, strict=True) if signal is Signal.AT_IDS
        ]
        raise Refused(
            400,
            "ids",
            f"id {request.ids[int(named.argmax())]} named for 'at_ids' (rows {rows[0]!r} …) "
            f"is outside this teacher's vocabulary of {vocab}",
        )
