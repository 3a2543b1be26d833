"""One call of a batch whose tokens are on workers: the host gets the keys, each worker a grant.

    host <──ComposeOrder── trainer ──Grant──> workers ──tokens──> host

The call is done when every worker has its generation and the host has answered. It fails as soon as one of
them fails; all other tasks of the call are cancelled then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from understudy.engines.base import Generation
from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.engines.hosted.messages import Composed, ComposeOrder
from understudy.engines.remote_tokens import BearerGone, Brought, FarRequest, Grant, NotBrought, told_of
from understudy.engines.replicas import Endpoint

_SIGN_OF_LIFE_S = 10.0
_composed = msgspec.json.Decoder(Composed)


async def composed_call(
    channel: HostChannel, door: Endpoint, call: int, requests: Sequence[FarRequest]
) -> list[Generation]:
    """Runs the call. The generations hold lengths, stop reasons and versions, in the order of `requests`.

    Raises `HostLost`, `BearerGone`, or `NotBrought` if host and worker are both alive.
    """
    patience = min(request.patience_s for request in requests)
    order = ComposeOrder(call, [request.key for request in requests], patience)
    host = asyncio.ensure_future(channel.ask("/v1/compose", msgspec.json.encode(order)))
    bringing = [
        asyncio.ensure_future(
            request.bearer.bring(
                Grant(call, door.url, door.key or None, request.key, request.session, request.seed)
            )
        )
        for request in requests
    ]
    try:
        await _all(host, bringing, requests, patience)
    except NotBrought as error:
        # Workers notice a dying host first: check whether it is alive.
        if not await channel.alive(_SIGN_OF_LIFE_S):
            raise HostLost(f"{channel.name}: {error}") from error
        raise
    finally:
        for task in (host, *bringing):
            task.cancel()
        await asyncio.gather(host, *bringing, return_exceptions=True)
    return [told_of(task.result()) for task in bringing]


async def _all(
    host: asyncio.Future[bytes],
    bringing: Sequence[asyncio.Future[Brought]],
    requests: Sequence[FarRequest],
    patience: float,
) -> None:
    """Waits for the host and all workers. Raises the first failure; the host's takes precedence."""
    waiting: set[asyncio.Future[Any]] = {host, *bringing}
    left: float | None = None
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        missing: set[str] = set()
        if not done:
            missing = {
                request.key for request, task in zip(requests, bringing, strict=True) if not task.done()
            }
        elif host in done:
            left = patience  # the host has answered every worker
            missing = set(_composed.decode(host.result()).missing)
        if missing:
            await _leave_out(missing, bringing, requests)
        for task in done:
            task.result()


async def _leave_out(
    missing: set[str], bringing: Sequence[asyncio.Future[Brought]], requests: Sequence[FarRequest]
) -> None:
    late = [
        (request.bearer, task)
        for request, task in zip(requests, bringing, strict=True)
        if request.key in missing
    ]
    for bearer, _ in late:
        bearer.give_up()
    await asyncio.wait([task for _, task in late])  # until the failed requests' callers are told
    raise BearerGone(
        f"{len(late)} of {len(requests)} requests were not brought, or did not get their answer, in time"
    )
