"""The pool of worker processes that run agent loops, so that many rollouts do not share one core.

    loop.run(prompt, context) ──Begin──> worker ──Generate──> context.generate ──Generated──> worker ──Done──> rows

The pool has the interface of a `LoopChoice`. Generation, seeds and batches stay with the run, so the results
are the same as without workers. A worker that dies is restarted and its sessions run again from the start; they
get the generations again that they had got before. A worker that keeps dying without finishing a session is
given up.

Workers with a `RowHandler` (`process.py`) store trajectories themselves (`run_and_store`) and do other work on rows (`request_work`). Each such piece
of work names a segment of one life of a worker, that is, of one process. So late writes of a dead
process are not mistaken for those of its successor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from understudy.errors import ClusterError, ConfigError, DataError, UnderstudyError
from understudy.rollout.agents.agent import LoopContext, LostOutput
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import OpenLine, PipeWorker
from understudy.rollout.workers.sessions import WorkerChannel, WorkerDied, WorkerSession, WorkerTraffic
from understudy.serving.supervisor import RestartCount, Restarts
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_TRIES = 3
"""Attempts per session; a prompt that crashes its worker each time fails with `WorkersLost`."""


class _UnavailableError(Exception):
    """The worker is in its backoff after a failed start, or is given up."""


class WorkersLost(DataError):
    """Every attempt at a session or a work request ended with the death of its worker."""


class HeldSegment(Protocol):
    @property
    def number(self) -> int: ...


class Segments(Protocol):
    """Names the segment that a worker writes its rows to (`WriterSegments` of the data plane)."""

    def take(self, writer: int) -> HeldSegment:
        """The segment for one piece of work of this worker life; kept as long as the answer is referenced."""
        ...

    def end(self, writer: int) -> None:
        """Called when this worker life is over."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's answer about rows that it keeps."""

    body: bytes
    segment: HeldSegment
    """The caller holds it until the rows that the body announces are adopted."""
    life: int
    """The life of the worker that keeps them."""


Result = TypeVar("Result")


class LoopWorkers:
    """`count` worker processes, with the interface of a `LoopChoice`. Used by the trainer on its event loop;
    call `start` first and `close` last."""

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
        max_prompt: int | None = None,
        truncate: bool = False,
        pictures: str = "",
        own_code: bool = False,
        open_line: OpenLine = PipeWorker.open,
        segments: Segments | None = None,
        extra: bytes = b"",
        restarts: int = 10,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`open_line` starts a worker, by default on this machine. `segments` and `extra` are for workers with
        a `RowHandler`. `pictures` is the folder of the run's pictures, if the student reads them.
        `own_code`: the tokenizer's class is code of the model's folder.

        A worker that was restarted `restarts` times in a row without finishing a session is given up;
        `notify` gets a message for each restart.
        """
        self._open_line = open_line
        self._segments = segments
        self._lives = itertools.count(1)
        self.traffic = WorkerTraffic()
        self._setup = wire.Setup(
            tokenizer=str(tokenizer),
            agent=agent,
            options={name: dict(values) for name, values in (options or {}).items()},
            context=context,
            reserve=reserve,
            template_options=dict(template_options or {}),
            import_paths=[path for path in sys.path if path],
            max_prompt=max_prompt,
            truncate=truncate,
            pictures=pictures,
            own_code=own_code,
            extra=extra,
        )
        self._channels: list[WorkerChannel | None] = [None] * count
        self._starting = [asyncio.Lock() for _ in range(count)]
        self._notify = notify or (lambda news: None)
        self._restarts = [RestartCount(Restarts(restarts, _FIRST_PAUSE_SECONDS)) for _ in range(count)]
        """By worker: restarts since a session was last finished there."""

    async def start(self) -> None:
        await asyncio.gather(*(self._channel(i) for i in range(len(self._channels))))

    def of(self, prompt: Prompt) -> LoopWorkers:
        """The pool itself: the worker picks the row's loop."""
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory | LostOutput]:
        with closing(WorkerSession(prompt, context)) as session:
            return await self._with_retries(
                row_key(prompt.key, context.session), lambda channel: channel.run(session)
            )

    async def run_and_store(self, prompt: Prompt, context: LoopContext) -> WorkerReply:
        """Runs a session whose trajectories the worker's `RowHandler` stores; returns its answer."""

        with closing(WorkerSession(prompt, context)) as session:

            async def attempt(channel: WorkerChannel) -> WorkerReply:
                segment = self._segment(channel)
                return WorkerReply(
                    await channel.run_and_store(session, segment.number), segment, channel.life
                )

            return await self._with_retries(row_key(prompt.key, context.session), attempt)

    async def request_work(self, name: str, body: bytes, prefer: int | None = None) -> WorkerReply:
        """Has a `RowHandler` do work, on the worker whose life is `prefer` if it is alive; repeated if the worker
        dies."""

        async def attempt(channel: WorkerChannel) -> WorkerReply:
            segment = self._segment(channel)
            return WorkerReply(await channel.request_work(name, body, segment.number), segment, channel.life)

        return await self._with_retries(f"work request {name}", attempt, prefer)

    def _segment(self, channel: WorkerChannel) -> HeldSegment:
        if self._segments is None:
            raise ConfigError("these workers were started without a RowHandler")
        return self._segments.take(channel.life)

    async def _with_retries(
        self, what: str, attempt: Callable[[WorkerChannel], Awaitable[Result]], prefer: int | None = None
    ) -> Result:
        for _ in range(_TRIES):
            channel = self._living(prefer) or await self._least_loaded()
            try:
                result = await attempt(channel)
            except WorkerDied as error:
                logger.warning("%s; %s is begun again", error, what)
                self._note(channel, str(error))
            except UnderstudyError:
                self._count_as_useful(channel)
                raise
            else:
                self._count_as_useful(channel)
                return result
        raise WorkersLost(f"{what}: its worker process died {_TRIES} times")

    def _count_as_useful(self, channel: WorkerChannel) -> None:
        if channel in self._channels:
            self._restarts[self._channels.index(channel)].was_useful()

    def _note(self, channel: WorkerChannel, problem: str) -> None:
        if channel in self._channels:
            self._restarts[self._channels.index(channel)].problem = problem

    def _is_given_up(self, index: int) -> bool:
        """Not while its last start is in progress: callers that wait for it may still be served."""
        return self._is_spent(index) and not self._starting[index].locked()

    def _is_spent(self, index: int) -> bool:
        channel, count = self._channels[index], self._restarts[index]
        alive = channel is not None and channel.alive
        return self._was_started(index) and count.spent and not alive

    def _was_started(self, index: int) -> bool:
        """Whether a start was tried."""
        return self._channels[index] is not None or self._restarts[index].problem != ""

    def _living(self, life: int | None) -> WorkerChannel | None:
        return next(
            (one for one in self._channels if one is not None and one.life == life and one.alive), None
        )

    async def _least_loaded(self) -> WorkerChannel:
        """The worker with the fewest sessions, started if necessary. A worker that cannot be started is
        skipped for a backoff time. If none is alive, this waits until one is, or until all are given up."""
        while True:
            left = [one for one in range(len(self._channels)) if not self._is_given_up(one)]
            if not left:
                raise self._none_left()
            index = min(left, key=lambda one: (self._restarts[one].left_s() > 0, self._load(one)))
            if self._restarts[index].left_s() > 0:
                await asyncio.sleep(min(self._restarts[one].left_s() for one in left))
                continue
            try:
                return await self._channel(index)
            except _UnavailableError:
                continue
            except UnderstudyError as error:
                pause = self._restarts[index].left_s()
                logger.warning("rollout worker %d is left out for %.0f s: %s", index, pause, error)

    def _none_left(self) -> ClusterError:
        reasons = "\n".join(dict.fromkeys(count.problem for count in self._restarts))
        return ClusterError(
            f"{reasons}\nNo rollout worker is left: each was started again {self._restarts[0].limits.most} times in a row without having finished a "
            "session (cluster.restarts.workers)"
        )

    def _load(self, index: int) -> int:
        channel = self._channels[index]
        return channel.sessions if channel is not None else 0

    async def _channel(self, index: int) -> WorkerChannel:
        async with self._starting[index]:
            channel = self._channels[index]
            if channel is not None and channel.alive:
                return channel
            count = self._restarts[index]
            if count.left_s() > 0 or self._is_spent(index):
                raise _UnavailableError
            if self._was_started(index):
                count.restart()
                times = f"{count.in_vain} of {count.limits.most}"
                self._notify(f"{count.problem or f'rollout worker {index} is gone'}; started again ({times})")
            try:
                line = await self._open_line(index)
                fresh = WorkerChannel(
                    line, f"rollout worker {index}", next(self._lives), self.traffic, self._ended
                )
                await fresh.begin(self._setup)
            except UnderstudyError as error:
                count.failed(f"rollout worker {index} could not be started: {error}")
                raise
            self._channels[index] = fresh
            return fresh

    def _ended(self, life: int) -> None:
        if self._segments is not None:
            self._segments.end(life)

    @property
    def pids(self) -> list[int]:
        return [channel.pid for channel in self._channels if channel is not None]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels if channel is not None))
