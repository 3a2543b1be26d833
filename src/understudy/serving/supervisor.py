"""Supervision of our processes: when a lost one is started again, and how one that hangs is detected.

    up ──lost──> waits ──back-off over──> starts ──serves──> up
                   └──`Restarts.most` starts in a row without use──> given up

| role            | a loss is detected by                | then                                               |
|-----------------|--------------------------------------|----------------------------------------------------|
| engine process  | its handle, or /health               | restarted; it serves once it has the newest weights |
| vLLM server     | its handle, or a refused connection  | the same                                           |
| rollout worker  | its connection                       | restarted; its sessions run again from the start   |
| teacher replica | its handle, failed score requests,   | ejected, then probed or restarted (`teacher/pool/`) |
|                 | or /health while it takes weights    |                                                     |
| rank, critic    | its handle, or its heartbeat         | the run goes back to its last checkpoint           |

`Restarts` and `RestartCount` are the rule for the first four. `Monitor` watches ranks and critic, which cannot be
replaced one by one. A role keeps how it starts a process and what counts as use: an engine process served for a
while, a vLLM server answered a request, a rollout worker finished a session, a replica stayed healthy.

A heartbeat is a mark that changes while a process works: a counter in a file for a rank, the answered health checks
of the critic. A process whose mark stays the same for `silence_s` was stopped by a signal, or its machine stands
still; its peers would wait for it for ever. Marks are compared and not times, because the clocks of machines differ.
Only time in which the trainer itself looked is counted, so a trainer that was stopped together with its processes
continues with them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from understudy.errors import LOST_PEER, GivenUp, RankLost

BEAT_S = 2.0
"""How often a mark changes."""
SILENCE_S = 60.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Restarts:
    """Limits on restarts in a row of one process."""

    most: int | None = 5
    """None: no limit."""
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    steady_s: float = 60.0
    """A process that served for this long was of use."""

    def wait_before(self, restart: int) -> float:
        """Seconds to wait before the `restart`-th in a row, counted from 1."""
        return float(min(self.first_wait_s * 2 ** min(restart - 1, 30), self.longest_wait_s))


class RestartCount:
    """Restarts in a row of one process that were of no use, and its last problem.

    The owner of the process calls it on one event loop. The clock is injected for tests.
    """

    def __init__(self, limits: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self.in_vain = 0
        self.problem = ""
        """How it last ended, or why it could not be started."""
        self._up_since = clock()
        self.due = 0.0
        """The time of the next start after one that failed."""

    @property
    def spent(self) -> bool:
        """Whether it is given up unless it is up."""
        return self.limits.most is not None and self.in_vain >= self.limits.most

    def restart(self) -> float:
        """Counts a restart; returns its back-off in seconds."""
        self.in_vain += 1
        return self.limits.wait_before(self.in_vain)

    def failed(self, problem: str) -> None:
        """The process could not be started."""
        self.problem = problem
        self.due = self._clock() + self.limits.wait_before(self.in_vain + 1)

    def serves(self) -> None:
        self._up_since = self._clock()

    def lost(self, problem: str) -> None:
        self.problem = problem
        if self._clock() - self._up_since > self.limits.steady_s:
            self.in_vain = 0

    def was_useful(self) -> None:
        self.in_vain = 0

    def left_s(self) -> float:
        """Seconds until the next start is due."""
        return max(0.0, self.due - self._clock())


def beat(file: Path) -> None:
    """Starts a heartbeat thread, which writes a new mark into `file` every `BEAT_S` until the process ends."""

    def leave_marks() -> None:
        for count in itertools.count():
            with suppress(OSError):  # a full disk is reported by other code
                file.write_text(f"{os.getpid()} {count}")
            time.sleep(BEAT_S)

    threading.Thread(target=leave_marks, name="heartbeat", daemon=True).start()


def newest_mark(file: Path) -> str | None:
    """None before the first one. A half-written mark is new too: its process is writing."""
    try:
        return file.read_text()
    except OSError:
        return None


class StartedProcess(Protocol):
    """A launcher's handle on a process (`cluster.local.Child`)."""

    log: Path
    ready: dict[str, Any]
    """The content of its ready file."""

    @property
    def alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None: ...

    def exit_report(self, who: str) -> str:
        """How the process ended, with the end of its log."""
        ...


@dataclass(slots=True)
class _Watched:
    """One process: how to name it, its handle, and its mark at the last look."""

    who: str
    process: StartedProcess
    mark: Callable[[], object]
    seen: object = None
    looked: float = 0.0
    silent_s: float = 0.0

    def look(self, beat_s: float) -> None:
        now = time.monotonic()
        since = now - self.looked
        if self.looked and since < beat_s / 2:
            return
        mark = self.mark()
        if mark is not None and mark != self.seen:
            self.seen, self.silent_s = mark, 0.0
        elif self.seen is not None and self.looked:  # without a first mark it is still starting
            self.silent_s += min(since, 2 * beat_s)
        self.looked = now


class Monitor:
    """Processes that a run cannot replace one by one, by number. The event loop runs `watch`; the thread that waits
    for an answer asks `lost`."""

    def __init__(self, kind: type[RankLost], *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        """`kind`: the error of a lost process."""
        self._kind, self._beat_s, self._silence_s = kind, beat_s, silence_s
        self._watched: dict[int, _Watched] = {}
        self._loss: RankLost | None = None
        self._exit_expected = False
        self._on_giving_up: Callable[[], None] | None = None
        """Set after a stop request."""

    @property
    def exit_expected(self) -> bool:
        return self._exit_expected

    @property
    def beat_s(self) -> float:
        """The time between two looks, and between two marks if the monitor makes them."""
        return min(self._beat_s, self._silence_s / 4)

    def add(self, number: int, who: str, process: StartedProcess, mark: Callable[[], object]) -> None:
        self._watched[number] = _Watched(who, process, mark)

    def lost(self) -> RankLost | None:
        """The error of a process that ended by its own fault; one that exited with `LOST_PEER` counts only if no
        other did.

        The first error found is kept, because callers ask at different times, perhaps after other processes ended
        because of it.
        """
        if self._exit_expected or self._loss is not None:
            return self._loss
        gone = [one for _, one in sorted(self._watched.items()) if not one.process.alive]
        if gone:
            one = min(gone, key=lambda one: one.process.exit_code == LOST_PEER)
            self._loss = self._kind(one.process.exit_report(one.who))
        else:
            self._loss = self._silent()
        return self._loss

    def _silent(self) -> RankLost | None:
        for one in self._watched.values():
            one.look(self.beat_s)
            if one.silent_s > self._silence_s:
                message = (
                    f"{one.who} lives and has done nothing for {self._silence_s:.0f} s (it was stopped by a signal, or "
                    f"its machine stands still); log: {one.process.log}"
                )
                if self._on_giving_up is None:
                    return self._kind(message)
                self._on_giving_up()
                return GivenUp(message)
        return None

    async def watch(self) -> None:
        """Never returns. Raises once a process is lost, even while no command is under way."""
        while (gone := self.lost()) is None:
            await asyncio.sleep(min(_LOOK_SECONDS, self.beat_s))
        raise gone

    def expect_exit(self) -> None:
        """From now on the end of a process is expected."""
        self._exit_expected = True

    def stop_soon(self, timeout_s: float, on_giving_up: Callable[[], None]) -> None:
        """Called on a stop request. A process that does nothing counts as lost after `timeout_s` from now on."""
        self._silence_s, self._on_giving_up = timeout_s, on_giving_up
        for one in self._watched.values():
            one.silent_s = one.looked = 0.0
