"""The run's side of one worker process: its sessions, work requests and generations.

A session that begins again, because its worker died, gets the generations that its earlier attempt asked for.
So the death of a worker changes no batch of the engine, and no token is generated twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.errors import ClusterError, ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext, LostOutput
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import WorkerConnection
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_START_S = 120.0


logger = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The worker process is gone; the session may be repeated on another worker."""


@dataclass(slots=True)
class WorkerTraffic:
    """Bytes exchanged between the run and its workers so far."""

    sent: int = 0
    received: int = 0
    generation: int = 0
    """The part of both that is about generations, including tokens that pass through the run."""


class WorkerSession:
    """One session of a prompt, over all its attempts. Used on the run's event loop; call `close` last."""

    def __init__(self, prompt: Prompt, context: LoopContext) -> None:
        self.prompt, self.context = prompt, context
        self._generations: dict[tuple[int, Sampling, bytes], asyncio.Task[Generation]] = {}
        """By turn, sampling and digest of tokens and pictures."""

    def generation(
        self, tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] = ()
    ) -> asyncio.Task[Generation]:
        """The generation of this turn, requested unless an earlier attempt has requested the same."""
        digest = blake2b(tokens.tobytes(), digest_size=16)
        digest.update("".join(media).encode())
        asked = (turn, sampling, digest.digest())
        if asked not in self._generations:
            self._generations[asked] = asyncio.create_task(self._generate(tokens, sampling, turn, media))
        return self._generations[asked]

    async def _generate(
        self, tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str]
    ) -> Generation:
        if not media:  # a context made by a caller may know tokens only
            return await self.context.generate(tokens, sampling, turn)
        return await self.context.generate(tokens, sampling, turn, media)

    def forget(self, generation: asyncio.Task[Generation]) -> None:
        """Cancels a generation if it is not done, and does not keep it."""
        generation.cancel()
        self._generations = {key: one for key, one in self._generations.items() if one is not generation}

    def close(self) -> None:
        for one in self._generations.values():
            if not one.cancel() and not one.cancelled():
                one.exception()  # an error that no attempt waited for


def _unpacked(message: wire.Done) -> list[Trajectory | LostOutput] | DataError:
    try:
        return [wire.unpack_output(*one) for one in message.outputs]
    except Exception as error:
        return DataError(f"the worker's outputs cannot be read ({type(error).__name__}: {error})")


class WorkerChannel:
    """The connection to one worker process, with its open sessions and work requests. Used on the run's event loop;
    a task reads the worker's messages."""

    def __init__(
        self,
        line: WorkerConnection,
        name: str,
        life: int,
        traffic: WorkerTraffic,
        on_end: Callable[[int], None],
    ) -> None:
        self._line, self._name, self.life = line, name, life
        self._traffic, self._on_end = traffic, on_end
        self._next = 0
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._sessions: dict[int, WorkerSession] = {}
        self._generating: dict[int, dict[int, tuple[asyncio.Task[Generation], asyncio.Task[None]]]] = {}
        """By session and generation id: the generation, and the task that sends it to the worker."""
        self._listener: asyncio.Task[None] | None = None

    async def begin(self, setup: wire.Setup) -> None:
        """Send the setup and wait until the worker is ready."""
        try:
            self._say(setup)
            first = await asyncio.wait_for(wire.read_from_worker(self._line.reader), _START_S)
        except BaseException as error:
            await self._line.close(at_once=True)
            if isinstance(error, TimeoutError):
                late = f"{self._name} was not ready within {_START_S:g} s; what it wrote is on stderr above"
                raise ClusterError(late) from error
            raise
        if first is None or not isinstance(first[0], wire.Ready):
            await self._line.close()
            how = await self._line.ended()
            raise ConfigError(
                f"{self._name} could not start its loop {setup.agent!r}: it {how}; what it wrote is on stderr above"
            )
        self._listener = asyncio.create_task(self._listen())

    @property
    def alive(self) -> bool:
        """Whether the worker may still be running. One whose connection broke counts as alive until it is
        ended; only then is it replaced."""
        return self._listener is not None and not self._listener.done()

    @property
    def pid(self) -> int:
        return self._line.pid

    @property
    def sessions(self) -> int:
        return len(self._results)

    async def run(self, session: WorkerSession) -> list[Trajectory | LostOutput]:
        outputs: list[Trajectory | LostOutput] = await self._session(session, None)
        return outputs

    async def run_and_store(self, session: WorkerSession, segment: int) -> bytes:
        body: bytes = await self._session(session, segment)
        return body

    async def request_work(self, name: str, body: bytes, segment: int) -> bytes:
        session_id = self._number()
        answer: bytes = await self._answer(session_id, wire.WorkRequest(session_id, name, body, segment))
        return answer

    async def _session(self, session: WorkerSession, segment: int | None) -> Any:
        session_id, context = self._number(), session.context
        self._sessions[session_id] = session
        begin = wire.Begin(
            session_id,
            session.prompt,
            context.session,
            context.sampling,
            context.context,
            context.max_generated,
            segment,
            context.given,
        )
        try:
            return await self._answer(session_id, begin)
        finally:
            del self._sessions[session_id]
            for _, answering in self._generating.pop(session_id, {}).values():
                answering.cancel()

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _answer(self, session_id: int, message: wire.Begin | wire.WorkRequest) -> Any:
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._results[session_id] = result
        try:
            self._say(message)
            return await result
        finally:
            del self._results[session_id]
            if not result.done() or result.cancelled() or result.exception() is not None:
                self._say(wire.CancelSession(session_id))

    def _say(self, message: wire.ToWorker) -> None:
        if not self._line.writer.is_closing():
            frame = wire.frame(message)
            self._traffic.sent += len(frame)
            if isinstance(message, wire.OF_GENERATION):
                self._traffic.generation += len(frame)
            self._line.writer.write(frame)

    async def _listen(self) -> None:
        """Reads until the worker is gone. Whatever ends it, no session waits for an answer any more."""
        how = "ended"
        try:
            await self._read()
            how = await self._line.ended()
        except Exception as error:
            logger.exception("%s (pid %d) sent what cannot be read", self._name, self.pid)
            how = f"sent what cannot be read ({type(error).__name__}: {error})"
            await self._line.close(at_once=True)
        finally:
            self._on_end(self.life)
            for session_id in list(self._results):
                self._settle(session_id, WorkerDied(f"{self._name} (pid {self.pid}) {how}"))

    async def _read(self) -> None:
        while (came := await wire.read_from_worker(self._line.reader)) is not None:
            message, size = came
            self._traffic.received += size
            if isinstance(message, wire.OF_GENERATION):
                self._traffic.generation += size
            if isinstance(message, wire.GenerateCall):
                if message.session_id in self._sessions:
                    self._generate(message)
            elif isinstance(message, wire.CancelGeneration):
                self._cancel_generation(message)
            elif isinstance(message, wire.Done):
                self._settle(message.session_id, _unpacked(message))
            elif isinstance(message, wire.LoopReturned):
                session = self._sessions.get(message.session_id)
                if session is not None and session.context.loop_returned is not None:
                    session.context.loop_returned(message.outputs)
            elif isinstance(message, wire.Stored | wire.WorkDone):
                self._settle(message.session_id, message.body)
            elif isinstance(message, wire.LoopFailed):
                text = message.message if message.data_error else f"the agent loop raised:\n{message.message}"
                self._settle(message.session_id, DataError(text))

    def _generate(self, message: wire.GenerateCall) -> None:
        session = self._sessions[message.session_id]
        generation = session.generation(message.tokens, message.sampling, message.turn, message.media)
        answering = asyncio.create_task(self._answer_with(session, message, generation))
        self._generating.setdefault(message.session_id, {})[message.generation_id] = (generation, answering)

    async def _answer_with(
        self, session: WorkerSession, message: wire.GenerateCall, generation: asyncio.Task[Generation]
    ) -> None:
        try:
            written = await asyncio.shield(generation)
            self._say(wire.Generated(message.session_id, message.generation_id, written))
            if written.candidate_ids is not None:  # large: 256 bytes a token for 64 candidates
                session.forget(generation)
        except Exception as error:  # an engine's error goes to the session's caller, not to the loop
            self._settle(message.session_id, error)
        finally:
            self._generating.get(message.session_id, {}).pop(message.generation_id, None)

    def _cancel_generation(self, message: wire.CancelGeneration) -> None:
        """Cancel a generation that the loop no longer waits for."""
        found = self._generating.get(message.session_id, {}).pop(message.generation_id, None)
        if found is not None:
            generation, answering = found
            answering.cancel()
            if all(one is not generation for one, _ in self._generating[message.session_id].values()):
                self._sessions[message.session_id].forget(generation)

    def _settle(self, session_id: int, outcome: list[Trajectory | LostOutput] | bytes | Exception) -> None:
        result = self._results.get(session_id)
        if result is None or result.done():
            return
        if isinstance(outcome, Exception):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    async def close(self) -> None:
        await self._line.close()
        if self._listener is not None:
            await self._listener
