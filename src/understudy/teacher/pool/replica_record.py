"""The pool's record of one replica: client, health, load, tasks and counters."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from understudy.errors import TeacherError, TeacherUnavailable
from understudy.serving.supervisor import RestartCount
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.pool.balance import Load
from understudy.teacher.pool.health import Failure, ReplicaHealth
from understudy.teacher.pool.launch import ReplicaSpec

LATENCIES_KEPT = 512


@dataclass(slots=True)
class Replica:
    """Held by `ReplicaSupervisor`; the pool updates it on its event loop."""

    spec: ReplicaSpec
    health: ReplicaHealth
    restart_count: RestartCount
    """Restarts since it was last healthy for `Restarts.steady_s`."""
    slots: asyncio.Semaphore
    """Limits its requests in flight; further ones wait in the pool, where their deadline has not started."""
    longest_rest: float = 30.0
    """Most seconds that it gets no request because its server asks for that (`Retry-After`)."""
    client: ScoringClient | None = None
    load: Load = field(default_factory=Load)
    probing: asyncio.Task[None] | None = None
    restarting: asyncio.Task[None] | None = None
    requests: int = 0
    tokens: int = 0
    """Tokens scored; failed requests do not count."""
    failures: dict[Failure, int] = field(default_factory=dict)
    ejections: int = 0
    restarts: int = 0
    resting_until: float = 0.0
    """Its server asked not to be asked before this time of the pool's clock (`Retry-After`)."""
    given_up: str | None = None
    """Why it is not restarted any more; begins with the end of its log. None while it may be."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    @property
    def name(self) -> str:
        return self.spec.name

    def succeeded(self, tokens: int, seconds: float, now: float) -> None:
        self.requests += 1
        self.tokens += tokens
        self.latencies.append(seconds)
        self.load.clear_debt()
        self.health.request_ok(now)

    def failed(self, failure: Failure, tokens: int, reason: str, now: float) -> None:
        self.failures[failure] = self.failures.get(failure, 0) + 1
        self.load.failed(tokens, now)
        self.health.request_failed(failure, reason)

    def turned_away(self, failure: Failure, tokens: int, reason: str, now: float) -> None:
        """Like `failed`, by a server that says when to come back: that is no fault, so its health does not change."""
        self.failures[failure] = self.failures.get(failure, 0) + 1
        self.load.failed(tokens, now)
        self.health.last_reason = reason

    def rest_as_asked(self, error: TeacherError, now: float) -> bool:
        """Whether its server asked for a pause with this error. If so, it gets no request until the pause is over."""
        if not isinstance(error, TeacherUnavailable) or not error.retry_after:
            return False
        self.resting_until = max(self.resting_until, now + min(error.retry_after, self.longest_rest))
        return True

    def rests(self, now: float) -> bool:
        return now < self.resting_until
