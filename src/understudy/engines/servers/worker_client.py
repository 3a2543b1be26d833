"""A rollout worker's client of generation servers: fetches one piece of a generation per grant.

It asks and parses with the same code as the trainer (`continuation.py`). The module needs no torch: rollout
workers import it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httpx
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.remote_tokens import Grant, NotBrought, Trouble
from understudy.engines.replicas import Endpoint
from understudy.engines.servers.continuation import (
    Pieces,
    RefusedError,
    ServerOrder,
    UnreachableError,
    check_candidates,
    client_of,
    fetch,
)
from understudy.engines.servers.dialects import Ask, Piece
from understudy.errors import EngineError

_CONNECT_S = 10.0
QUIET_S = 1.0
"""A stopped server returns its requests one by one; this long after its last answer we expect no more."""


@dataclass(frozen=True, slots=True)
class Leg:
    """The worker's state of one call: what it continues, and whether it was cut."""

    before: Generation | None = None
    """The generation that the call continues."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the server has returned everything it had."""


@dataclass(slots=True)
class _Server:
    """Connections to one server, and the time of its last answer."""

    client: httpx.AsyncClient
    answered_at: float = 0.0


class Visits:
    """Keep-alive connections by server, on a worker's event loop. The trainer monitors the servers."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str | None], _Server] = {}

    async def bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling, leg: Leg) -> Generation:
        """All tokens so far, with the piece of this call; the piece may be empty if the call was cut.

        Raises `NotBrought`.
        """
        order = grant.server
        assert order is not None
        request = GenerateRequest(grant.key, tokens, sampling, grant.seed, grant.session)
        pieces = Pieces(request, leg.before)
        try:
            check_candidates(order.language, sampling)
            piece = await self._unless_cut(self._server(grant), order, pieces.ask(order), leg.cut)
        except RefusedError as error:
            raise NotBrought(str(error), Trouble.REFUSED) from error
        except (UnreachableError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise NotBrought(f"{grant.url}: {error}") from error
        except EngineError as error:
            raise NotBrought(str(error), Trouble.SERVER) from error
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            # A malformed answer: report it, because the trainer waits for this call.
            raise NotBrought(f"{order.name}: {type(error).__name__} {error}", Trouble.SERVER) from error
        if piece is not None:
            pieces.add(piece, order.version)
        return pieces.generation()

    async def _unless_cut(
        self, server: _Server, order: ServerOrder, ask: Ask, cut: asyncio.Event
    ) -> Piece | None:
        """The piece; None if the request did not reach the server before it stopped.

        Such a request is cancelled, because newer weights would answer it.
        """
        fetching = asyncio.ensure_future(fetch(server.client, order, ask, connect_s=_CONNECT_S))
        stopped = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait([fetching, stopped], return_when=asyncio.FIRST_COMPLETED)
            told_at = time.monotonic()
            while not fetching.done():
                left = max(told_at, server.answered_at) + QUIET_S - time.monotonic()
                if left <= 0:
                    return None
                await asyncio.wait([fetching], timeout=left)
            server.answered_at = time.monotonic()
            return fetching.result()
        finally:
            stopped.cancel()
            fetching.cancel()

    def _server(self, grant: Grant) -> _Server:
        place = (grant.url, grant.token)
        if place not in self._servers:
            self._servers[place] = _Server(client_of(Endpoint(grant.url, key=grant.token), None))
        return self._servers[place]

    async def close(self) -> None:
        for server in self._servers.values():
            await server.client.aclose()
        self._servers.clear()
