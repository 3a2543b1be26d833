"""Events that a pool reports to its listener."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger("understudy.teacher.pool.pool")


class EventKind(StrEnum):
    PAUSED = "paused"
    """No replica can answer: calls wait."""
    RESUMED = "resumed"
    RETRIED = "retried"
    EJECTED = "ejected"
    READMITTED = "readmitted"
    RESTARTED = "restarted"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One event of a pool or of one of its replicas."""

    kind: EventKind
    teacher: str
    replica: str | None
    message: str
    at: float
    """Seconds of the pool's clock."""


_LEVELS = {
    EventKind.PAUSED: logging.WARNING,
    EventKind.EJECTED: logging.WARNING,
    EventKind.RETRIED: logging.INFO,
}


def log_event(event: PoolEvent) -> None:
    """The default listener: one line in the log."""
    who = f"teacher {event.teacher}" + (f", replica {event.replica}" if event.replica else "")
    log.log(_LEVELS.get(event.kind, logging.INFO), "%s: %s: %s", who, event.kind.value, event.message)
