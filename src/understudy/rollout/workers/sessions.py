"""The run's side of one worker process: its sessions, errands and generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import Line
from understudy.rollout.workers.remote_tokens import WorkerHand
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_START_S = 120.0


class WorkerDied(Exception):
    """The worker process is gone; the session may be repeated on another worker."""


@dataclass(slots=True)
class Traffic:
    """Bytes exchanged between the run and its workers so far."""

    sent: int = 0
    received: int = 0
    generation: int = 0
    """The part of both that is about generations, including tokens that pass through the run."""


class Channel:
    """The connection to one worker process, with its open sessions and errands. Used on the run's event loop;
    a task reads the worker's messages."""

    def __init__(
        self, line: Line, name: str, life: int, traffic: Traffic, on_end: Callable[[int], None]
    ) -> None:
        self._line, self._name, self.life = line, name, life
        self._traffic, self._on_end = traffic, on_end
        self._next = 0
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._contexts: dict[int, LoopContext] = {}
        self._generating: dict[int, dict[int, asyncio.Task[None]]] = {}
        """By session and question."""
        self._hands: dict[tuple[int, int], WorkerHand] = {}
        self._listener: asyncio.Task[None] | None = None

    async def begin(self, setup: wire.Setup) -> None:
        """Send the setup and wait until the worker is ready."""
        try:
            self._say(setup)
            first = await asyncio.wait_for(wire.read_from_worker(self._line.reader), _START_S)
        except BaseException:
            await self._line.close(at_once=True)
            raise
        if first is None or not isinstance(first[0], wire.Ready):
            await self._line.close()
            raise ConfigError(
                f"{self._name} could not start its loop {setup.agent!r}; its own words are on stderr above"
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

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        trajectories: list[Trajectory] = await self._session(prompt, context, None)
        return trajectories

    async def run_kept(self, prompt: Prompt, context: LoopContext, ticket: int) -> bytes:
        body: bytes = await self._session(prompt, context, ticket)
        return body

    async def errand(self, name: str, body: bytes, ticket: int) -> bytes:
        session_id = self._number()
        answer: bytes = await self._answer(session_id, wire.Errand(session_id, name, body, ticket))
        return answer

    async def _session(self, prompt: Prompt, context: LoopContext, ticket: int | None) -> Any:
        session_id = self._number()
        self._contexts[session_id] = context
        begin = wire.Begin(
            session_id,
            wire.pack_prompt(prompt),
            context.session,
            wire.pack_sampling(context.sampling),
            context.context,
            context.max_generated,
            ticket,
            far=ticket is not None and context.generate_far is not None,
        )
        try:
            return await self._answer(session_id, begin)
        finally:
            del self._contexts[session_id]
            for question in list(self._generating.get(session_id, ())):
                self._withdraw(session_id, question)
            self._generating.pop(session_id, None)

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _answer(self, session_id: int, message: wire.Begin | wire.Errand) -> Any:
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._results[session_id] = result
        try:
            self._say(message)
            return await result
        finally:
            del self._results[session_id]
            if not result.done() or result.cancelled() or result.exception() is not None:
                self._say(wire.Drop(session_id))

    def _say(self, message: wire.ToWorker) -> None:
        if not self._line.writer.is_closing():
            frame = wire.frame(message)
            self._traffic.sent += len(frame)
            if isinstance(message, wire.OF_GENERATION):
                self._traffic.generation += len(frame)
            self._line.writer.write(frame)

    async def _listen(self) -> None:
        while (came := await wire.read_from_worker(self._line.reader)) is not None:
            message, size = came
            self._traffic.received += size
            if isinstance(message, wire.OF_GENERATION):
                self._traffic.generation += size
            if isinstance(message, wire.Generate | wire.Want):
                if message.session_id in self._contexts:
                    self._generating.setdefault(message.session_id, {})[message.question] = (
                        asyncio.create_task(self._generate(message))
                    )
            elif isinstance(message, wire.Withdraw):
                self._withdraw(message.session_id, message.question)
            elif isinstance(message, wire.Have | wire.NotBrought):
                hand = self._hands.get((message.session_id, message.question))
                if hand is not None:
                    hand.told(message)
            elif isinstance(message, wire.Done):
                self._settle(
                    message.session_id, [wire.unpack_trajectory(one) for one in message.trajectories]
                )
            elif isinstance(message, wire.Judging):
                context = self._contexts.get(message.session_id)
                if context is not None and context.judging is not None:
                    context.judging(message.outputs)
            elif isinstance(message, wire.Kept | wire.ErrandDone):
                self._settle(message.session_id, message.body)
            elif isinstance(message, wire.Failed):
                text = message.message if message.data_error else f"the agent loop raised:\n{message.message}"
                self._settle(message.session_id, DataError(text))
        how = await self._line.ended()
        self._on_end(self.life)
        for session_id in list(self._results):
            self._settle(session_id, WorkerDied(f"{self._name} (pid {self.pid}) {how}"))

    async def _generate(self, message: wire.Generate | wire.Want) -> None:
        try:
            if isinstance(message, wire.Want):
                await self._generate_far(message)
            else:
                context = self._contexts[message.session_id]
                tokens = np.frombuffer(message.tokens, "<i4").astype(np.int32)
                sampling = wire.unpack_sampling(message.sampling)
                generation = await context.generate(tokens, sampling, message.turn)
                self._say(wire.pack_generation(message.session_id, message.question, generation))
        except Exception as error:  # an engine's error goes to the session's caller, not to the loop
            self._settle(message.session_id, error)
        finally:
            self._generating.get(message.session_id, {}).pop(message.question, None)

    async def _generate_far(self, want: wire.Want) -> None:
        """Generate with tokens that the worker holds; it keeps the result and uses it after `Take`."""
        ask = self._contexts[want.session_id].generate_far
        if ask is None:
            raise DataError(f"{self._name} wants to bring tokens to an engine, and was not asked to")
        late = DataError(
            f"{self._name} did not bring its tokens to the engine, or did not get what was written, in time "
            "(rollout.deadline_seconds)"
        )
        hand = WorkerHand(want, self._say, lambda: self._settle(want.session_id, late))
        place = (want.session_id, want.question)
        self._hands[place] = hand
        try:
            written = await ask(want.tokens, want.max_new_tokens, want.turn, hand)
        finally:
            self._hands.pop(place, None)
        hand.take(nothing=not len(written.tokens))

    def _withdraw(self, session_id: int, question: int) -> None:
        """Cancel a generation that the loop no longer waits for. The task is cancelled before the engine
        learns that the tokens are gone."""
        task = self._generating.get(session_id, {}).pop(question, None)
        hand = self._hands.pop((session_id, question), None)
        if task is not None:
            task.cancel()
        if hand is not None:
            hand.left()

    def _settle(self, session_id: int, outcome: list[Trajectory] | bytes | Exception) -> None:
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
