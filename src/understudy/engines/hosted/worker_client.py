"""A rollout worker's client of engine processes: sends a request's tokens to the granted host.

The module needs no torch: rollout workers import it.
"""

from __future__ import annotations

import httpx
import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.hosted.messages import CONTENT_TYPE, GIVEN_UP, FrameError, decode_answer, encode_call
from understudy.engines.remote_tokens import CallGivenUp, Grant, NotBrought
from understudy.serving.connections import Connections

_CONNECT_S = 10.0


class Deposits:
    """Keep-alive connections by host, on a worker's event loop. The trainer monitors the hosts."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, str | None], httpx.AsyncClient] = {}

    async def bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling) -> Generation:
        """Sends the request and returns its generation.

        Raises `NotBrought` if the request or its answer was lost, `CallGivenUp` if the call was cancelled.
        """
        request = GenerateRequest(grant.key, tokens, sampling, grant.seed, grant.session)
        try:
            response = await self._host(grant).post(
                "/v1/deposit",
                content=encode_call(grant.call, [request]),
                headers={"Content-Type": CONTENT_TYPE},
            )
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise NotBrought(f"{grant.url}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code == GIVEN_UP:
            raise CallGivenUp(_reason(response))
        if response.status_code != 200:
            raise NotBrought(f"{grant.url} answered {response.status_code}: {_reason(response)}")
        try:
            _, (written,) = decode_answer(response.content, 1)
        except FrameError as error:
            raise NotBrought(f"{grant.url}: {error}") from error
        return written

    def _host(self, grant: Grant) -> httpx.AsyncClient:
        place = (grant.url, grant.token)
        if place not in self._hosts:
            self._hosts[place] = httpx.AsyncClient(
                base_url=grant.url,
                headers={"Authorization": f"Bearer {grant.token}"} if grant.token else {},
                # No read timeout: a batch may take any time.
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                transport=Connections(),
                trust_env=False,
            )
        return self._hosts[place]

    async def close(self) -> None:
        for client in self._hosts.values():
            await client.aclose()
        self._hosts.clear()


def _reason(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return response.text[:200]
