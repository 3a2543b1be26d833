"""Monitors processes that a run cannot replace one by one: the student's ranks and the critic.

| a process    | detected by                          | result                                                |
|--------------|--------------------------------------|-------------------------------------------------------|
| dies         | its handle, within a second          | an error with the end of its log                      |
| stands still | its mark is the same for `silence_s` | an error; after a request to stop, `GivenUp`          |

A mark changes while a process works: a counter in a file for a rank, the answered health checks of the critic.
Such a process was stopped by a signal, or its machine stands still; its peers would wait for it for ever. Marks
are compared and not times, because the clocks of machines differ. Only time in which the trainer itself looked
is counted, so a trainer that was stopped together with its processes continues with them.
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

from understudy.cluster.local import Child, exit_report
from understudy.errors import LOST_PEER, GivenUp, RankLost

BEAT_S = 2.0
"""How often a mark changes."""
SILENCE_S = 60.0
_LOOK_SECONDS = 0.5


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


@dataclass(slots=True)
class _Watched:
    """One process: how to name it, its handle, and its mark at the last look."""

    who: str
    child: Child
    said_before: int
    """The size of its log before it started."""
    remote: bool
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
    """The processes of one role by number. The event loop runs `watch`; the thread that waits for an answer asks
    `lost`."""

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

    def add(
        self,
        number: int,
        who: str,
        child: Child,
        said_before: int,
        *,
        remote: bool,
        mark: Callable[[], object],
    ) -> None:
        self._watched[number] = _Watched(who, child, said_before, remote, mark)

    def lost(self) -> RankLost | None:
        """The error of a process that ended by its own fault; one that exited with `LOST_PEER` counts only if no
        other did.

        The first error found is kept, because callers ask at different times, perhaps after other processes ended
        because of it.
        """
        if self._exit_expected or self._loss is not None:
            return self._loss
        gone = [one for _, one in sorted(self._watched.items()) if not one.child.alive]
        if gone:
            one = min(gone, key=lambda one: one.child.process.returncode == LOST_PEER)
            self._loss = self._kind(exit_report(one.who, one.child, one.said_before, remote=one.remote))
        else:
            self._loss = self._silent()
        return self._loss

    def _silent(self) -> RankLost | None:
        for one in self._watched.values():
            one.look(self.beat_s)
            if one.silent_s > self._silence_s:
                told = (
                    f"{one.who} lives and has done nothing for {self._silence_s:.0f} s (it was stopped by a signal, or "
                    f"its machine stands still); log: {one.child.log}"
                )
                if self._on_giving_up is None:
                    return self._kind(told)
                self._on_giving_up()
                return GivenUp(told)
        return None

    async def watch(self) -> None:
        """Never returns. Raises once a process is lost, even while no command is under way."""
        while (gone := self.lost()) is None:
            await asyncio.sleep(min(_LOOK_SECONDS, self.beat_s))
        raise gone

    def expect_exit(self) -> None:
        """From now on the end of a process is expected."""
        self._exit_expected = True

    def stop_soon(self, patience_s: float, on_giving_up: Callable[[], None]) -> None:
        """Called on a stop request. A process that does nothing counts as lost after `patience_s` from now on."""
        self._silence_s, self._on_giving_up = patience_s, on_giving_up
        for one in self._watched.values():
            one.silent_s = one.looked = 0.0
