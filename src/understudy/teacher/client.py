"""One replica, seen from outside: send items, get scores that have passed every check."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import httpx
import msgspec

from understudy.errors import TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.teacher.head_frame import WireHead, decode_head
from understudy.teacher.manifest import Manifest
from understudy.teacher.protocol import CONTENT_TYPE, ProtocolError, decode_reply, encode_request, request_of
from understudy.teacher.validate import Origin, check_reply
from understudy.teacher.vocabulary import Vocabulary
from understudy.types.scores import ScoreItem, TeacherScores


class RequestRefused(TeacherError):
    """The replica understood the request and will not serve it: asking another replica would not help."""


class ReplicaTimeout(TeacherUnavailable):
    """The replica did not answer before the deadline."""


class ServerFailed(TeacherError):
    """The replica answered that it could not score (5xx)."""


class ScoringClient(Protocol):
    """What a pool needs of a replica, whatever serves it: native, vLLM or an OpenAI-compatible server."""

    async def score(
        self, items: Sequence[ScoreItem], timeout: float | None = None
    ) -> list[TeacherScores]: ...

    async def manifest(self) -> Manifest: ...

    async def health(self) -> bool: ...

    async def close(self) -> None: ...


class ReplicaClient:
    """A native replica over HTTP with kept-alive connections.

    `score` raises TeacherReplyError (a wrong reply), TeacherUnavailable (no reply; ReplicaTimeout: not in time),
    RequestRefused (4xx) or ServerFailed (5xx).
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        teacher: str = "",
        replica: str = "",
        connect_timeout: float = 5.0,
        read_timeout: float = 120.0,
        max_connections: int = 64,
    ) -> None:
        self.url = url.rstrip("/")
        self.teacher = teacher
        self.replica = replica or self.url
        self._manifest: Manifest | None = None
        self._read_timeout = read_timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(None, connect=connect_timeout),
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=30.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        """One request for all the items; scores come back in their order."""
        if not items:
            return []
        manifest = self._manifest or await self.manifest()
        request = request_of(items)
        body = await self._ask("POST", "/v1/score", content=encode_request(request), timeout=timeout)
        try:
            reply = decode_reply(body)
        except ProtocolError as error:
            raise TeacherReplyError(f"{self._who}, row {items[0].key!r} …: {error}") from error
        check_reply(request, reply, Origin(self.teacher or reply.teacher, self.replica, manifest.vocab_size))
        return reply.split()

    async def manifest(self) -> Manifest:
        body = await self._ask("GET", "/manifest")
        try:
            self._manifest = msgspec.json.decode(body, type=Manifest)
        except msgspec.DecodeError as error:
            raise TeacherReplyError(f"{self._who}: unreadable manifest: {error}") from error
        return self._manifest

    async def vocabulary(self) -> Vocabulary:
        try:
            answer = json.loads(await self._ask("GET", "/v1/vocabulary"))
            return Vocabulary(answer["ids"], answer["special"])
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherReplyError(f"{self._who}: unreadable vocabulary: {error}") from error

    async def head(self) -> WireHead:
        """The output projection, for `hidden` scores; ask once per teacher."""
        return decode_head(await self._ask("GET", "/v1/head"))

    async def metrics(self) -> str:
        return (await self._ask("GET", "/metrics")).decode()

    async def health(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def _who(self) -> str:
        return f"teacher {self.teacher}, replica {self.replica}"

    async def _ask(
        self, method: str, path: str, content: bytes | None = None, timeout: float | None = None
    ) -> bytes:
        headers = {"Content-Type": CONTENT_TYPE} if content is not None else {}
        seconds = self._read_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):  # the whole exchange; httpx bounds each read only
                response = await self._http.request(method, path, content=content, headers=headers)
        except TimeoutError as error:
            raise ReplicaTimeout(f"{self._who}: no answer to {path} within {seconds:.1f} s") from error
        except httpx.HTTPError as error:
            raise TeacherUnavailable(
                f"{self._who}: {path} failed: {type(error).__name__}: {error}"
            ) from error
        if response.status_code == 200:
            return response.content
        reason = _reason(response)
        if response.status_code in (400, 401, 403, 404, 405, 413, 422):
            raise RequestRefused(f"{self._who}: {path} refused ({response.status_code}): {reason}")
        raise ServerFailed(f"{self._who}: {path} failed ({response.status_code}): {reason}")


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return re.sub(r"\s+", " ", response.text[:200])
