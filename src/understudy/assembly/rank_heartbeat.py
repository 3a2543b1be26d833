"""A rank that lives and does nothing: stopped by somebody, or on a machine that stands still.

    rank ──a new mark every 2 s──> the meeting folder ──> the trainer: the same mark for 60 s ──> the rank is lost

Its group would wait for it for ever, and nothing that ends a process would be seen. Marks are compared, not times: the clocks of
machines differ. Only time in which the trainer itself looked is counted, so one that was stopped with all its ranks goes on with them.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_BEAT_S = 2.0
_LONGEST_LOOK_S = 2 * _BEAT_S
"""What one look may add to a silence."""
SILENCE_S = 60.0


def beat(meeting: Path, rank: int) -> None:
    """Leaves marks from now on, on a thread of its own, until the process ends."""

    def leave_marks() -> None:
        count = 0
        while True:
            count += 1
            with suppress(OSError):  # a full disk is told by others
                _mark_file(meeting, rank).write_text(f"{os.getpid()} {count}")
            time.sleep(_BEAT_S)

    threading.Thread(target=leave_marks, name="pulse", daemon=True).start()


class Pulse:
    """The marks of all ranks, as the trainer sees them."""

    def __init__(self, meeting: Path, silence_s: float = SILENCE_S) -> None:
        self._meeting, self.silence_s = meeting, silence_s
        self._marks: dict[int, str] = {}
        self._silent_for: dict[int, float] = {}
        self._looked: dict[int, float] = {}

    def silent(self, rank: int) -> bool:
        """Whether its mark has been the same for too long. One that has left none yet is still starting."""
        now = time.monotonic()
        since = now - self._looked.get(rank, now)
        if rank in self._looked and since < _BEAT_S / 2:
            return False
        self._looked[rank] = now
        with suppress(OSError):
            mark = _mark_file(self._meeting, rank).read_text()
            # Half-written counts as news too: somebody is writing.
            if mark != self._marks.get(rank):
                self._marks[rank], self._silent_for[rank] = mark, 0.0
        if rank in self._marks:
            self._silent_for[rank] += min(since, _LONGEST_LOOK_S)
        return self._silent_for.get(rank, 0.0) > self.silence_s


def _mark_file(meeting: Path, rank: int) -> Path:
    return meeting / f"pulse-{rank}"
