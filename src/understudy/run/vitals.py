"""The current state of a run, for the watchdog's report on a run without progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from understudy.observability.report import many
from understudy.observability.spans import OpenSpan
from understudy.teacher.pool.metrics import PoolMetrics
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.system import System
from understudy.trainers.wait_graph import wait_graph


def vitals(system: System) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "weights published": system.learner.publisher.version,
        "rows trained": system.state.tally.rows_trained,
        "rows failed": system.state.tally.dead_letters,
    }
    return facts | _critic(system) | _teachers(system)


def waits(system: System, spans: Sequence[OpenSpan], now: float) -> list[str]:
    """The wait graph, including teachers' replicas and a critic in its own process."""
    chains = wait_graph(spans, now, _teachers(system))
    asked = (
        system.learner.critic.waiting(time.monotonic())
        if isinstance(system.learner.critic, RemoteCritic)
        else None
    )
    return chains if asked is None else [*chains, f"train waits for the critic: {asked}"]


def _critic(system: System) -> dict[str, str]:
    if not isinstance(system.learner.critic, RemoteCritic):
        return {}
    asked = system.learner.critic.waiting(time.monotonic())
    return {"critic": "idle, in its own process" if asked is None else f"asked for {asked}"}


def _teachers(system: System) -> dict[str, str]:
    return {
        f"teacher {name}": teacher_state(pool.metrics())
        for name, pool in system.producer.teachers.pools.items()
    }


def teacher_state(metrics: PoolMetrics) -> str:
    replicas = "; ".join(
        f"replica {replica.name} {replica.state}, {many(replica.outstanding_requests, 'request')}"
        for replica in metrics.replicas
    )
    paused = "PAUSED, no replica answers; " if metrics.paused else ""
    return f"{paused}{many(metrics.queue_depth, 'request')} under way; {replicas}"
