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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.errors import ConfigError, DataError
from understudy.rollout import worker_wire as wire
from understudy.rollout.agent import LoopContext
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

_START_S = 120.0
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
    ) -> None:
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

    async def start(self) -> None:
        await asyncio.gather(*(self._channel(i) for i in range(len(self._channels))))

    def of(self, prompt: Prompt) -> LoopWorkers:
        """Which loop a row gets is decided in the worker."""
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        for _ in range(_TRIES):
            loads = [channel.sessions if channel else 0 for channel in self._channels]
            channel = await self._channel(loads.index(min(loads)))
            try:
                return await channel.run(prompt, context)
            except _WorkerDiedError as error:
                logger.warning("%s; session %s is begun again", error, row_key(prompt.key, context.session))
        raise DataError(f"{row_key(prompt.key, context.session)}: its worker process died {_TRIES} times")

    async def _channel(self, index: int) -> _Channel:
        async with self._starting[index]:
            channel = self._channels[index]
            if channel is None or not channel.alive:
                channel = self._channels[index] = await _Channel.open(self._setup, f"rollout worker {index}")
            return channel

    @property
    def pids(self) -> list[int]:
        return [channel.pid for channel in self._channels if channel is not None]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels if channel is not None))


class _Channel:
    """One worker process and the sessions in it."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self._name = process, name
        self._next = 0
        self._results: dict[int, asyncio.Future[list[Trajectory]]] = {}
        self._contexts: dict[int, LoopContext] = {}
        self._generating: dict[int, set[asyncio.Task[None]]] = {}
        self._listener: asyncio.Task[None] | None = None

    @staticmethod
    async def open(setup: wire.Setup, name: str) -> _Channel:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "understudy.rollout.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        channel = _Channel(process, name)
        try:
            channel._say(setup)
            assert process.stdout is not None
            first = await asyncio.wait_for(wire.read_from_worker(process.stdout), _START_S)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if not isinstance(first, wire.Ready):
            await process.wait()
            raise ConfigError(
                f"{name} could not start its loop {setup.agent!r}; its own words are on stderr above"
            )
        channel._listener = asyncio.create_task(channel._listen())
        return channel

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and self._listener is not None and not self._listener.done()

    @property
    def pid(self) -> int:
        return self._process.pid

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
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(wire.frame(message))

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while (message := await wire.read_from_worker(self._process.stdout)) is not None:
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
        code = await self._process.wait()
        for session_id in list(self._results):
            self._settle(
                session_id, _WorkerDiedError(f"{self._name} (pid {self.pid}) died with exit code {code}")
            )

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
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._listener is not None:
            await self._listener
