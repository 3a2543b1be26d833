"""A worker's and the run's side of questions about far tokens, in one process: every message passes as bytes, and is counted."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from understudy.engines.base import Engine, GenerateRequest, Generation, Sampling
from understudy.engines.remote_tokens import FarRequest, Grant
from understudy.engines.servers.worker_client import Leg, Visits
from understudy.errors import EngineError
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.generations import Questions
from understudy.rollout.workers.remote_tokens import WorkerHand

_from_run = msgspec.msgpack.Decoder(wire.ToWorker)
_from_worker = msgspec.msgpack.Decoder(wire.ToRun)


class AskingWorker:
    """An `Engine` whose requests are asked by a worker; the engine behind it sees names and lengths."""

    def __init__(self, engine: Engine, patience_s: float = 60.0) -> None:
        self._engine, self._patience_s = engine, patience_s
        self.visits = Visits()
        self.update_weights, self.pause, self.resume = engine.update_weights, engine.pause, engine.resume
        self.abort = engine.abort
        self.on_grant: Callable[[Grant], Any] = lambda grant: None
        """Called before a granted server is asked; what it returns is awaited."""
        self._unread: list[wire.ToWorker] | None = None
        self.grants: list[Grant] = []
        self.bytes = 0
        self.hands: dict[int, WorkerHand] = {}
        self._asked: dict[int, GenerateRequest] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._failures: dict[int, asyncio.Future[Generation]] = {}
        self._questions = Questions(self._to_run, self._bring)

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return list(await asyncio.gather(*map(self._ask, requests)))

    async def _ask(self, request: GenerateRequest) -> Generation:
        number = len(self._asked)
        self._asked[number] = request
        failure: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._failures[number] = failure
        loop = asyncio.ensure_future(
            self._questions.ask(number, request.tokens, request.sampling, 0, far=True)
        )
        try:
            await asyncio.wait([loop, failure], return_when=asyncio.FIRST_COMPLETED)
            return failure.result() if failure.done() else loop.result()
        finally:
            loop.cancel()
            await asyncio.wait([loop])

    async def _bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling, leg: Leg) -> Generation:
        self.grants.append(grant)
        wait = self.on_grant(grant)
        if wait is not None:
            await wait
        return await self.visits.bring(grant, tokens, sampling, leg)

    # --- what passes between the two ---------------------------------------------------------------------------

    def _to_worker(self, message: wire.ToWorker) -> None:
        frame = wire.frame(message)
        self.bytes += len(frame)
        decoded = _from_run.decode(frame[4:])
        if self._unread is not None:
            self._unread.append(decoded)
        else:
            self._questions.told(decoded)  # type: ignore[arg-type]

    def hang(self) -> None:
        """Reads nothing until `wake`."""
        self._unread = []

    def wake(self) -> None:
        unread, self._unread = self._unread or [], None
        for message in unread:
            self._questions.told(message)  # type: ignore[arg-type]

    def _to_run(self, message: wire.ToRun) -> None:
        frame = wire.frame(message)
        self.bytes += len(frame)
        told = _from_worker.decode(frame[4:])
        if isinstance(told, wire.Want):
            self._asking[told.session_id] = asyncio.ensure_future(self._generate(told))
        elif isinstance(told, wire.Have | wire.NotBrought):
            if told.session_id in self.hands:
                self.hands[told.session_id].told(told)
        elif isinstance(told, wire.Withdraw):
            self._asking[told.session_id].cancel()
            self.leave(told.session_id)

    async def _generate(self, want: wire.Want) -> None:
        request = self._asked[want.session_id]
        hand = WorkerHand(want, self._to_worker, lambda: self.leave(want.session_id))
        self.hands[want.session_id] = hand
        asked = FarRequest.of(
            request.key,
            want.tokens,
            want.max_new_tokens,
            request.seed,
            request.session,
            hand,
            self._patience_s,
        )
        try:
            (told,) = await self._engine.generate([asked])
            assert not told.tokens.any() and not told.logprobs.any(), "lengths alone"
            hand.take(nothing=not len(told.tokens))
        except EngineError as error:
            self._failures[want.session_id].set_exception(error)

    def leave(self, number: int) -> None:
        """As when its session ends, or its worker dies."""
        hand = self.hands.pop(number, None)
        if hand is not None:
            hand.left()

    async def close(self) -> None:
        await self.visits.close()
