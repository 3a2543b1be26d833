"""Agent loops in worker processes, so that templates, parsers and user code of many rollouts do not share one core.

    loop.run(prompt, context) ──Begin──> worker ──Generate──> context.generate ──Generated──> worker ──Done──> rows

To the rest of the system this is a `LoopChoice` like any other: generation, seeds and batches stay with the run, so the
results are the same as without workers. A worker that dies is started again and its sessions are run once more from the
start; with the same seeds they draw the same tokens. One that dies again and again without having finished any is given up.

Workers with a `Keeper` (`worker.py`) keep trajectories themselves (`run_kept`) and run errands. Each piece of such work carries
a ticket, given out for the life of one worker: what an earlier life still does is not mistaken for the work of a later one.
Such a worker may also bring its tokens to the engine itself (`LoopContext.generate_far`): then they do not pass here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from understudy.errors import ClusterError, ConfigError, DataError, UnderstudyError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import OpenLine, PipeLine
from understudy.rollout.workers.sessions import Channel, Traffic, WorkerDied
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_TRIES = 3
"""Times a session is begun; a prompt that kills its worker each time is that prompt's fault."""


class _LeftOutError(Exception):
    """The process could not be started a moment ago."""


class WorkersLost(DataError):
    """A session or an errand whose workers died again and again."""


class Ticket(Protocol):
    @property
    def number(self) -> int: ...


class Tickets(Protocol):
    """Who says where a worker keeps what it makes."""

    def take(self, writer: int) -> Ticket:
        """For one piece of work of this life of a worker; valid for as long as somebody has it."""
        ...

    def end(self, writer: int) -> None:
        """This life is over."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says of something it kept."""

    body: bytes
    ticket: Ticket
    """To be held until whatever the body announces was taken note of."""
    life: int
    """Of the worker that has it at hand."""


Result = TypeVar("Result")


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
        max_prompt: int | None = None,
        truncate: bool = False,
        open_line: OpenLine = PipeLine.open,
        tickets: Tickets | None = None,
        extra: bytes = b"",
        restarts: int = 10,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`open_line` starts a worker; on this machine when not given. `tickets` and `extra` are for workers with a keeper.

        A worker that was started again `restarts` times in a row without having finished a session is given up; `notify` is told
        in words of each.
        """
        self._open_line = open_line
        self._tickets = tickets
        self._lives = itertools.count(1)
        self.traffic = Traffic()
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
            extra=extra,
        )
        self._channels: list[Channel | None] = [None] * count
        self._starting = [asyncio.Lock() for _ in range(count)]
        self._left_out_until = [0.0] * count
        self._restarts, self._notify = restarts, notify or (lambda news: None)
        self._starts = [0] * count
        """Since a session was last finished there, that life's own start included."""
        self._problems = [""] * count
        """What a worker died of last, or why it could not be started."""

    async def start(self) -> None:
        await asyncio.gather(*(self._channel(i) for i in range(len(self._channels))))

    def of(self, prompt: Prompt) -> LoopWorkers:
        """Which loop a row gets is decided in the worker."""
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        return await self._tried(
            row_key(prompt.key, context.session), lambda channel: channel.run(prompt, context)
        )

    async def run_kept(self, prompt: Prompt, context: LoopContext) -> Answer:
        """A session whose trajectories stay with the worker's keeper; what that says of them."""

        async def attempt(channel: Channel) -> Answer:
            ticket = self._ticket(channel)
            return Answer(await channel.run_kept(prompt, context, ticket.number), ticket, channel.life)

        return await self._tried(row_key(prompt.key, context.session), attempt)

    async def errand(self, name: str, body: bytes, prefer: int | None = None) -> Answer:
        """Something else a worker can do; by the one whose life is `prefer`, where it still lives. Done again where one died."""

        async def attempt(channel: Channel) -> Answer:
            ticket = self._ticket(channel)
            return Answer(await channel.errand(name, body, ticket.number), ticket, channel.life)

        return await self._tried(f"errand {name}", attempt, prefer)

    def _ticket(self, channel: Channel) -> Ticket:
        if self._tickets is None:
            raise ConfigError("these workers were started without a keeper")
        return self._tickets.take(channel.life)

    async def _tried(
        self, what: str, attempt: Callable[[Channel], Awaitable[Result]], prefer: int | None = None
    ) -> Result:
        for _ in range(_TRIES):
            channel = self._living(prefer) or await self._least_loaded()
            try:
                result = await attempt(channel)
            except WorkerDied as error:
                logger.warning("%s; %s is begun again", error, what)
                self._note(channel, str(error))
            except UnderstudyError:
                self._did_something(channel)
                raise
            else:
                self._did_something(channel)
                return result
        raise WorkersLost(f"{what}: its worker process died {_TRIES} times")

    def _did_something(self, channel: Channel) -> None:
        if channel in self._channels:
            self._starts[self._channels.index(channel)] = 1

    def _note(self, channel: Channel, problem: str) -> None:
        if channel in self._channels:
            self._problems[self._channels.index(channel)] = problem

    def _is_given_up(self, index: int) -> bool:
        """Not while it is being started for the last time: whoever waits for that may still be served."""
        return self._is_spent(index) and not self._starting[index].locked()

    def _is_spent(self, index: int) -> bool:
        channel = self._channels[index]
        return self._starts[index] > self._restarts and not (channel is not None and channel.alive)

    def _living(self, life: int | None) -> Channel | None:
        return next(
            (one for one in self._channels if one is not None and one.life == life and one.alive), None
        )

    async def _least_loaded(self) -> Channel:
        """A worker that cannot be started again now, because its machine is gone, is left out for a while. Where none lives they are
        waited for, until each was given up."""
        while True:
            now = time.monotonic()
            left = [one for one in range(len(self._channels)) if not self._is_given_up(one)]
            if not left:
                raise self._none_left()
            index = min(left, key=lambda one: (self._left_out_until[one] > now, self._load(one)))
            if self._left_out_until[index] > now:
                await asyncio.sleep(min(self._left_out_until[one] for one in left) - now)
                continue
            try:
                return await self._channel(index)
            except _LeftOutError:
                continue
            except UnderstudyError as error:
                pause = self._left_out_until[index] - time.monotonic()
                logger.warning("rollout worker %d is left out for %.0f s: %s", index, pause, error)

    def _none_left(self) -> ClusterError:
        reasons = "\n".join(dict.fromkeys(self._problems))
        return ClusterError(
            f"{reasons}\nNo rollout worker is left: each was started again {self._restarts} times in a row without having finished a "
            "session (cluster.restarts.workers)"
        )

    def _load(self, index: int) -> int:
        channel = self._channels[index]
        return channel.sessions if channel is not None else 0

    async def _channel(self, index: int) -> Channel:
        async with self._starting[index]:
            channel = self._channels[index]
            if channel is not None and channel.alive:
                return channel
            if self._left_out_until[index] > time.monotonic() or self._is_spent(index):
                raise _LeftOutError
            if self._starts[index] > 0:
                times = f"{self._starts[index]} of {self._restarts}"
                self._notify(
                    f"{self._problems[index] or f'rollout worker {index} is gone'}; started again ({times})"
                )
            self._starts[index] += 1
            try:
                line = await self._open_line(index)
                fresh = Channel(line, f"rollout worker {index}", next(self._lives), self.traffic, self._ended)
                await fresh.begin(self._setup)
            except UnderstudyError as error:
                self._problems[index] = f"rollout worker {index} could not be started: {error}"
                pause = _FIRST_PAUSE_SECONDS * 2 ** (self._starts[index] - 1)
                self._left_out_until[index] = time.monotonic() + min(pause, _LONGEST_PAUSE_SECONDS)
                raise
            self._channels[index] = fresh
            return fresh

    def _ended(self, life: int) -> None:
        if self._tickets is not None:
            self._tickets.end(life)

    @property
    def pids(self) -> list[int]:
        return [channel.pid for channel in self._channels if channel is not None]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels if channel is not None))
