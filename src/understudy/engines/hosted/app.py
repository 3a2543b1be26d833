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
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors import SafetensorError, safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from torch import Tensor

from understudy.engines.base import Engine, GenerateRequest, Generation
from understudy.engines.hosted.messages import (
    BROKEN_TRANSFER,
    CONTENT_TYPE,
    AbortOrder,
    MessageError,
    WeightsOrder,
    decode_call,
    encode_answer,
)
from understudy.errors import EngineError
from understudy.serving.http import Gate, Refused, answering, as_json, read_body, unless_gone
from understudy.weights.adapters import AdaptedModel, is_of_adapters
from understudy.weights.broadcast import Receiver, TransferBroken

MAX_CALL_BYTES = 1 << 30
_SNAPSHOT = re.compile(r"v-?\d{1,18}\.safetensors")
_LARGEST_ORDER = 4096
_LARGEST_WEIGHTS_ORDER = 16 << 20
"""Large, because it names every tensor of a broadcast."""
_REFUSED = (
    (MessageError, 400, "frame"),
    (TransferBroken, BROKEN_TRANSFER, "transfer"),
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
    ) -> None:
        """`adapted` wraps the engine's own model, if it accepts adapters without whole weights."""
        self._engine, self._weights, self._adapted = engine, weights, adapted
        self._receiver, self._receiving = Receiver(address, device), asyncio.Lock()
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
            ]
        )
        self.asgi: ASGIApp = Gate(app, token)

    async def generate(self, http: Request) -> Response:
        call, requests = decode_call(await read_body(http, MAX_CALL_BYTES))
        generations = await unless_gone(http, asyncio.ensure_future(self._written(call, requests)))
        return Response(encode_answer(self._engine.version, generations), media_type=CONTENT_TYPE)

    async def _written(self, call: int, requests: Sequence[GenerateRequest]) -> list[Generation]:
        if call <= self._aborted_through:  # the abort arrived before the call
            return [Generation.aborted() for _ in requests]
        return await self._engine.generate(requests)

    async def load_weights(self, http: Request) -> Response:
        order = await read_order(http, WeightsOrder, _LARGEST_WEIGHTS_ORDER)
        async with self._receiving:
            tensors: Iterable[tuple[str, Tensor]] = self._tensors(order.file)
            if order.stream is not None:
                # Decoding continues during the transfer; the weights are copied in once all have arrived.
                tensors = await asyncio.to_thread(self._receiver.receive, order.stream)
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

    def _tensors(self, file: str | None) -> Iterator[tuple[str, Tensor]]:
        """Reads a snapshot one tensor at a time, so that it is never in memory twice."""
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


async def read_order(http: Request, kind: type[Order], most: int = _LARGEST_ORDER) -> Order:
    body = await read_body(http, most)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise MessageError(f"expected a {kind.__name__} as JSON: {error}") from error
