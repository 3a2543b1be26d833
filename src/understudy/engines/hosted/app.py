"""The HTTP application of an engine process: routes, authentication, refusals.

    POST /v1/generate   one composed batch in, its generations in the same order out (frames of `messages.py`)
    POST /v1/weights    loads a snapshot from the shared folder, or receives a broadcast, under a new version
    POST /v1/pause      answered once no token is being computed
    POST /v1/resume
    POST /v1/abort      ends every call up to the one named
    GET  /health        the only route that needs no token

Refusals are JSON {"error": {"kind", "message"}} with a 4xx. No input ends the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp
from torch import Tensor

from understudy.engines.base import Engine, EngineClosed, GenerateRequest, Generation
from understudy.engines.hosted.messages import (
    CLOSED,
    CONTENT_TYPE,
    AbortOrder,
    MessageError,
    decode_call,
    encode_answer,
)
from understudy.errors import EngineError
from understudy.serving.http import Gate, answering, as_json, read_body, unless_gone
from understudy.weights.adapters import AdaptedModel, is_of_adapters
from understudy.weights.broadcast import TransferBroken
from understudy.weights.orders import BROKEN_TRANSFER, LARGEST_ORDER, OrderedWeights, WeightsOrder

MAX_CALL_BYTES = 1 << 30
_LARGEST_SHORT_ORDER = 4096
"""Bytes of an order without a list of tensors. Orders of weights may have `LARGEST_ORDER`."""
_REFUSED = (
    (MessageError, 400, "frame"),
    (TransferBroken, BROKEN_TRANSFER, "transfer"),
    (EngineClosed, CLOSED, "closed"),
    (EngineError, 422, "engine"),
)


Order = TypeVar("Order")


class HostApp:
    """One engine behind HTTP. Handlers run on the server's event loop.

    `weights` is the only folder that snapshots are read from. `address` is this process's address in a
    broadcast group. With NCCL, broadcasts pass through memory of `device`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token: str | None,
        weights: Path | None,
        address: str = "127.0.0.1",
        device: str = "cpu",
        adapted: AdaptedModel | None = None,
        beside: Sequence[tuple[str, ASGIApp]] = (),
    ) -> None:
        """`adapted` wraps the engine's own model, if it accepts adapters without whole weights. `beside`: further
        applications, by the prefix of their paths."""
        self._engine, self._adapted = engine, adapted
        self._incoming, self._receiving = OrderedWeights(weights, address, device), asyncio.Lock()
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
                *(
                    Route(path, answering(handler, *_REFUSED), methods=["POST"])
                    for path, handler in routes.items()
                ),
                Route("/health", answering(self.health, *_REFUSED)),
                *(Mount(prefix, one) for prefix, one in beside),
            ]
        )
        self.asgi: ASGIApp = Gate(app, token)

    async def generate(self, http: Request) -> Response:
        call, requests = decode_call(await read_body(http, MAX_CALL_BYTES))
        generations = await unless_gone(http, asyncio.ensure_future(self._generated(call, requests)))
        return Response(encode_answer(self._engine.version, generations), media_type=CONTENT_TYPE)

    async def _generated(self, call: int, requests: Sequence[GenerateRequest]) -> list[Generation]:
        if call <= self._aborted_through:  # the abort arrived before the call
            return [Generation.aborted() for _ in requests]
        return await self._engine.generate(requests)

    async def load_weights(self, http: Request) -> Response:
        order = await read_order(http, WeightsOrder, LARGEST_ORDER)
        async with self._receiving:
            # Decoding continues during a transfer; the weights are copied in once all have arrived.
            tensors = await self._incoming.tensors(order)
            await self._engine.update_weights(order.version, await asyncio.to_thread(self._whole, tensors))
        return as_json({"version": self._engine.version})

    def _whole(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Whole weights unchanged; adapters merged into their base."""
        coming = iter(tensors)
        first = next(coming, None)
        if self._adapted is None or first is None:
            return () if first is None else chain([first], coming)
        if is_of_adapters(first[0]):
            return self._adapted.weights([first, *coming])
        self._adapted.replaced()
        return chain([first], coming)

    async def pause(self, _: Request) -> Response:
        await self._engine.pause()
        return as_json({})

    async def resume(self, _: Request) -> Response:
        await self._engine.resume()
        return as_json({})

    async def abort(self, http: Request) -> Response:
        order = await read_order(http, AbortOrder)
        self._aborted_through = max(self._aborted_through, order.through)
        await self._engine.abort()
        return as_json({})

    async def health(self, _: Request) -> Response:
        return as_json({"status": "ok", "version": self._engine.version})


async def read_order(http: Request, kind: type[Order], most: int = _LARGEST_SHORT_ORDER) -> Order:
    body = await read_body(http, most)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise MessageError(f"expected a {kind.__name__} as JSON: {error}") from error
