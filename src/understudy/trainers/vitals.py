"""Figures of the moment, for whoever asks why a run does not move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.observability.spans import OpenSpan
from understudy.trainers.system import System
from understudy.trainers.wait_graph import wait_graph


def vitals(system: System) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "weights published": system.publisher.version,
        "rows trained": system.tally.rows_trained,
        "rows failed": system.tally.dead_letters,
    }
    return facts | _teachers(system)


def waits(system: System, spans: Sequence[OpenSpan], now: float) -> list[str]:
    """Who waits for whom, down to the replicas of teachers."""
    return wait_graph(spans, now, _teachers(system))


def _teachers(system: System) -> dict[str, str]:
    found = {}
    for name, pool in system.pools.items():
        metrics = pool.metrics()
        replicas = "; ".join(
            f"replica {replica.name} {replica.state}, {replica.outstanding_requests} requests"
            for replica in metrics.replicas
        )
        paused = "PAUSED, no replica answers; " if metrics.paused else ""
        found[f"teacher {name}"] = f"{paused}{metrics.queue_depth} requests under way; {replicas}"
    return found
