"""HTTP to one teacher server; turns every failure into the error class that the pool acts on."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import msgspec

from understudy.errors import TeacherError, TeacherUnavailable
from understudy.serving.connections import Connections

REFUSALS = (400, 401, 403, 404, 405, 413, 422)


class RequestRefused(TeacherError):
    """The replica refused the request (4xx). Another replica would refuse it too."""


class NoSuchRoute(RequestRefused):
    """The server does not have this path, so it is another kind of server."""


class ReplicaTimeout(TeacherUnavailable):
    """The replica did not answer before the deadline."""


class ServerFailed(TeacherError):
    """The replica answered that it could not score (5xx)."""


class Channel:
    """Kept-alive connections to one server, and the teacher and replica names for errors.

    Owned by one client.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        teacher: str,
        replica: str,
        connect_timeout: float = 5.0,
        read_timeout: float = 120.0,
        max_connections: int = 64,
    ) -> None:
        self.url = url.rstrip("/")
        self.teacher = teacher
        self.replica = replica or self.url
        self._read_timeout = read_timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(None, connect=connect_timeout),
            transport=Connections(most=max_connections),
            trust_env=False,
        )

    @property
    def who(self) -> str:
        """The server's name in errors: teacher and replica, or its address if the client has no names."""
        return (
            f"teacher {self.teacher}, replica {self.replica}"
            if self.teacher
            else f"teacher at {self.replica}"
        )

    async def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        content_type: str = "application/json",
        timeout: float | None = None,
    ) -> bytes:
        """The body of a 200. Raises RequestRefused, ServerFailed, ReplicaTimeout or TeacherUnavailable."""
        headers = {"Content-Type": content_type} if content is not None else {}
        seconds = self._read_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):  # the whole exchange; httpx bounds each read only
                response = await self._http.request(method, path, content=content, headers=headers)
        except TimeoutError as error:
            raise ReplicaTimeout(f"{self.who}: no answer to {path} within {seconds:.1f} s") from error
        except httpx.HTTPError as error:
            raise TeacherUnavailable(f"{self.who}: {path} failed: {type(error).__name__}: {error}") from error
        except RuntimeError as error:  # httpx raises it for a closed client
            if not self._http.is_closed:
                raise
            raise TeacherUnavailable(
                f"{self.who}: it left while a request to {path} stood in line for it"
            ) from error
        if response.status_code == 200:
            return response.content
        told = f"({response.status_code}): {_reason(response)}"
        if response.status_code in (404, 405):
            raise NoSuchRoute(f"{self.who}: {path} refused {told}")
        if response.status_code in REFUSALS:
            raise RequestRefused(f"{self.who}: {path} refused {told}")
        raise ServerFailed(f"{self.who}: {path} failed {told}")

    async def ask_json(self, path: str, question: Any, timeout: float | None = None) -> bytes:
        return await self.ask("POST", path, msgspec.json.encode(question), timeout=timeout)

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()


def _reason(response: httpx.Response) -> str:
    """The server's error message, from any of the usual JSON shapes, else the start of the body."""
    try:
        answer = response.json()
        error = answer.get("error", answer)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return re.sub(r"\s+", " ", response.text[:200])
