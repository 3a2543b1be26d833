"""HTTP to one teacher server; turns every failure into the error class that the pool acts on."""

from __future__ import annotations

from typing import Any

import msgspec

from understudy.errors import TeacherError, TeacherUnavailable
from understudy.serving import client
from understudy.serving.client import Reply, ServerClient
from understudy.serving.endpoint import Endpoint
from understudy.teacher.protocol import MISSING_MEDIA

REFUSALS = (400, 401, 403, 404, 405, 413, 422)
TOO_MANY = 429
NOT_NOW = (408, TOO_MANY, 502, 503, 504)


class RequestRefused(TeacherError, client.ServerRefused):
    """The replica refused the request (4xx). Another replica would refuse it too."""


class NoSuchRoute(RequestRefused):
    """The server does not have this path, so it is another kind of server; or the model is gone, if it was admitted."""


class NotAllowed(RequestRefused):
    """The server does not take the token (401, 403)."""


class NotServing(TeacherUnavailable):
    """The server, or a gateway before it, answered that it does not serve now. No row is at fault."""

    overloaded = False
    """It has too many requests (429), so it has this path."""


class MediaMissing(TeacherError):
    """The replica does not have a picture of the request; send it and ask again."""


class ReplicaTimeout(TeacherUnavailable, client.ServerTimeout):
    """The replica did not answer before the deadline."""


class ScoringFailed(TeacherError, client.ServerFailed):
    """The replica answered that it could not score (5xx)."""


_REFUSED_BY = {401: NotAllowed, 403: NotAllowed, 404: NoSuchRoute, 405: NoSuchRoute}


class TeacherChannel(ServerClient):
    """The client of one teacher server, with the teacher and replica names for errors."""

    gone, timeout = TeacherUnavailable, ReplicaTimeout

    def __init__(
        self,
        url: str,
        token: str | None,
        teacher: str,
        replica: str,
        connect_timeout: float = 5.0,
        read_timeout: float = 120.0,
        max_connections: int = 64,
        socket: str | None = None,
    ) -> None:
        """`socket`: the Unix domain socket on which the server answers in place of the url's host."""
        self.teacher, self.replica = teacher, replica or url.rstrip("/")
        super().__init__(
            f"teacher {teacher}, replica {self.replica}" if teacher else f"teacher at {self.replica}",
            Endpoint(url, token, socket),
            most=max_connections,
            connect_s=connect_timeout,
            timeout_s=read_timeout,
        )

    async def get(self, path: str) -> bytes:
        return (await self.ask(path, method="GET")).body

    async def ask_json(self, path: str, question: Any, timeout: float | None = None) -> bytes:
        return (await self.ask(path, msgspec.json.encode(question), timeout_s=timeout)).body

    def refusal(self, path: str, reply: Reply) -> TeacherError:
        detail = f"({reply.status}): {reply.reason}"
        if reply.status == MISSING_MEDIA:
            return MediaMissing(f"{self.name}: {path} {detail}")
        # A native replica that could not score a request answers 503 as well.
        if reply.status in NOT_NOW and not reply.has_kind:
            unserved = NotServing(f"{self.name}: {path} is not served now {detail}")
            unserved.retry_after, unserved.overloaded = reply.retry_after, reply.status == TOO_MANY
            return unserved
        if reply.status not in REFUSALS:
            return ScoringFailed(f"{self.name}: {path} failed {detail}")
        kind = _REFUSED_BY.get(reply.status, RequestRefused)
        return kind(f"{self.name}: {path} refused {detail}")

    async def healthy(self) -> bool:
        return await self.answers(within=5.0)
