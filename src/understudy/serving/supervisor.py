"""When a lost process is started again: back-off and giving up, the same for every role.

    up ──lost──> waits ──back-off over──> starts ──serves──> up
                   └──`Restarts.most` starts in a row without use──> given up

The role starts the process and knows when it was of use: an engine process served for a while, a vLLM server
answered a request, a rollout worker finished a session. Teacher replicas have rules of their own, because a
replica that runs may still be refused traffic (`teacher/pool/health.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restarts:
    """Limits on restarts in a row of one process."""

    most: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    steady_s: float = 60.0
    """A process that served for this long was of use."""

    def wait_before(self, restart: int) -> float:
        """Seconds to wait before the `restart`-th in a row, counted from 1."""
        return float(min(self.first_wait_s * 2 ** (restart - 1), self.longest_wait_s))


class RestartCount:
    """Restarts in a row of one process that were of no use, and its last problem.

    The owner of the process calls it on one event loop. The clock is injected for tests.
    """

    def __init__(self, limits: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self.in_vain = 0
        self.problem = ""
        """How it last died, or why it could not be started."""
        self._up_since = clock()
        self.due = 0.0
        """The time of the next start after one that failed."""

    @property
    def spent(self) -> bool:
        """Whether it is given up unless it is up."""
        return self.in_vain >= self.limits.most

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
