"""The HTTP client of one engine process; raises `HostLost` when the process is gone."""

from __future__ import annotations

import msgspec

from understudy.engines.hosted.messages import CLOSED, CONTENT_TYPE
from understudy.errors import EngineError
from understudy.serving.client import Reply, ServerClient, ServerGone
from understudy.serving.endpoint import Endpoint, Traffic
from understudy.weights.broadcast import TransferBroken
from understudy.weights.orders import BROKEN_TRANSFER


class HostLost(EngineError, ServerGone):
    """The process no longer answers; its requests may be sent to another process."""


class HostChannel(ServerClient):
    """The client of one process for its lifetime. Requests have no deadline, because a batch may take any time.

    Its owner checks that the process lives (`answers`), and calls `give_up` if it does not.
    """

    gone = timeout = HostLost

    def __init__(self, name: str, endpoint: Endpoint, traffic: Traffic | None = None) -> None:
        super().__init__(name, endpoint)
        self._traffic = traffic or Traffic()

    async def send(self, path: str, frame: bytes) -> bytes:
        """Sends a frame and returns the answer's frame; both count as traffic."""
        self._traffic.sent += len(frame)
        answer = (await self.ask(path, frame, CONTENT_TYPE)).body
        self._traffic.received += len(answer)
        return answer

    async def order(self, path: str, order: msgspec.Struct | None = None) -> None:
        await self.ask(path, b"" if order is None else msgspec.json.encode(order))

    def refusal(self, path: str, reply: Reply) -> EngineError:
        if not reply.ours or reply.status == CLOSED:  # the server is shutting down
            return HostLost(f"{self.name} at {path}: status {reply.status} {reply.text[:100]}")
        kind = TransferBroken if reply.status == BROKEN_TRANSFER else EngineError
        return kind(f"{self.name}: {reply.reason}")
