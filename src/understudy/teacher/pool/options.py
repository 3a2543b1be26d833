"""Deadlines and limits of a teacher's pool and of its replica supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field

from understudy.teacher.pool.health import HealthRules


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Deadlines and limits of a `ReplicaSupervisor`; times in seconds."""

    probe_deadline: float = 15.0
    """For scoring the fixed tokens, in addition to the time for tokens already outstanding at the replica."""
    first_probe_deadline: float = 60.0
    """The same for a process that has just started and may still be warming up."""
    slowest_tokens_per_second: float = 500.0
    start_deadline: float = 600.0
    external_wait: float = 0.0
    """How long the start of a run waits for an external server that refuses connections or cannot serve yet."""
    starts_again: int = 3
    """How often a replica is started again whose process is killed while the run starts."""
    watch_every: float = 0.25
    """Between checks of processes and backoffs."""
    max_in_flight: int = 32
    """Requests one replica may hold."""
    health: HealthRules = field(default_factory=HealthRules)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Deadlines, retries, hedging, canary and cache of a pool; times in seconds."""

    deadline_base: float = 30.0
    """For every request, in addition to the time for its tokens."""
    deadline_growth: float = 1.5
    """Factor on the deadline after each timeout of a request: the deadline itself may have been too short."""
    deadline_growth_most: float = 10.0
    retry_first: float = 0.05
    retry_most: float = 2.0
    """The longest wait between rounds, once every usable replica has been tried."""
    max_bad_attempts: int = 4
    """Bad replies or server failures of one request over all replicas, after which the request itself
    fails."""
    hedge_factor: float | None = None
    """Also ask another replica when an answer takes longer than this multiple of the 95th percentile; None:
    never."""
    hedge_after: float | None = None
    """The same after a fixed time; overrides `hedge_factor`."""
    canary: bool = True
    """Send the fixed tokens with every request and compare their scores with those at admission."""
    cache_bytes: int = 0
    """Bytes of scores to cache for repeated requests; 0: no cache."""
    outage_most: float | None = None
    """How long calls wait while no replica answers; None: until one answers or all are given up."""
    drain: float = 30.0
    """For the requests in flight of a replica that is removed."""
    supervisor: SupervisorOptions = field(default_factory=SupervisorOptions)

    @property
    def longest_rest(self) -> float:
        """How long a server is left alone at most that asks for it (`Retry-After`): it is asked again before the outage
        is an error."""
        return self.deadline_base if self.outage_most is None else self.outage_most / 2
