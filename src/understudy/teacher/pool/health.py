"""A replica's health as a pure state machine: events and times in, states out; no waiting, no calls.

    STARTING ──started──> PROBING ──probe_passed──> HEALTHY <──request_ok / probe_passed── SUSPECT
       ▲                     │                         └──────────request_failed─────────────▲ │
       │                probe_failed                                                           │ streak, bad replies,
       │                     ▼                                                                 ▼ failed probe
    RESTARTING <──restart── EJECTED <───────────────────── died / eject ───────────────────────┘
                                               RETIRED: removed for good, from any state

Health depends on score requests, not on /health: a hung server still answers that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from understudy.serving.supervisor import Restarts


class State(StrEnum):
    """Whether a replica gets requests, and what happens to it next (see the drawing above)."""

    STARTING = "starting"
    """Its process is being launched for the first time."""
    PROBING = "probing"
    """It has an address and is being checked; no traffic yet."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It failed a request; it is used only if no healthy replica is left, and is probed at once."""
    EJECTED = "ejected"
    """Out of traffic until its backoff is over."""
    RESTARTING = "restarting"
    RETIRED = "retired"


class Failure(StrEnum):
    """How a request to a replica failed."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    SERVER = "server"
    BAD_REPLY = "bad_reply"
    """An answer that fails validation. A correct replica never sends one, so successes do not reset the
    count."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a replica is ejected, how long its backoff is, and when it is given up."""

    eject_after: int = 3
    """Request failures in a row."""
    eject_after_bad_replies: int = 3
    """Bad replies since the last admission, not necessarily in a row."""
    restarts: Restarts = field(default_factory=lambda: Restarts(most=None))
    """Its waits are the backoff, also of a replica that runs; `steady_s` of health reset it."""


@dataclass(slots=True)
class ReplicaHealth:
    """One replica's state. Every method is an event at time `now` (seconds of the injected clock).

    `ReplicaSupervisor` and `Replica` call it on the pool's event loop.
    """

    rules: HealthRules
    state: State = State.STARTING
    streak: int = 0
    """Failed requests in a row."""
    bad_replies: int = 0
    """Since the last admission."""
    setbacks: int = 0
    """Ejections and failed revivals since the last reset; the backoff doubles with each."""
    retry_at: float = 0.0
    """When an ejected replica is revived."""
    healthy_since: float = 0.0
    last_reason: str = ""

    @property
    def usable(self) -> bool:
        return self.state in (State.HEALTHY, State.SUSPECT)

    def started(self) -> None:
        """It has an address."""
        if self.state in (State.STARTING, State.RESTARTING, State.EJECTED):
            self.state = State.PROBING

    def probe_passed(self, now: float) -> None:
        if self.state is State.PROBING:
            self.streak = self.bad_replies = 0
            self.healthy_since = now
            self.state = State.HEALTHY
        elif self.state is State.SUSPECT:
            # The streak is kept: the short fixed tokens may pass while real requests fail.
            self.state = State.HEALTHY

    def probe_failed(self, now: float, reason: str) -> None:
        if self.state is State.PROBING:
            self._eject(now, reason)
        elif self.usable:
            self.state = State.SUSPECT
            self.last_reason = reason

    def request_ok(self, now: float) -> None:
        if not self.usable:
            return
        self.streak = 0
        self.state = State.HEALTHY
        if self.setbacks and now - self.healthy_since >= self.rules.restarts.steady_s:
            self.setbacks = 0

    def request_failed(self, failure: Failure, reason: str) -> None:
        if not self.usable:
            return
        self.state = State.SUSPECT
        self.streak += 1
        self.bad_replies += failure is Failure.BAD_REPLY
        self.last_reason = reason

    @property
    def deserves_ejection(self) -> bool:
        """By the replica's own failures; the pool decides whether it can spare the replica."""
        return self.usable and (
            self.streak >= self.rules.eject_after or self.bad_replies >= self.rules.eject_after_bad_replies
        )

    def eject(self, now: float) -> None:
        if self.usable:
            self._eject(now, self.last_reason)

    def died(self, now: float, reason: str) -> None:
        """Its process has died: ejected at once, and restarted without a backoff the first time."""
        if self.state not in (State.RETIRED, State.EJECTED, State.RESTARTING, State.STARTING):
            self._eject(now, reason, wait=self.setbacks > 0)

    def restart_due(self, now: float) -> bool:
        return self.state is State.EJECTED and now >= self.retry_at

    def restarting(self) -> None:
        if self.state is State.EJECTED:
            self.state = State.RESTARTING

    def restart_failed(self, now: float, reason: str) -> None:
        if self.state in (State.RESTARTING, State.STARTING, State.EJECTED):
            self._eject(now, reason)

    def retire(self) -> None:
        self.state = State.RETIRED

    def _eject(self, now: float, reason: str, wait: bool = True) -> None:
        self.setbacks += 1
        self.state = State.EJECTED
        self.last_reason = reason
        self.retry_at = now + (self.rules.restarts.wait_before(self.setbacks) if wait else 0.0)
