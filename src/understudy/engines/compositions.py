"""Batches that an engine process is told of by name, while others bring the tokens.

    compose(call, keys) ──┐
    deposit(call, key) ───┼── all keys there ──> one batch, in the order of `keys` ──> each deposit its own generation
    deposit(call, key) ───┘

Whichever comes first waits for the others. When whoever composed gives the call up, or the batch fails, deposits are refused; a
depositor that hangs up before the batch began takes its tokens along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from understudy.engines.base import GenerateRequest, Generation
from understudy.engines.hosted.messages import ComposeOrder, FrameError
from understudy.engines.remote_tokens import CallGivenUp

Write = Callable[[int, Sequence[GenerateRequest]], Awaitable[list[Generation]]]


@dataclass(slots=True)
class _Deposit:
    request: GenerateRequest
    answer: asyncio.Future[Generation]


@dataclass(slots=True)
class _Composition:
    deposits: dict[str, _Deposit] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with every deposit."""
    composed: bool = False
    begun: bool = False


class Compositions:
    def __init__(self, write: Write) -> None:
        """`write` takes a call's number and its batch."""
        self._write = write
        self._calls: dict[int, _Composition] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def deposit(self, call: int, request: GenerateRequest) -> Generation:
        """Brings one request of a call; what was written for it."""
        one = self._calls.setdefault(call, _Composition())
        if request.key in one.deposits:
            raise FrameError(f"{request.key} was brought to call {call} already")
        deposit = _Deposit(request, asyncio.get_running_loop().create_future())
        one.deposits[request.key] = deposit
        one.came.set()
        try:
            return await deposit.answer
        finally:
            if not one.begun:
                one.deposits.pop(request.key, None)
                if not one.deposits and not one.composed:
                    self._calls.pop(call, None)

    async def run(self, order: ComposeOrder) -> list[str]:
        """Waits for the deposits and has them written; the keys that did not come in time, where some did not."""
        if len(set(order.keys)) != len(order.keys) or not order.keys:
            raise FrameError(f"call {order.call} names {len(order.keys)} keys; expected some, each once")
        one = self._calls.setdefault(order.call, _Composition())
        if one.composed:
            raise FrameError(f"call {order.call} was composed already")
        one.composed = True
        try:
            try:
                async with asyncio.timeout(order.patience_s):
                    while set(order.keys) - one.deposits.keys():
                        one.came.clear()
                        await one.came.wait()
            except TimeoutError:
                return [key for key in order.keys if key not in one.deposits]
            one.begun = True
            deposits = [one.deposits[key] for key in order.keys]
            generations = await self._write(order.call, [deposit.request for deposit in deposits])
            for deposit, generation in zip(deposits, generations, strict=True):
                if not deposit.answer.done():
                    deposit.answer.set_result(generation)
            return []
        finally:
            self._calls.pop(order.call, None)
            for deposit in one.deposits.values():
                if not deposit.answer.done():
                    deposit.answer.set_exception(CallGivenUp(f"call {order.call} was given up"))
