"""The authenticating HTTP proxy of a vLLM server; it also receives broadcasts of new weights for it.

    trainer ──HTTP, with the run's token──> proxy ──Unix socket──> vLLM
    trainer ══buckets (weights/broadcast.py)══> proxy: snapshot in local memory ──> vLLM loads it in place

vLLM itself listens on a socket that only this user can open, because its control routes have no
authentication. The proxy forwards everything unchanged except `POST /v1/weights`, the order of a broadcast
that our engine processes take too. While vLLM is paused, the proxy refuses requests for tokens at once.
vLLM would queue them and answer with newer weights than they were meant for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from torch import Tensor

from understudy.engines.hosted.app import read_order
from understudy.engines.servers.continuation import BAD_GATEWAY, PAUSED
from understudy.engines.servers.dialects import DIALECTS
from understudy.errors import EngineError
from understudy.observability.owned_folder import OwnedFolder
from understudy.serving.client import ServerClient, ServerError
from understudy.serving.endpoint import Endpoint
from understudy.serving.http import Gate, answering, as_json, read_body, unless_gone
from understudy.weights.broadcast import Receiver, TransferBroken
from understudy.weights.orders import BROKEN_TRANSFER, WeightsOrder

MAX_BODY_BYTES = 1 << 30
_LARGEST_ORDER = 16 << 20
_MEMORY = Path("/dev/shm")
_REFUSED = ((TransferBroken, BROKEN_TRANSFER, "transfer"), (EngineError, 422, "engine"))
_METHODS = ["GET", "POST", "PUT", "DELETE"]
_GENERATE, _PAUSE, _RESUME = "/inference/v1/generate", "/pause", "/resume"


class VLLMProxy:
    """The proxy's pause state, its connections to vLLM and its receiver; handlers run on one event loop.

    `address` is this process's address in a broadcast group. Snapshots are in `memory` only while vLLM
    loads them.
    """

    def __init__(self, socket: str, *, token: str | None, address: str, memory: Path | None = None) -> None:
        # No deadline: clients have their own, and disconnect.
        self._client = ServerClient("vLLM", Endpoint("http://vllm", socket=socket))
        self._paused = False
        self._receiver, self._receiving = Receiver(address), asyncio.Lock()
        self._memory = memory or (_MEMORY if _MEMORY.is_dir() else None)
        app = Starlette(
            routes=[
                Route("/v1/weights", answering(self.load_weights, *_REFUSED), methods=["POST"]),
                Route("/{path:path}", answering(self.forward, *_REFUSED), methods=_METHODS),
            ]
        )
        self.asgi: ASGIApp = Gate(app, token)

    async def forward(self, http: Request) -> Response:
        body = await read_body(http, MAX_BODY_BYTES)
        path = http.url.path
        if path == _GENERATE and self._paused:
            return as_json({"error": "weights change; ask again when they have"}, PAUSED)
        self._paused |= path == _PAUSE
        target = f"{path}?{http.url.query}" if http.url.query else path
        kind = http.headers.get("content-type")
        asked = self._client.request(target, body or None, kind, method=http.method)
        try:
            # vLLM stops generating when its client disconnects, so we pass a disconnect on.
            answer = await unless_gone(http, asyncio.ensure_future(asked))
        except ServerError as error:
            return _server_gone(error)
        finally:
            self._paused &= path != _RESUME
        return Response(answer.body, answer.status, media_type=answer.kind)

    async def load_weights(self, http: Request) -> Response:
        order = await read_order(http, WeightsOrder, _LARGEST_ORDER)
        if order.file is not None:
            raise EngineError(
                "this server takes broadcasts; a snapshot of the trainer's machine is not seen here"
            )
        if order.stream is not None:
            async with self._receiving:
                tensors = await asyncio.to_thread(self._receiver.receive, order.stream)
                try:
                    await self._load(order.version, tensors)
                except ServerError as error:
                    return _server_gone(error)
        return as_json({"version": order.version})

    async def _load(self, version: int, tensors: list[tuple[str, Tensor]]) -> None:
        """Loads through a temporary file. It is not kept: a restarted server gets another broadcast."""
        dialect = DIALECTS["vllm"]
        assert dialect.load is not None
        folder = await asyncio.to_thread(OwnedFolder, "understudy-weights-", self._memory)
        try:
            file = folder.path / f"v{version}.safetensors"
            await asyncio.to_thread(save_file, dict(tensors), file, {"format": "pt"})
            path, body = dialect.load(str(file), version)
            answer = await self._client.request(path, msgspec.json.encode(body))
            content: Any = msgspec.json.decode(answer.body) if answer.status == 200 else {}
            if not dialect.loaded(content, version):
                raise EngineError(
                    f"vLLM did not load weights version {version} ({answer.status}): {answer.text[:300]}"
                )
        except (OSError, ValueError, SafetensorError) as error:
            raise EngineError(f"weights of version {version} did not reach vLLM: {error}") from error
        finally:
            await asyncio.to_thread(folder.close)

    async def close(self) -> None:
        await self._client.close()


def _server_gone(error: ServerError) -> Response:
    """A response outside our error format: clients then treat the server as gone, not as refusing."""
    return as_json({"error": f"vLLM does not answer: {error}"}, BAD_GATEWAY)
