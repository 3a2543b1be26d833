"""Heartbeats of ranks: detects a rank whose process is alive but does nothing.

    rank ──a new mark every 2 s──> file in the meeting folder ──> trainer: the same mark for 60 s = rank lost

Such a rank was stopped by a signal, or its machine stands still. Without heartbeats the group would wait for
such a rank for ever, because its process does not end. Marks are compared and not times, because the clocks
of machines differ. Only time in which the trainer itself looked is counted, so a trainer that was stopped
together with its ranks continues with them.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_BEAT_S = 2.0
_LONGEST_LOOK_S = 2 * _BEAT_S
"""The most that one look may add to a rank's silence."""
SILENCE_S = 60.0


def beat(meeting: Path, rank: int) -> None:
    """Starts the heartbeat thread of a rank. It writes marks until the process ends."""

    def leave_marks() -> None:
        count = 0
        while True:
            count += 1
            with suppress(OSError):  # a full disk is reported by other code
                _mark_file(meeting, rank).write_text(f"{os.getpid()} {count}")
            time.sleep(_BEAT_S)

    threading.Thread(target=leave_marks, name="pulse", daemon=True).start()


class Pulse:
    """The last mark of every rank and how long it has been the same. Used by the trainer's process."""

    def __init__(self, meeting: Path, silence_s: float = SILENCE_S) -> None:
        self._meeting, self.silence_s = meeting, silence_s
        self._marks: dict[int, str] = {}
        self._silent_for: dict[int, float] = {}
        self._looked: dict[int, float] = {}

    def silent(self, rank: int) -> bool:
        """Whether a rank's mark has been the same for `silence_s`. A rank without a mark is still
        starting."""
        now = time.monotonic()
        since = now - self._looked.get(rank, now)
        if rank in self._looked and since < _BEAT_S / 2:
            return False
        self._looked[rank] = now
        with suppress(OSError):
            mark = _mark_file(self._meeting, rank).read_text()
            # A half-written mark is a new one too: the rank is writing.
            if mark != self._marks.get(rank):
                self._marks[rank], self._silent_for[rank] = mark, 0.0
        if rank in self._marks:
            self._silent_for[rank] += min(since, _LONGEST_LOOK_S)
        return self._silent_for.get(rank, 0.0) > self.silence_s


def _mark_file(meeting: Path, rank: int) -> Path:
    return meeting / f"pulse-{rank}"
