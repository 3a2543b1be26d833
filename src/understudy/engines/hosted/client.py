"""The HTTP client of one engine process; raises `HostLost` when the process is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from understudy.engines.hosted.messages import BROKEN_TRANSFER, CONTENT_TYPE
from understudy.engines.replicas import Endpoint, Traffic
from understudy.errors import EngineError
from understudy.serving.connections import Connections
from understudy.weights.broadcast import TransferBroken


class HostLost(EngineError):
    """The process no longer answers; its requests may be sent to another process."""


class HostChannel:
    """Keep-alive connections to one process for its lifetime. Used on the engine's event loop."""

    def __init__(self, name: str, endpoint: Endpoint, traffic: Traffic | None = None) -> None:
        self.name = name
        self._traffic = traffic or Traffic()
        self.shares_memory = endpoint.shares_memory
        self.gpu = endpoint.gpu
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {},
            # No read timeout: a batch may take any time. Liveness is checked separately (`alive`).
            timeout=httpx.Timeout(None, connect=10.0),
            transport=Connections(),
            trust_env=False,
        )

    async def ask(self, path: str, frame: bytes) -> bytes:
        """Sends a frame and returns the answer's frame; both count as traffic."""
        self._traffic.sent += len(frame)
        answer = await self._post(path, frame, CONTENT_TYPE)
        self._traffic.received += len(answer)
        return answer

    async def order(self, path: str, order: msgspec.Struct | None = None) -> None:
        body = b"" if order is None else msgspec.json.encode(order)
        await self._post(path, body, "application/json")

    async def _post(self, path: str, body: bytes, kind: str) -> bytes:
        headers = {"Content-Type": kind}
        asking = asyncio.ensure_future(self._http.post(path, content=body, headers=headers))
        try:
            either: list[asyncio.Future[Any]] = [asking, self._given_up]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise HostLost(self._given_up.result())
            response = asking.result()
        except (
            httpx.HTTPError,
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: the client was closed meanwhile
            raise HostLost(f"{self.name} at {path}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            asking.cancel()
        if response.status_code >= 400:
            reason = _reason(response)
            if reason is None:  # not our error format: the server is shutting down
                raise HostLost(f"{self.name} at {path}: status {response.status_code} {response.text[:100]}")
            broken = response.status_code == BROKEN_TRANSFER
            raise (TransferBroken if broken else EngineError)(f"{self.name}: {reason}")
        return response.content

    def give_up(self, problem: str) -> None:
        """Fails all pending requests with `HostLost`: a dead machine does not close its connections."""
        if not self._given_up.done():
            self._given_up.set_result(problem)

    async def alive(self, within: float) -> bool:
        try:
            return (await self._http.get("/health", timeout=within)).status_code == 200
        except (httpx.HTTPError, OSError, RuntimeError):
            return False

    async def close(self) -> None:
        await self._http.aclose()


def _reason(response: httpx.Response) -> str | None:
    try:
        told: Any = response.json()
        return str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
