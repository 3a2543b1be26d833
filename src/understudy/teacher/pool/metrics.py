"""Metrics of a pool: a snapshot of its counters and of its replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from understudy.teacher.pool.health import State
from understudy.teacher.pool.replica_record import Replica


@dataclass(slots=True)
class PoolTotals:
    """Counters since the pool started."""

    requests: int = 0
    retries: int = 0
    hedges: int = 0
    cache_hits: int = 0
    pauses: int = 0
    paused_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    name: str
    state: State
    share: float
    """Its share of all tokens this teacher scored."""
    tokens: int
    requests: int
    failures: int
    ejections: int
    restarts: int
    outstanding_tokens: int
    outstanding_requests: int
    latency_mean: float
    """Seconds, over the latest requests; 0 before the first."""
    latency_p95: float


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    teacher: str
    paused: bool
    tokens: int
    requests: int
    retries: int
    hedges: int
    cache_hits: int
    ejections: int
    pauses: int
    paused_seconds: float
    queue_depth: int
    """Requests inside the pool that have no scores yet."""
    latency_mean: float = 0.0
    """Seconds, over the latest requests of all replicas; 0 before the first."""
    latency_p95: float = 0.0
    replicas: list[ReplicaMetrics] = field(default_factory=list)

    def flat(self) -> dict[str, float]:
        """Names for metrics.jsonl: `teacher/<name>/…`."""
        base = f"teacher/{self.teacher}"
        named: dict[str, float] = {
            f"{base}/{name}": float(getattr(self, name))
            for name in (
                "tokens",
                "requests",
                "retries",
                "hedges",
                "cache_hits",
                "ejections",
                "pauses",
                "paused_seconds",
                "queue_depth",
                "latency_mean",
                "latency_p95",
            )
        }
        named[f"{base}/replicas"] = float(len(self.replicas))
        for replica in self.replicas:
            at = f"{base}/{replica.name}"
            named[f"{at}/share"] = replica.share
            named[f"{at}/latency_mean"] = replica.latency_mean
            named[f"{at}/latency_p95"] = replica.latency_p95
            for name in ("failures", "ejections", "restarts", "outstanding_tokens", "outstanding_requests"):
                named[f"{at}/{name}"] = float(getattr(replica, name))
        return named


def snapshot(
    teacher: str, paused: bool, waiting: int, totals: PoolTotals, replicas: Iterable[Replica]
) -> PoolMetrics:
    replicas = list(replicas)
    tokens = sum(replica.tokens for replica in replicas)
    latency_mean, latency_p95 = _latency([second for replica in replicas for second in replica.latencies])
    return PoolMetrics(
        teacher=teacher,
        paused=paused,
        tokens=tokens,
        requests=totals.requests,
        retries=totals.retries,
        hedges=totals.hedges,
        cache_hits=totals.cache_hits,
        ejections=sum(replica.ejections for replica in replicas),
        pauses=totals.pauses,
        paused_seconds=totals.paused_seconds,
        queue_depth=waiting,
        latency_mean=latency_mean,
        latency_p95=latency_p95,
        replicas=[_of(replica, tokens) for replica in replicas],
    )


def _of(replica: Replica, all_tokens: int) -> ReplicaMetrics:
    latency_mean, latency_p95 = _latency(replica.latencies)
    return ReplicaMetrics(
        name=replica.name,
        state=replica.health.state,
        share=replica.tokens / all_tokens if all_tokens else 0.0,
        tokens=replica.tokens,
        requests=replica.requests,
        failures=sum(replica.failures.values()),
        ejections=replica.ejections,
        restarts=replica.restarts,
        outstanding_tokens=replica.load.outstanding_tokens,
        outstanding_requests=replica.load.outstanding_requests,
        latency_mean=latency_mean,
        latency_p95=latency_p95,
    )


def _latency(seconds: Iterable[float]) -> tuple[float, float]:
    """Mean and 95th percentile; zeros before the first request."""
    ordered = sorted(seconds)
    if not ordered:
        return 0.0, 0.0
    return sum(ordered) / len(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]
