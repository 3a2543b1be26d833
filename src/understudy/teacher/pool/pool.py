"""The pool of one teacher: sends score requests to its replicas, with deadlines and retries.

    score(items) ─> pick the least loaded usable replica ─> deadline by tokens ─> checked scores
          ▲                                                   │ failed
          └──── backoff with jitter, another replica ─────────┘      no replica left: report it and wait

Scores are a pure function of (teacher, tokens), so a request may be sent again, to another replica, or twice.
No row is dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from understudy.errors import ClusterError, TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.teacher.clients.http import NoSuchRoute, NotAllowed, ReplicaTimeout, ScoringFailed
from understudy.teacher.clients.native import Connect, connect_native
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.balance import least_loaded
from understudy.teacher.pool.cache import ScoreCache
from understudy.teacher.pool.canary import Canary
from understudy.teacher.pool.clock import Clock, MonotonicClock
from understudy.teacher.pool.events import EventKind, PoolEvent, log_event
from understudy.teacher.pool.health import Failure
from understudy.teacher.pool.launch import Launcher, ReplicaSpec
from understudy.teacher.pool.metrics import PoolMetrics, PoolTotals, snapshot
from understudy.teacher.pool.options import PoolOptions
from understudy.teacher.pool.outage import Outage
from understudy.teacher.pool.replica_record import Replica
from understudy.teacher.pool.supervisor import Deliver, ReplicaSupervisor
from understudy.types.references import ScoreRef, ScoresRef, fetched

HEDGE_AFTER_SEEN = 20
"""Answers needed before the pool can tell that one is late."""


@dataclass(slots=True)
class _Attempts:
    """The failed attempts of one request."""

    tried: set[str] = field(default_factory=set)
    rounds: int = 0
    """Rounds in which every usable replica failed, since the pool last answered any request."""
    answers_seen: int = 0
    """The pool's `_answers` when `rounds` was last reset."""
    timeouts: int = 0
    bad: int = 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of sending a request to one replica: scores, or the error that counts against it; neither if it was not
    sent."""

    replica: Replica
    scores: list[ScoresRef] | None
    error: TeacherError | None = None


class TeacherPool:
    """The replicas of one teacher behind one `score`. Holds the supervisor (`ReplicaSupervisor`), the cache, the canary
    and counters.

    The trainer and `TeacherRouter` call it; everything runs on one event loop.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[ReplicaSpec],
        launcher: Launcher | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        options: PoolOptions | None = None,
        *,
        connect: Connect = connect_native,
        on_event: Callable[[PoolEvent], None] = log_event,
    ) -> None:
        if not replicas:
            raise TeacherError(f"teacher {name} needs at least one replica")
        self.name = name
        self.options = options or PoolOptions()
        self._specs = list(replicas)
        self._clock = clock or MonotonicClock()
        self._rng = rng or random.Random(name)
        self._supervisor = ReplicaSupervisor(
            name,
            launcher,
            connect,
            self._clock,
            self.options.supervisor,
            on_event,
            self.options.longest_rest,
        )
        self._totals = PoolTotals()
        self._cache = ScoreCache(self.options.cache_bytes) if self.options.cache_bytes else None
        self._canary: Canary | None = None
        self._waiting = 0
        self._answers = 0
        self._outage = Outage(self._supervisor, self._clock, self.options.outage_most)

    async def start(self) -> None:
        """Start every replica; raises if one cannot start, is empty, or differs from the first."""
        await self._supervisor.start(self._specs)
        self._renew_canary()

    def _renew_canary(self) -> None:
        if self.options.canary and self._supervisor.identity is not None:
            self._canary = Canary(self._supervisor.identity)

    async def close(self) -> None:
        await self._supervisor.close()

    @property
    def manifest(self) -> Manifest:
        if self._supervisor.identity is None:
            raise TeacherError(f"teacher {self.name} has not been started")
        return self._supervisor.identity.manifest

    @property
    def fixed_scores(self) -> list[float]:
        """Its scores of the fixed tokens at admission: the only identity of a server that hides its
        weights."""
        return [] if self._supervisor.identity is None else self._supervisor.identity.probe_logprobs.tolist()

    @property
    def replicas(self) -> list[str]:
        return list(self._supervisor.replicas)

    @property
    def width(self) -> int:
        """The number of replicas that can answer now."""
        return len(self._supervisor.usable())

    async def change_version(self, version: int, deliver: Deliver) -> None:
        """Gives the teacher other weights, while no request is under way. Manifest and fixed scores are those
        of `version` afterwards, and only replies of `version` are accepted."""
        await self._supervisor.change_version(version, deliver)
        self._renew_canary()

    async def add(self, spec: ReplicaSpec) -> None:
        """Add a replica while running."""
        await self._supervisor.add(spec)

    async def remove(self, replica: str) -> None:
        """Remove a replica while running; its requests in flight are finished or retried on another
        replica."""
        await self._supervisor.remove(replica, self.options.drain)

    def metrics(self) -> PoolMetrics:
        lasts = self._outage.lasts
        return snapshot(self.name, lasts, self._waiting, self._totals, self._supervisor.replicas.values())

    async def score(self, items: Sequence[ScoreRef]) -> list[ScoresRef]:
        """Scores the items in one request. Returns checked scores; raises if the request itself cannot be
        served.

        Replicas that fail, send bad replies or die cost time, not rows: while none can answer, the call
        waits.
        """
        if not items:
            return []
        if self._cache is None:
            return await self._ask(items)
        return await self._ask_cached(self._cache, items)

    async def _ask_cached(self, cache: ScoreCache, items: Sequence[ScoreRef]) -> list[ScoresRef]:
        items = await fetched(items)  # the key of a request is a digest of its arrays
        parts = cache.parts(self.manifest, items)
        scores: list[ScoresRef | None] = [None] * len(items)
        missing: list[tuple[bytes, list[int]]] = []
        for key, members in parts:
            found = cache.get(key, [items[i] for i in members])
            if found is None:
                missing.append((key, members))
            for i, one in zip(members, found or [], strict=False):
                scores[i] = one
        self._totals.cache_hits = cache.hits
        wanted = [i for _, members in missing for i in members]
        answers = dict(
            zip(wanted, await self._ask([items[i] for i in wanted]) if wanted else [], strict=True)
        )
        for key, members in missing:
            cache.put(key, [await answers[i].fetch() for i in members])
        return [answers[i] if one is None else one for i, one in enumerate(scores)]

    async def _ask(self, items: Sequence[ScoreRef]) -> list[ScoresRef]:
        tokens = sum(item.length for item in items)
        attempts = _Attempts()
        self._totals.requests += 1
        self._waiting += 1
        try:
            while True:
                replica = self._pick(attempts)
                if replica is None:
                    await self._wait(attempts)
                    continue
                outage = self._totals.pauses
                outcomes = await self._attempt(replica, items, tokens, attempts)
                scores = next((one.scores for one in outcomes if one.scores is not None), None)
                for one in outcomes:
                    if one.error is not None:
                        self._failed(one.replica, tokens, attempts, one.error, final=scores is None)
                if scores is None:
                    continue
                self._answers += 1
                # An answer to a request from before the outage does not end the outage.
                if outage == self._totals.pauses:
                    self._resume()
                return scores
        finally:
            self._waiting -= 1

    def _pick(self, attempts: _Attempts) -> Replica | None:
        loads = [(r, r.load) for r in self._supervisor.usable() if r.name not in attempts.tried]
        return least_loaded(loads, self._clock.now())

    async def _attempt(
        self, replica: Replica, items: Sequence[ScoreRef], tokens: int, attempts: _Attempts
    ) -> list[_Outcome]:
        """Send to one replica, and to a second if the first is late.

        The first scores win; the other request is cancelled.
        """
        delay = self._hedge_delay()
        replica.load.begin(tokens)  # before the first await: the next call must see this load
        if delay is None:
            return [await self._send(replica, items, tokens, attempts)]
        running = {asyncio.create_task(self._send(replica, items, tokens, attempts))}
        try:
            if not await self._done_within(running, delay):
                second = self._pick(replace(attempts, tried=attempts.tried | {replica.name}))
                if second is not None:
                    self._totals.hedges += 1
                    second.load.begin(tokens)
                    running.add(asyncio.create_task(self._send(second, items, tokens, attempts)))
            outcomes: list[_Outcome] = []
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                outcomes += [task.result() for task in done]
                if any(outcome.scores is not None for outcome in outcomes):
                    break
            return outcomes
        finally:
            for task in running:
                task.cancel()

    async def _done_within(self, tasks: set[asyncio.Task[_Outcome]], seconds: float) -> bool:
        timer = asyncio.create_task(self._clock.sleep(seconds))
        try:
            await asyncio.wait([*tasks, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return any(task.done() for task in tasks)

    def _hedge_delay(self) -> float | None:
        """Seconds until hedging; None if hedging is off or too few answers have been seen to tell what is
        slow."""
        if self.options.hedge_after is not None:
            return self.options.hedge_after
        if self.options.hedge_factor is None:
            return None
        latencies = sorted(second for r in self._supervisor.replicas.values() for second in r.latencies)
        if len(latencies) < HEDGE_AFTER_SEEN:
            return None
        return self.options.hedge_factor * latencies[int(0.95 * len(latencies))]

    async def _send(
        self, replica: Replica, items: Sequence[ScoreRef], tokens: int, attempts: _Attempts
    ) -> _Outcome:
        """Ask one replica. Its load already counts this request, and is released here in every case."""
        try:
            async with replica.slots:
                if not replica.health.usable:  # ejected while the request waited for its turn
                    return _Outcome(replica, None)
                if replica.rests(self._clock.now()):  # its server asked for that meanwhile
                    return _Outcome(replica, None)
                started = self._clock.now()
                scores = await self._checked(replica, items, self._deadline(replica, attempts))
        except (TeacherReplyError, ScoringFailed, TeacherUnavailable) as error:
            return _Outcome(replica, None, error)
        finally:
            replica.load.end(tokens)
        replica.succeeded(tokens, self._clock.now() - started, self._clock.now())
        return _Outcome(replica, [one.by(replica.name) for one in scores])

    async def _checked(self, replica: Replica, items: Sequence[ScoreRef], deadline: float) -> list[ScoresRef]:
        """Ask with the fixed tokens added, so that every reply shows that this is still the same teacher."""
        assert replica.client is not None
        version = self._supervisor.version
        asked = items if self._canary is None else self._canary.with_items(items)
        try:
            scores = list(await replica.client.score(asked, deadline))
        except (NoSuchRoute, NotAllowed) as error:  # it was admitted with this path and token
            raise TeacherUnavailable(str(error)) from error
        for one in scores:
            if one.version != version:
                raise TeacherReplyError(
                    f"teacher {self.name}, replica {replica.name}, row {one.key!r}: scored by weights of version "
                    f"{one.version}, not {version}"
                )
        if self._canary is None:
            return scores
        return await self._canary.checked(scores, self.name, replica.name)

    def _deadline(self, replica: Replica, attempts: _Attempts) -> float:
        """Seconds for this request: a base, plus time for its tokens and those outstanding at the replica."""
        growth = min(self.options.deadline_growth**attempts.timeouts, self.options.deadline_growth_most)
        work = replica.load.outstanding_tokens / self.options.supervisor.slowest_tokens_per_second
        return growth * (self.options.deadline_base + work)

    def _failed(
        self, replica: Replica, tokens: int, attempts: _Attempts, error: TeacherError, *, final: bool
    ) -> None:
        """`final`: raises the error if it is one too many for this request; not if another replica has answered."""
        failure = _kind_of(error)
        attempts.tried.add(replica.name)
        attempts.timeouts += failure is Failure.TIMEOUT
        attempts.bad += failure in (Failure.BAD_REPLY, Failure.SERVER)
        self._supervisor.request_failed(replica, failure, tokens, error)
        if final and attempts.bad >= self.options.max_bad_attempts:
            raise error
        self._totals.retries += 1
        self._supervisor.tell(EventKind.RETRIED, replica.name, str(error))

    async def _wait(self, attempts: _Attempts) -> None:
        """Called when every usable replica has been tried or there is none: wait for the backoff, or for a
        replica.

        Raises `ClusterError` if every replica was given up or the outage lasts too long: then no row is at
        fault.
        """
        if self._supervisor.given_up_reason is not None:
            raise ClusterError(
                f"{self._supervisor.given_up_reason}\nno replica of teacher {self.name} is left; no row is lost"
            )
        if attempts.answers_seen != self._answers:
            attempts.answers_seen, attempts.rounds = self._answers, 0
        if not self._supervisor.usable() or attempts.rounds >= 2:
            self._pause()
        pause = min(self.options.retry_most, self.options.retry_first * 2**attempts.rounds)
        attempts.rounds = min(attempts.rounds + 1, 16)
        self._outage.check()
        await self._supervisor.wait_for_change(pause * self._rng.uniform(0.5, 1.5))
        attempts.tried.clear()

    def _pause(self) -> None:
        self._totals.pauses += self._outage.begin()

    def _resume(self) -> None:
        self._totals.paused_seconds += self._outage.end()


def _kind_of(error: TeacherError) -> Failure:
    if isinstance(error, TeacherReplyError):
        return Failure.BAD_REPLY
    if isinstance(error, ScoringFailed):
        return Failure.SERVER
    return Failure.TIMEOUT if isinstance(error, ReplicaTimeout) else Failure.CONNECTION
