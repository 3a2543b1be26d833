"""Agent loops in worker processes, so that templates, parsers and user code of many rollouts do not share one core.

    loop.run(prompt, context) ──Begin──> worker ──Generate──> context.generate ──Generated──> worker ──Done──> rows

To the rest of the system this is a `LoopChoice` like any other: generation, seeds and batches stay with the run, so the
results are the same as without workers. A worker that dies is started again and its sessions are run once more from the
start; with the same seeds they draw the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.errors import ConfigError, DataError, UnderstudyError
from understudy.rollout import worker_wire as wire
from understudy.rollout.agent import LoopContext
from understudy.rollout.worker_line import Line, OpenLine, PipeLine
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

_START_S = 120.0
_LEFT_OUT_SECONDS = 30.0
_TRIES = 3
"""Times a session is begun; a prompt that kills its worker each time is that prompt's fault."""


class _WorkerDiedError(Exception):
    """The process is gone; the session may be begun again elsewhere."""


class LoopWorkers:
    """`count` processes that run loops. Stands in for a `LoopChoice`; call `start` first and `close` last."""

    def __init__(
        self,
        count: int,
        *,
        tokenizer: Path | str,
        agent: str,
        context: int,
        reserve: int = 1,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        open_line: OpenLine = PipeLine.open,
    ) -> None:
        """`open_line` starts a worker; on this machine when not given."""
        self._open_line = open_line
        self._setup = wire.Setup(
            tokenizer=str(tokenizer),
            agent=agent,
            options={name: dict(values) for name, values in (options or {}).items()},
            context=context,
            reserve=reserve,
            template_options=dict(template_options or {}),
            import_paths=[path for path in sys.path if path],
        )
        self._channels: list[_Channel | None] = [None] * count
        self._starting = [asyncio.Lock() for _ in range(count)]
        self._left_out_until = [0.0] * count

    async def start(self) -> None:
        await asyncio.gather(*(self._channel(i) for i in range(len(self._channels))))

    def of(self, prompt: Prompt) -> LoopWorkers:
        """Which loop a row gets is decided in the worker."""
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        for _ in range(_TRIES):
            channel = await self._least_loaded()
            try:
                return await channel.run(prompt, context)
            except _WorkerDiedError as error:
                logger.warning("%s; session %s is begun again", error, row_key(prompt.key, context.session))
        raise DataError(f"{row_key(prompt.key, context.session)}: its worker process died {_TRIES} times")

    async def _least_loaded(self) -> _Channel:
        """A worker that cannot be started again now, because its machine is gone, is left out while others are there."""
        while True:
            now = time.monotonic()
            index = min(
                range(len(self._channels)), key=lambda one: (self._left_out_until[one] > now, self._load(one))
            )
            try:
                return await self._channel(index)
            except UnderstudyError as error:
                if not any(channel is not None and channel.alive for channel in self._channels):
                    raise
                logger.warning("rollout worker %d is left out for %g s: %s", index, _LEFT_OUT_SECONDS, error)
                self._left_out_until[index] = time.monotonic() + _LEFT_OUT_SECONDS

    def _load(self, index: int) -> int:
        channel = self._channels[index]
        return channel.sessions if channel is not None else 0

    async def _channel(self, index: int) -> _Channel:
        async with self._starting[index]:
            channel = self._channels[index]
            if channel is None or not channel.alive:
                line = await self._open_line(index)
                channel = self._channels[index] = await _Channel.open(line, self._setup, index)
            return channel

    @property
    def pids(self) -> list[int]:
        return [channel.pid for channel in self._channels if channel is not None]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels if channel is not None))


class _Channel:
    """One worker process and the sessions in it."""

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name
        self._next = 0
        self._results: dict[int, asyncio.Future[list[Trajectory]]] = {}
        self._contexts: dict[int, LoopContext] = {}
        self._generating: dict[int, set[asyncio.Task[None]]] = {}
        self._listener: asyncio.Task[None] | None = None

    @staticmethod
    async def open(line: Line, setup: wire.Setup, index: int) -> _Channel:
        channel = _Channel(line, f"rollout worker {index}")
        try:
            channel._say(setup)
            first = await asyncio.wait_for(wire.read_from_worker(line.reader), _START_S)
        except BaseException:
            await line.close(at_once=True)
            raise
        if not isinstance(first, wire.Ready):
            await line.close()
            raise ConfigError(
                f"{channel._name} could not start its loop {setup.agent!r}; its own words are on stderr above"
            )
        channel._listener = asyncio.create_task(channel._listen())
        return channel

    @property
    def alive(self) -> bool:
        return self._listener is not None and not self._listener.done()

    @property
    def pid(self) -> int:
        return self._line.pid

    @property
    def sessions(self) -> int:
        return len(self._results)

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        self._next += 1
        session_id = self._next
        result: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self._results[session_id], self._contexts[session_id] = result, context
        sampling = wire.pack_sampling(context.sampling)
        try:
            self._say(
                wire.Begin(
                    session_id,
                    wire.pack_prompt(prompt),
                    context.session,
                    sampling,
                    context.context,
                    context.max_generated,
                )
            )
            return await result
        finally:
            del self._results[session_id], self._contexts[session_id]
            for task in self._generating.pop(session_id, ()):
                task.cancel()
            if not result.done() or result.cancelled() or result.exception() is not None:
                self._say(wire.Drop(session_id))

    def _say(self, message: wire.ToWorker) -> None:
        if not self._line.writer.is_closing():
            self._line.writer.write(wire.frame(message))

    async def _listen(self) -> None:
        while (message := await wire.read_from_worker(self._line.reader)) is not None:
            if isinstance(message, wire.Generate):
                if message.session_id in self._contexts:
                    tasks = self._generating.setdefault(message.session_id, set())
                    tasks.add(task := asyncio.create_task(self._generate(message)))
                    task.add_done_callback(tasks.discard)
            elif isinstance(message, wire.Done):
                self._settle(
                    message.session_id, [wire.unpack_trajectory(one) for one in message.trajectories]
                )
            elif isinstance(message, wire.Failed):
                text = message.message if message.data_error else f"the agent loop raised:\n{message.message}"
                self._settle(message.session_id, DataError(text))
        how = await self._line.ended()
        for session_id in list(self._results):
            self._settle(session_id, _WorkerDiedError(f"{self._name} (pid {self.pid}) {how}"))

    async def _generate(self, message: wire.Generate) -> None:
        context = self._contexts[message.session_id]
        tokens = np.frombuffer(message.tokens, "<i4").astype(np.int32)
        try:
            generation = await context.generate(tokens, wire.unpack_sampling(message.sampling), message.turn)
        except Exception as error:  # the engine's trouble is the caller's to know, not the loop's to handle
            self._settle(message.session_id, error)
            return
        self._say(wire.pack_generation(message.session_id, message.question, generation))

    def _settle(self, session_id: int, outcome: list[Trajectory] | Exception) -> None:
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
