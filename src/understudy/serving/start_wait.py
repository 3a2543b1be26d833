"""Waits at the start of a run for servers that it does not start itself.

    GET ──no connection, 429, 502, 503, 504──> back-off, or as long as `Retry-After` asks ──> GET …
     └──any other answer, or none in time──> the server is up; what it can do is found out by its client

A server that was started together with the run loads its model meanwhile. A problem that waiting does not mend (an
unknown host, a wrong certificate, 401, 404) is left to the server's client, which reports it at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from understudy.errors import ClusterError, UnderstudyError
from understudy.serving.client import ServerClient, ServerGone, ServerTimeout
from understudy.serving.endpoint import Endpoint

NOT_YET = (429, 502, 503, 504)
"""Statuses of a server that is loading or overloaded, or of a gateway before it."""
KEY = "cluster.start_timeout_seconds"
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 3.0
_ANSWER_S = 10.0
_LASTING = (
    aiohttp.ClientConnectorDNSError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ClientConnectorCertificateError,
    ValueError,  # of an address
)


def is_lasting(error: UnderstudyError) -> bool:
    """Whether a failed connection fails again however long one waits."""
    cause = error.__cause__
    while isinstance(cause, UnderstudyError):
        cause = cause.__cause__
    return isinstance(cause, _LASTING)


class StartWait:
    """The pauses between attempts at servers that cannot answer yet: they grow, and a server's `Retry-After` counts.

    The clock is injected for tests.
    """

    def __init__(self, most: float, now: Callable[[], float] = time.monotonic) -> None:
        """`most`: seconds in all."""
        self._most, self._now = most, now
        self._began, self._pause = now(), _FIRST_PAUSE_S

    @property
    def waited(self) -> float:
        return self._now() - self._began

    def pause(self, asked: float | None = None) -> float | None:
        """Seconds until the next attempt; None once the time is over. `asked`: what the server asked for."""
        left = self._most - self.waited
        if left <= 0:
            return None
        pause, self._pause = max(self._pause, asked or 0.0), min(2 * self._pause, _LONGEST_PAUSE_S)
        return min(pause, left)  # one more attempt when the time is over


@dataclass(frozen=True, slots=True)
class Servers:
    """Running servers that one key of a recipe names."""

    key: str
    endpoints: Sequence[Endpoint]
    path: str
    """What they are asked for."""
    all_needed: bool = True
    """False: the run can start with one of them."""


async def wait_for_servers(servers: Sequence[Servers], most: float, tell: Callable[[str], object]) -> None:
    """Returns when all of them answer. `ClusterError` after `most` seconds. `tell` is called once for each key whose
    servers are waited for, and once when they answer."""
    problems = await asyncio.gather(*(_wait(one, most, tell) for one in servers))
    if found := [problem for problem in problems if problem]:
        raise ClusterError("\n".join(found))


async def _wait(servers: Servers, most: float, tell: Callable[[str], object]) -> str | None:
    """None, or what to tell the user of those that did not answer in time."""
    wait = StartWait(most)
    clients = [ServerClient(one.url, one, connect_s=_CONNECT_S) for one in servers.endpoints]
    announced = False
    try:
        while True:
            states = await asyncio.gather(*(_state(client, servers.path) for client in clients))
            late = [(client, state) for client, state in zip(clients, states, strict=True) if state]
            if not late or (not servers.all_needed and len(late) < len(clients)):
                if announced:
                    tell(f"{servers.key}: answers after {wait.waited:.0f} s")
                return None
            reasons = "; ".join(f"{client.name}: {state.why}" for client, state in late)
            pause = wait.pause(max(state.asked for _, state in late))
            if pause is None:
                return (
                    f"{servers.key}: no answer within {most:g} s ({KEY}); the last one of {reasons}. Start the server, correct the "
                    f"address, or raise {KEY}"
                )
            if not announced:
                announced = True
                tell(f"{servers.key}: waiting up to {most:g} s ({KEY}) for {reasons}; Ctrl-C ends the wait")
            await asyncio.sleep(pause)
    finally:
        for client in clients:
            await client.close()


@dataclass(frozen=True, slots=True)
class _NotYet:
    """Why a server does not serve now, and for how many seconds it asks to be left alone."""

    why: str
    asked: float = 0.0


async def _state(client: ServerClient, path: str) -> _NotYet | None:
    try:
        reply = await client.request(path, method="GET", timeout_s=_ANSWER_S)
    except ServerTimeout:
        return None
    except ServerGone as error:
        return None if is_lasting(error) else _NotYet(_words(error.__cause__))
    if reply.status not in NOT_YET:
        return None
    return _NotYet(f"{reply.status} {reply.reason}".strip(), reply.retry_after or 0.0)


def _words(cause: BaseException | None) -> str:
    if isinstance(cause, TimeoutError):
        return f"no connection within {_CONNECT_S:g} s"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
