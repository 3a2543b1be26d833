"""One teacher: replicas that are balanced, watched, retried, restarted, and only believed after proving who they are.

    score(items) ─> pick the lightest usable replica ─> deadline by tokens ─> checked scores
          ▲                                                   │ failed
          └──── back-off with jitter, another replica ────────┘      nobody left: wait and say so, drop nothing

Scores are a pure function of (teacher, tokens), so asking again, elsewhere or twice is always safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from understudy.errors import TeacherError, TeacherReplyError
from understudy.teacher.balance import least_loaded
from understudy.teacher.client import ReplicaClient, ReplicaTimeout, RequestRefused, ScoringClient, ServerFailed
from understudy.teacher.clock import Clock, MonotonicClock
from understudy.teacher.health import Failure, HealthRules, State
from understudy.teacher.integrity import Identity, check_same, identify
from understudy.teacher.launch import Endpoint, Launcher, ReplicaSpec
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool_events import EventKind, PoolEvent, log_event
from understudy.teacher.pool_metrics import PoolMetrics, PoolTotals
from understudy.teacher.replica import Replica
from understudy.types.scores import ScoreItem, TeacherScores

log = logging.getLogger(__name__)

Connect = Callable[[str, str, Endpoint], ScoringClient]
"""(teacher, replica, endpoint) → a client."""


def connect_native(teacher: str, replica: str, endpoint: Endpoint) -> ScoringClient:
    return ReplicaClient(endpoint.url, endpoint.token, teacher=teacher, replica=replica)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    deadline_base: float = 30.0
    """Seconds every request gets."""
    deadline_tokens_per_second: float = 500.0
    """Slower than this, for the request and what waits before it, is too slow."""
    deadline_growth: float = 1.5
    """A request that timed out gets more time elsewhere: perhaps it was the deadline that was wrong."""
    retry_first: float = 0.05
    retry_most: float = 2.0
    """Seconds between attempts once every usable replica has been tried."""
    max_bad_attempts: int = 4
    """Wrong replies or server failures for one request, over all replicas; then the request itself is the problem."""
    probe_deadline: float = 15.0
    start_deadline: float = 600.0
    watch_every: float = 0.25
    """Seconds between looks at processes and back-offs."""
    hedge_after: float | None = None
    """Seconds after which a request still unanswered is also sent elsewhere; None: never."""
    health: HealthRules = field(default_factory=HealthRules)
