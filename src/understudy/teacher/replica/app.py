"""The HTTP routes of a replica, and the limits it enforces.

    POST /v1/score        a request frame in, a reply frame out
    POST /v1/media        a picture's bytes in, its hash out; /v1/media/missing says which to send (`media.py`)
    GET  /v1/head         the output projection, once per client that asks for `hidden`
    GET  /v1/vocabulary   the token→id map, JSON
    GET  /manifest        what this replica is, JSON
    GET  /metrics         Prometheus text
    POST /v1/weights      new weights of a teacher that follows the student (`weights/orders.py`)
    GET  /health          the only route that needs no token

A refusal is JSON {"error": {"kind", "message"}} with a 4xx status. No request can bring the server down.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from understudy.errors import DataError
from understudy.serving.http import Gate, Handler, Refused, answering, as_json, read_body, unless_gone
from understudy.teacher.head_frame import encode_head
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.protocol import (
    CONTENT_TYPE,
    MISSING_MEDIA,
    ProtocolError,
    ScoreRequest,
    decode_request,
    encode_reply,
)
from understudy.teacher.replica.follower import REFUSED, Follower
from understudy.teacher.replica.media import ReplicaMedia
from understudy.teacher.replica.prometheus import replica_metrics
from understudy.teacher.replica.scoring_queue import ScoringWorker
from understudy.teacher.vocabulary import Vocabulary
from understudy.types.scores import Signal


def build_app(
    worker: ScoringWorker,
    manifest: Manifest,
    vocabulary: Vocabulary,
    token: str | None,
    follower: Follower | None = None,
    media: ReplicaMedia | None = None,
) -> ASGIApp:
    """`follower` changes the weights on request; None: they are frozen, and there is no such route. `media`:
    for a teacher that reads pictures."""
    limits = manifest.limits

    async def score(http: Request) -> Response:
        body = await read_body(http, limits.max_request_bytes)
        request = decode_request(body)
        check_limits(request, limits, manifest.vocab_size)
        check_media(request, media)
        try:
            reply = await unless_gone(http, asyncio.wrap_future(worker.submit(request)))
        except DataError as error:
            raise Refused(400, "media", str(error)) from error
        except (MemoryError, RuntimeError) as error:
            raise Refused(503, "scoring", f"scoring failed: {error}") from error
        return Response(encode_reply(reply), media_type=CONTENT_TYPE)

    async def missing(http: Request) -> Response:
        try:
            asked = msgspec.json.decode(await read_body(http, limits.max_request_bytes), type=MediaQuestion)
        except msgspec.DecodeError as error:
            raise Refused(400, "media", f"unreadable question: {error}") from error
        return as_json({"missing": [] if media is None else media.missing(asked.hashes)})

    async def add_media(http: Request) -> Response:
        if media is None:
            raise Refused(400, "media", f"teacher {manifest.teacher} reads text only")
        data = await read_body(http, media.limits.max_bytes)
        try:
            return as_json({"hash": await run_in_threadpool(media.put, data)})
        except DataError as error:
            raise Refused(400, "media", str(error)) from error

    async def head(_: Request) -> Response:
        frame = await run_in_threadpool(lambda: encode_head(worker.scorer.wire_head))
        return Response(frame, media_type=CONTENT_TYPE)

    async def show_vocabulary(_: Request) -> Response:
        return as_json({"ids": vocabulary.ids, "special": vocabulary.special})

    async def show_manifest(_: Request) -> Response:
        return as_json(manifest if follower is None else follower.manifest)

    async def metrics(_: Request) -> Response:
        return Response(
            replica_metrics(worker.counts, manifest.teacher), media_type="text/plain; version=0.0.4"
        )

    async def health(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    shown: dict[str, Handler] = {
        "/v1/head": head,
        "/v1/vocabulary": show_vocabulary,
        "/manifest": show_manifest,
        "/metrics": metrics,
        "/health": health,
    }
    routes = [Route(path, answering(handler)) for path, handler in shown.items()]
    scoring = answering(score, (ProtocolError, 400, "frame"))
    routes += [
        Route(path, answering(handler), methods=["POST"])
        for path, handler in {"/v1/media/missing": missing, "/v1/media": add_media}.items()
    ]
    routes.append(Route("/v1/score", scoring, methods=["POST"]))
    if follower is not None:
        routes.append(Route("/v1/weights", answering(follower.take, *REFUSED), methods=["POST"]))
    app = Starlette(routes=routes)
    return Gate(app, token)


class MediaQuestion(msgspec.Struct):
    """`POST /v1/media/missing`."""

    hashes: list[str]


def check_media(request: ScoreRequest, media: ReplicaMedia | None) -> None:
    """Refuse a request with pictures that are not here."""
    names = [name for own in request.media for name in own]
    if not names:
        return
    if media is None:
        raise Refused(400, "media", "a request with pictures; this teacher reads text only")
    if gone := media.missing(names):
        raise Refused(MISSING_MEDIA, "media", f"{len(gone)} picture(s) are not here, the first {gone[0]}")


def check_limits(request: ScoreRequest, limits: Limits, vocab: int) -> None:
    """Refuse a well-formed request that is beyond the limits.

    Ids must be below `vocab` and the request's own limit.
    """
    count = vocab
    if request.usable is not None:
        vocab = min(vocab, request.usable.limit)
        count = min(vocab, request.usable.count)
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
    best = max(
        (k for k, one in zip(request.k_N, request.signals, strict=True) if one is Signal.TOPK), default=0
    )
    widest = max(request.k_N)
    if widest > limits.max_k or best > count:  # named ids may repeat
        raise Refused(
            400, "k", f"K = {widest}; at most {limits.max_k} are given, and the vocabulary has {count} tokens"
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
