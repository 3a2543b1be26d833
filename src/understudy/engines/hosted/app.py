"""The HTTP application of an engine process: routes, authentication, refusals.

    POST /v1/generate   one composed batch in, its generations in the same order out (frames of `messages.py`)
    POST /v1/compose    one batch by its keys; answered when it has been generated
    POST /v1/deposit    one request of such a batch, sent by a rollout worker; answered with its generation
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
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
    GIVEN_UP,
    AbortOrder,
    Composed,
    ComposeOrder,
    FrameError,
    WeightsOrder,
    decode_call,
    encode_answer,
)
from understudy.engines.remote_tokens import CallGivenUp
from understudy.errors import EngineError
from understudy.serving.http import Gate, Refused, answering, as_json, read_body, unless_gone
from understudy.types.trajectory import StopReason
from understudy.weights.adapters import AdaptedModel, is_of_adapters
from understudy.weights.broadcast import Receiver, TransferBroken

Write = Callable[[int, Sequence[GenerateRequest]], Awaitable[list[Generation]]]


@dataclass(slots=True)
class _Deposit:
    """One worker's request, and the future of its generation."""

    request: GenerateRequest
    answer: asyncio.Future[Generation]


@dataclass(slots=True)
class _Composition:
    """One batch: the deposits that have arrived so far, by key."""

    deposits: dict[str, _Deposit] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every deposit."""
    composed: bool = False
    begun: bool = False


class Compositions:
    """Batches that wait for workers' requests, by call number. Used on the event loop only."""

    def __init__(self, write: Write) -> None:
        """`write` generates: it takes a call's number and its batch."""
        self._write = write
        self._calls: dict[int, _Composition] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def deposit(self, call: int, request: GenerateRequest) -> Generation:
        """Adds one request to a call and returns its generation."""
        one = self._calls.setdefault(call, _Composition())
        if request.key in one.deposits:
            raise FrameError(f"{request.key} was brought to call {call} already")
        deposit = _Deposit(request, asyncio.get_running_loop().create_future())
        one.deposits[request.key] = deposit
        one.came.set()
        try:
            return await deposit.answer
        finally:
            if not one.begun:
                one.deposits.pop(request.key, None)
                if not one.deposits and not one.composed:
                    self._calls.pop(call, None)

    async def run(self, order: ComposeOrder) -> list[str]:
        """Waits for the deposits and generates the batch. Returns the keys that did not arrive in time."""
        if len(set(order.keys)) != len(order.keys) or not order.keys:
            raise FrameError(f"call {order.call} names {len(order.keys)} keys; expected some, each once")
        one = self._calls.setdefault(order.call, _Composition())
        if one.composed:
            raise FrameError(f"call {order.call} was composed already")
        one.composed = True
        try:
            try:
                async with asyncio.timeout(order.patience_s):
                    while set(order.keys) - one.deposits.keys():
                        one.came.clear()
                        await one.came.wait()
            except TimeoutError:
                return [key for key in order.keys if key not in one.deposits]
            one.begun = True
            deposits = [one.deposits[key] for key in order.keys]
            generations = await self._write(order.call, [deposit.request for deposit in deposits])
            for deposit, generation in zip(deposits, generations, strict=True):
                if not deposit.answer.done():
                    deposit.answer.set_result(generation)
            return []
        finally:
            self._calls.pop(order.call, None)
            for deposit in one.deposits.values():
                if not deposit.answer.done():
                    deposit.answer.set_exception(CallGivenUp(f"call {order.call} was given up"))


MAX_CALL_BYTES = 1 << 30
_SNAPSHOT = re.compile(r"v-?\d{1,18}\.safetensors")
_LARGEST_ORDER = 4096
_LARGEST_WEIGHTS_ORDER = 16 << 20
"""Large, because it names every tensor of a broadcast."""
_LARGEST_COMPOSE_ORDER = 16 << 20
"""Large, because it names every row of a batch."""
_REFUSED = (
    (FrameError, 400, "frame"),
    (TransferBroken, BROKEN_TRANSFER, "transfer"),
    (CallGivenUp, GIVEN_UP, "call"),
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
        self._compositions = Compositions(self._written)
        routes = {
            "/v1/generate": self.generate,
            "/v1/compose": self.compose,
            "/v1/deposit": self.deposit,
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
            return [_nothing_written() for _ in requests]
        return await self._engine.generate(requests)

    async def compose(self, http: Request) -> Response:
        order = await read_order(http, ComposeOrder, _LARGEST_COMPOSE_ORDER)
        missing = await unless_gone(http, asyncio.ensure_future(self._compositions.run(order)))
        return as_json(Composed(missing))

    async def deposit(self, http: Request) -> Response:
        call, requests = decode_call(await read_body(http, MAX_CALL_BYTES))
        if len(requests) != 1:
            raise FrameError(f"{len(requests)} requests in one deposit; expected 1")
        bringing = asyncio.ensure_future(self._compositions.deposit(call, requests[0]))
        written = await unless_gone(http, bringing)
        return Response(encode_answer(self._engine.version, [written]), media_type=CONTENT_TYPE)

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


def _nothing_written() -> Generation:
    ids, logprobs = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    return Generation(ids, logprobs, ids, StopReason.ABORTED)


async def read_order(http: Request, kind: type[Order], most: int = _LARGEST_ORDER) -> Order:
    body = await read_body(http, most)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"expected a {kind.__name__} as JSON: {error}") from error
