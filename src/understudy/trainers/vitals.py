"""Figures of the moment, for whoever asks why a run does not move."""

from __future__ import annotations

from typing import Any

from understudy.trainers.system import System


def vitals(system: System) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "weights published": system.publisher.version,
        "rows trained": system.tally.rows_trained,
        "rows failed": system.tally.dead_letters,
    }
    for name, pool in system.pools.items():
        metrics = pool.metrics()
        states = ", ".join(f"{replica.name} {replica.state}" for replica in metrics.replicas)
        waiting = f"{metrics.queue_depth} requests under way"
        facts[f"teacher {name}"] = f"{'PAUSED; ' if metrics.paused else ''}{waiting}; replicas: {states}"
    return facts
