"""The teacher pool with scripted replicas and a manual clock: retries, ejections, pauses, restarts."""

import asyncio
import heapq
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from teacher_rig import random_items

from understudy.errors import ChildDied, ClusterError, TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import Restarts
from understudy.teacher.clients.http import (
    NoSuchRoute,
    NotAllowed,
    NotServing,
    ReplicaTimeout,
    RequestRefused,
    ScoringFailed,
)
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.pool.events import EventKind, PoolEvent
from understudy.teacher.pool.health import HealthRules, State
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions, SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.pool.processes import ReplicaProcesses
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.probe import CANARY_KEY
from understudy.types.scores import ScoreItem, Signal, TeacherScores

MANIFEST = Manifest(
    "math", "native", "m", "aa", "ff", 61, 32, "float32", list(Signal), Limits(max_length=100, max_k=20)
)
SLOW = Restarts(None, first_wait_s=1.0, longest_wait_s=8.0)
SUPERVISOR = SupervisorOptions(
    probe_deadline=5.0,
    slowest_tokens_per_second=100.0,
    watch_every=0.25,
    health=HealthRules(eject_after=3, eject_after_bad_replies=2, restarts=SLOW),
)
OPTIONS = PoolOptions(
    deadline_base=10.0, retry_first=0.1, retry_most=1.0, max_bad_attempts=4, drain=5.0, supervisor=SUPERVISOR
)


class ManualClock:
    """A clock whose time passes only in `advance`; sleepers wake in order of their time."""

    def __init__(self) -> None:
        self.time = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        until = self.time + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            self.time, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await settle()
        self.time = until
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


Behaviour = Callable[["Scripted", Sequence[ScoreItem]], Awaitable[list[TeacherScores]]]


class Scripted:
    """A replica with scripted behaviour. It answers probes correctly unless `probe_error` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: Behaviour = answer_correctly
        self.probe_error: Exception | None = None
        self.manifest_now = MANIFEST
        self.asked: list[list[str]] = []
        self.timeouts: list[float | None] = []
        self.closed = False

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        if items[0].key == "probe":
            if self.probe_error is not None:
                raise self.probe_error
            return answer("math", items)
        self.asked.append([item.key for item in items if item.key != CANARY_KEY])
        self.timeouts.append(timeout)
        return await self.behaviour(self, items)

    async def manifest(self) -> Manifest:
        if isinstance(self.probe_error, TeacherUnavailable):
            raise self.probe_error
        return self.manifest_now

    async def health(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True


def answer(teacher: str, items: Sequence[ScoreItem]) -> list[TeacherScores]:
    return [
        TeacherScores(i.key, teacher, i.signal, -np.arange(1, len(i.positions) + 1, dtype=np.float32))
        for i in items
    ]


async def answer_correctly(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
    return answer(replica.name, items)


def failing(error: Exception) -> Behaviour:
    async def behave(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
        raise error

    return behave


REFUSED_CONNECTION = TeacherUnavailable("connection refused")
TIMEOUT = ReplicaTimeout("no answer")
BAD_REPLY = TeacherReplyError("teacher math, replica a, row 'row-0-0', position 3: NaN")


class Rig:
    """A pool of scripted replicas. It is also the pool's launcher, which starts fresh ones."""

    def __init__(self, names: str = "ab", external: bool = False, options: PoolOptions = OPTIONS) -> None:
        self.clock = ManualClock()
        self.events: list[PoolEvent] = []
        self.replicas: dict[str, Scripted] = {}
        self.living: set[str] = set()
        self.starts: list[tuple[float, str]] = []
        self.stops: list[str] = []
        self.start_error: Exception | None = None
        self.fresh: Callable[[str], Scripted] = Scripted
        address = Endpoint("http://elsewhere") if external else None
        self.pool = TeacherPool(
            "math",
            [ReplicaSpec(name, address) for name in names],
            None if external else self,
            self.clock,
            random.Random(0),
            options,
            connect=self.connect,
            on_event=self.events.append,
        )

    def connect(self, teacher: str, replica: str, endpoint: Endpoint) -> Scripted:
        self.replicas[replica] = self.fresh(replica)
        return self.replicas[replica]

    async def start(self, replica: str) -> Endpoint:
        self.starts.append((self.clock.now(), replica))
        if self.start_error is not None:
            raise self.start_error
        self.living.add(replica)
        return Endpoint(f"http://{replica}")

    async def stop(self, replica: str) -> None:
        self.stops.append(replica)
        self.living.discard(replica)

    def end_of_log(self, replica: str) -> str:
        return ""

    def alive(self, replica: str) -> bool:
        return replica in self.living

    def kill(self, replica: str) -> None:
        self.living.discard(replica)
        self.replicas[replica].behaviour = failing(REFUSED_CONNECTION)
        self.replicas[replica].probe_error = REFUSED_CONNECTION

    def state(self, replica: str) -> State:
        return next(r.state for r in self.pool.metrics().replicas if r.name == replica)

    def events_of(self, kind: EventKind) -> list[PoolEvent]:
        return [event for event in self.events if event.kind is kind]

    async def score(self, items: list[ScoreItem] | None = None) -> list[TeacherScores]:
        """Scores the items and advances the clock until the pool answers."""
        task = asyncio.create_task(self.pool.score(items or random_items(1)))
        for _ in range(400):
            await settle()
            if task.done():
                return task.result()
            await self.clock.advance(0.1)
        task.cancel()
        raise AssertionError("no scores after 40 s")


def run_with_pool(test: Callable[[Rig], Awaitable[None]], rig: Rig) -> None:
    async def run() -> None:
        await rig.pool.start()
        try:
            await test(rig)
        finally:
            await rig.pool.close()

    asyncio.run(run())


def test_a_request_is_retried_on_another_replica_when_its_replica_fails() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        scores = await rig.pool.score(random_items(2))
        assert [s.teacher for s in scores] == ["b", "b"]
        assert rig.replicas["a"].asked == rig.replicas["b"].asked == [["row-0-0", "row-0-1"]]
        assert rig.pool.metrics().retries == 1 and rig.events_of(EventKind.RETRIED)[0].replica == "a"

    run_with_pool(test, Rig())


def test_a_refused_request_is_not_retried_and_does_not_count_against_the_replica() -> None:
    async def test(rig: Rig) -> None:
        for replica in rig.replicas.values():
            replica.behaviour = failing(RequestRefused("K too large"))
        with pytest.raises(RequestRefused, match="K too large"):
            await rig.pool.score(random_items(1))
        assert sum(len(r.asked) for r in rig.replicas.values()) == 1
        assert {rig.state("a"), rig.state("b")} == {State.HEALTHY}

    run_with_pool(test, Rig())


@pytest.mark.parametrize("error", [BAD_REPLY, ScoringFailed("503 out of memory")])
def test_a_request_with_only_bad_replies_fails_after_max_bad_attempts(error: TeacherError) -> None:
    async def test(rig: Rig) -> None:
        for replica in rig.replicas.values():
            replica.behaviour = failing(error)
        with pytest.raises(type(error), match=str(error)[:10]):
            await rig.score()
        assert sum(len(r.asked) for r in rig.replicas.values()) == OPTIONS.max_bad_attempts

    run_with_pool(test, Rig())


def test_scores_shifted_across_rows_are_detected_by_the_canary_row() -> None:
    """Every number of such a reply is valid; only the canary row with its known scores shows the shift."""

    async def slipped(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
        right = answer(replica.name, items)
        flat = np.roll(np.concatenate([score.sampled_logprobs for score in right]), -1)
        ends = np.cumsum([len(score.sampled_logprobs) for score in right])[:-1]
        return [
            replace(score, sampled_logprobs=part)
            for score, part in zip(right, np.split(flat, ends), strict=True)
        ]

    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = slipped
        scores = await rig.pool.score(random_items(2))
        assert [s.teacher for s in scores] == ["b", "b"] and len(scores) == 2
        message = rig.events_of(EventKind.RETRIED)[0].message
        assert (
            "replica a, row 'row-0-0'" in message
            and "position 1: 1 nats apart" in message
            and "shifted" in message
        )

    run_with_pool(test, Rig())


@pytest.mark.parametrize(
    ("signal", "k"), [(Signal.TOPK, 4), (Signal.AT_IDS, 3), (Signal.SAMPLED, 0), (Signal.HIDDEN, 0)]
)
def test_the_canary_row_is_requested_with_the_signal_and_k_of_the_last_row(signal: Signal, k: int) -> None:
    seen: list[ScoreItem] = []

    async def watch(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
        seen.extend(items)
        return answer(replica.name, items)

    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = watch
        assert len(await rig.pool.score(random_items(2, 1, signal, k))) == 2
        assert [item.key for item in seen] == ["row-1-0", "row-1-1", CANARY_KEY]
        assert (seen[2].signal, seen[2].k) == (seen[1].signal, seen[1].k)
        assert seen[2].ids is None or seen[2].ids.shape == (len(seen[2].positions), k)
        request_of(seen)  # raises if the request is invalid

    run_with_pool(test, Rig())


def test_failing_external_replicas_are_ejected_but_the_last_usable_one_is_kept() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = rig.replicas["b"].behaviour = failing(TIMEOUT)
        task = asyncio.create_task(rig.pool.score(random_items(1)))
        await settle()
        for _ in range(200):
            await rig.clock.advance(0.1)
            assert any(r.state in (State.HEALTHY, State.SUSPECT) for r in rig.pool.metrics().replicas)
        assert rig.events_of(EventKind.EJECTED)
        rig.replicas["b"].behaviour = rig.replicas["a"].behaviour = answer_correctly
        await rig.clock.advance(10.0)
        assert (await task)[0].key == "row-0-0"

    run_with_pool(test, Rig(external=True))


def test_a_replica_that_passes_probes_but_fails_three_requests_is_ejected() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        while not rig.events_of(EventKind.EJECTED) and rig.clock.now() < 200:
            await rig.score()
            await rig.clock.advance(15.0)
        assert rig.events_of(EventKind.EJECTED)[0].replica == "a" and len(rig.replicas["a"].asked) == 3

    run_with_pool(test, Rig())


def test_a_suspect_replica_that_fails_its_probe_is_ejected_after_one_request() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        rig.replicas["a"].probe_error = TIMEOUT
        await rig.pool.score(random_items(1))
        await settle()
        assert rig.state("a") is State.EJECTED and len(rig.replicas["a"].asked) == 1

    run_with_pool(test, Rig())


def test_a_request_queued_for_a_replica_that_is_ejected_goes_to_another_replica() -> None:
    async def test(rig: Rig) -> None:
        a, b, gate = rig.replicas["a"], rig.replicas["b"], asyncio.Event()

        async def held(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await gate.wait()
            if replica is a:
                raise TIMEOUT
            return answer(replica.name, items)

        a.behaviour = b.behaviour = held
        calls = [asyncio.create_task(rig.pool.score(random_items(1, seed))) for seed in range(4)]
        await settle()
        assert len(a.asked) == len(b.asked) == 1, "each replica may have only one request at a time"
        rig.start_error = ChildDied("it does not start")
        rig.kill("a")
        a.behaviour = held
        await rig.clock.advance(0.3)
        assert rig.state("a") is State.EJECTED
        gate.set()
        await rig.clock.advance(5.0)
        assert all(call.done() and len(call.result()) == 1 for call in calls)
        assert len(a.asked) == 1, "a queued request was sent to the ejected replica"

    one = replace(SUPERVISOR, max_in_flight=1)
    run_with_pool(test, Rig(options=replace(OPTIONS, supervisor=one)))


def test_a_replica_with_some_bad_replies_is_ejected_although_others_are_good() -> None:
    async def test(rig: Rig) -> None:
        turns = itertools.count()

        async def sometimes(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            if next(turns) % 3 == 0:
                raise BAD_REPLY
            return answer(replica.name, items)

        rig.replicas["a"].behaviour = sometimes
        while not rig.events_of(EventKind.EJECTED) and rig.clock.now() < 200:
            await rig.score()
            await rig.clock.advance(15.0)
        assert rig.events_of(EventKind.EJECTED)[0].replica == "a" and len(rig.replicas["a"].asked) == 4
        assert "NaN" in rig.events_of(EventKind.EJECTED)[0].message

    run_with_pool(test, Rig())


def test_a_dead_replica_is_restarted_and_becomes_healthy() -> None:
    async def test(rig: Rig) -> None:
        rig.kill("a")
        await rig.clock.advance(1.0)
        assert rig.state("a") is State.HEALTHY
        assert [name for _, name in rig.starts] == ["a", "b", "a"]
        assert [e.kind for e in rig.events] == [EventKind.EJECTED, EventKind.RESTARTED]
        assert rig.pool.metrics().replicas[0].restarts == 1

    run_with_pool(test, Rig())


class KilledAtStart(Rig):
    """The first `times` starts of replica b fail: it dies before it is ready or, with `answers`, just after."""

    def __init__(self, times: int, answers: bool, killed: bool = True) -> None:
        super().__init__()
        self.times, self.answers, self.killed = times, answers, killed

    async def start(self, replica: str) -> Endpoint:
        endpoint = await super().start(replica)
        lost = replica == "b" and [name for _, name in self.starts].count("b") <= self.times
        if lost:
            self.living.discard("b")
        if lost and not self.answers:
            died = ChildDied("(process teacher-math-b ended with code -9)")
            died.killed = self.killed
            raise died
        return endpoint

    def connect(self, teacher: str, replica: str, endpoint: Endpoint) -> Scripted:
        client = super().connect(teacher, replica, endpoint)
        client.probe_error = None if replica in self.living else REFUSED_CONNECTION
        return client


@pytest.mark.parametrize("answers", [False, True])
def test_a_replica_killed_during_the_start_of_the_run_is_started_again(answers: bool) -> None:
    async def test(rig: Rig) -> None:
        assert [name for _, name in rig.starts] == ["a", "b", "b", "b"]
        assert rig.state("b") is State.HEALTHY

    run_with_pool(test, KilledAtStart(2, answers))


@pytest.mark.parametrize(("times", "killed", "starts"), [(9, True, 4), (9, False, 1)])
def test_the_pools_start_fails_when_a_replica_exits_by_itself_or_is_killed_too_often(
    times: int, killed: bool, starts: int
) -> None:
    rig = KilledAtStart(times, False, killed)

    async def test(rig: Rig) -> None:
        raise AssertionError("the pool started")

    with pytest.raises(ChildDied, match="ended with code -9"):
        run_with_pool(test, rig)
    assert [name for _, name in rig.starts].count("b") == starts


def test_failed_restarts_of_a_replica_are_repeated_with_backoff() -> None:
    async def test(rig: Rig) -> None:
        rig.start_error = RuntimeError("no GPU")
        rig.kill("a")
        await rig.clock.advance(40.0)
        times = [when for when, name in rig.starts[2:]]
        gaps = np.diff(times)
        assert len(times) >= 5 and (gaps[1:] >= gaps[:-1] - 0.3).all() and gaps.max() <= 8.5
        assert rig.state("a") is State.EJECTED and "no GPU" in rig.events_of(EventKind.EJECTED)[-1].message
        rig.start_error = None
        await rig.clock.advance(9.0)
        assert rig.state("a") is State.HEALTHY

    run_with_pool(test, Rig())


LIMITED = replace(
    OPTIONS, supervisor=replace(SUPERVISOR, health=replace(SUPERVISOR.health, restarts=replace(SLOW, most=3)))
)


def test_a_replica_is_given_up_after_its_restarts_and_the_final_error_begins_with_its_log() -> None:
    """The other replica serves meanwhile. Once none is left, requests fail with a `ClusterError`."""

    class RigWithLog(Rig):
        def end_of_log(self, replica: str) -> str:
            return f"Traceback …\nRuntimeError: {replica} is out of memory"

    async def test(rig: Rig) -> None:
        rig.start_error = RuntimeError("no GPU")
        rig.kill("a")
        await rig.clock.advance(60.0)
        assert [name for _, name in rig.starts].count("a") == 1 + 3, "there must be exactly three restarts"
        assert rig.state("a") is State.RETIRED
        assert "given up after 3 restarts" in rig.events_of(EventKind.EJECTED)[-1].message
        assert (await rig.score())[0].teacher == "b"
        rig.kill("b")
        with pytest.raises(ClusterError) as caught:
            await rig.score()
        message = str(caught.value)
        assert message.startswith("Traceback …\nRuntimeError: b is out of memory\nno GPU")
        assert "cluster.restarts.teacher" in message and "no replica of teacher math is left" in message

    run_with_pool(test, RigWithLog(options=LIMITED))


def test_the_restart_count_is_reset_after_a_minute_of_health() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(8):
            rig.kill("a")
            await rig.clock.advance(10.0)
            assert rig.state("a") is State.HEALTHY
            await rig.clock.advance(61.0)
            await rig.score()
        assert rig.pool.metrics().replicas[0].restarts == 8
        for _ in range(3):
            rig.kill("a")
            await rig.clock.advance(10.0)
            assert rig.state("a") is State.HEALTHY
            await rig.score()
        rig.kill("a")
        await rig.clock.advance(60.0)
        assert rig.state("a") is State.RETIRED

    run_with_pool(test, Rig("a", options=LIMITED))


def test_a_replica_that_restarts_with_other_weights_is_not_used() -> None:
    async def test(rig: Rig) -> None:
        def other_manifest(name: str) -> Scripted:
            replica = Scripted(name)
            replica.manifest_now = msgspec.structs.replace(MANIFEST, weights_sha256="bb")
            return replica

        rig.fresh = other_manifest
        rig.kill("a")
        await rig.clock.advance(5.0)
        assert rig.state("a") is not State.HEALTHY
        assert "weights is bb" in rig.events_of(EventKind.EJECTED)[-1].message
        await rig.score()
        assert not rig.replicas["a"].asked

    run_with_pool(test, Rig())


def test_calls_pause_while_no_replica_is_usable_and_complete_after_a_restart() -> None:
    async def test(rig: Rig) -> None:
        rig.start_error = RuntimeError("no machine")
        for name in "ab":
            rig.kill(name)
        calls = [asyncio.create_task(rig.pool.score(random_items(1, seed))) for seed in range(5)]
        await rig.clock.advance(20.0)
        assert not any(call.done() for call in calls)
        paused = rig.events_of(EventKind.PAUSED)
        assert (
            len(paused) == 1 and "nothing is dropped" in paused[0].message and "refused" in paused[0].message
        )
        assert rig.pool.metrics().paused and rig.pool.metrics().queue_depth == 5
        rig.start_error = None
        await rig.clock.advance(10.0)
        assert [(await call)[0].key for call in calls] == [f"row-{seed}-0" for seed in range(5)]
        assert len(rig.events_of(EventKind.RESUMED)) == 1 and not rig.pool.metrics().paused
        assert 15.0 < rig.pool.metrics().paused_seconds < 30.0

    run_with_pool(test, Rig())


def test_a_call_fails_after_outage_seconds_when_no_external_server_answers() -> None:
    async def test(rig: Rig) -> None:
        for name in "ab":
            rig.kill(name)
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(50.0)
        paused = [event.message for event in rig.events_of(EventKind.PAUSED)]
        assert len(paused) == 3 and paused[1].startswith("still no answer after 1")
        ends = "the run ends after 60 s of it (teachers.math.outage_seconds)"
        assert all("a at http://elsewhere" in message and ends in message for message in paused), paused
        assert not call.done()
        await rig.clock.advance(20.0)
        with pytest.raises(
            ClusterError, match=r"no replica of teacher math has answered for 6\d s"
        ) as caught:
            await call
        assert "teachers.math.outage_seconds = 60" in str(caught.value) and "teachers.math.urls" in str(
            caught.value
        )

    run_with_pool(test, Rig(external=True, options=replace(OPTIONS, outage_most=60.0)))


@pytest.mark.parametrize(
    "error",
    [NotServing("(503) busy"), NotAllowed("(401) no token"), NoSuchRoute("(404) model is not loaded")],
)
def test_401_404_and_503_of_external_servers_are_retried_until_outage_seconds(error: TeacherError) -> None:
    async def test(rig: Rig) -> None:
        for replica in rig.replicas.values():
            replica.behaviour = failing(error)
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(20.0)
        assert sum(len(r.asked) for r in rig.replicas.values()) > OPTIONS.max_bad_attempts and not call.done()
        for replica in rig.replicas.values():
            replica.behaviour = answer_correctly
        await rig.clock.advance(20.0)
        assert (await call)[0].key == "row-0-0"
        for replica in rig.replicas.values():
            replica.behaviour = failing(error)
        lost = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(90.0)
        with pytest.raises(ClusterError, match=re.escape(str(error))):
            await lost

    run_with_pool(test, Rig(external=True, options=replace(OPTIONS, outage_most=60.0)))


def busy(seconds: float) -> NotServing:
    error = NotServing("(429) slowly")
    error.retry_after = seconds
    return error


def test_retry_after_keeps_requests_and_probes_from_a_server_until_it_has_passed() -> None:
    """Other replicas serve meanwhile, and the server is not ejected."""

    async def test(rig: Rig) -> None:
        first = rig.replicas["a"]
        first.behaviour, first.probe_error = failing(busy(20.0)), AssertionError("probed")
        for _ in range(6):
            await rig.score()
        assert len(first.asked) == 1 and len(rig.replicas["b"].asked) == 6 and rig.pool.width == 1
        first.behaviour, first.probe_error = answer_correctly, None
        await rig.clock.advance(19.0 - rig.clock.now())
        await rig.score()
        assert len(first.asked) == 1 and rig.state("a") is State.HEALTHY
        await rig.clock.advance(2.0)
        calls = [asyncio.create_task(rig.pool.score(random_items(1))) for _ in range(4)]
        await asyncio.gather(*calls)
        assert len(first.asked) > 1 and rig.pool.width == 2 and not rig.events_of(EventKind.EJECTED)

    run_with_pool(test, Rig(external=True, options=replace(OPTIONS, outage_most=60.0)))


@pytest.mark.parametrize(
    ("asked", "most", "waited"), [(20.0, 60.0, 20.0), (1e9, 60.0, 30.0), (1e9, None, 10.0)]
)
def test_the_pause_of_a_lone_server_is_its_retry_after_capped_by_outage_seconds(
    asked: float, most: float | None, waited: float
) -> None:
    async def test(rig: Rig) -> None:
        (replica,) = rig.replicas.values()
        replica.behaviour = failing(busy(asked))
        calls = [asyncio.create_task(rig.pool.score(random_items(1))) for _ in range(3)]
        await rig.clock.advance(0.0)
        first = len(replica.asked)
        await rig.clock.advance(waited - 0.5)
        paused = rig.events_of(EventKind.PAUSED)[0]
        assert len(replica.asked) == first >= 1
        assert "a at http://elsewhere resting ((429) slowly)" in paused.message
        replica.behaviour = answer_correctly
        await rig.clock.advance(3.0)
        assert all(call.done() for call in calls) and len(rig.events_of(EventKind.RESUMED)) == 1

    run_with_pool(test, Rig("a", external=True, options=replace(OPTIONS, outage_most=most)))


def test_retry_after_of_a_failed_probe_delays_the_next_probe() -> None:
    async def test(rig: Rig) -> None:
        first = rig.replicas["a"]
        first.behaviour, first.probe_error = failing(REFUSED_CONNECTION), busy(25.0)
        await rig.score()
        await rig.clock.advance(1.0)
        assert rig.state("a") is State.EJECTED
        first.behaviour, first.probe_error = answer_correctly, None
        await rig.clock.advance(22.0)
        assert rig.state("a") is State.EJECTED and rig.pool.width == 1
        await rig.clock.advance(5.0)
        assert rig.state("a") is State.HEALTHY and rig.pool.width == 2

    run_with_pool(test, Rig(external=True, options=replace(OPTIONS, outage_most=60.0)))


WAITING = replace(OPTIONS, supervisor=replace(SUPERVISOR, external_wait=60.0))


class UnreadyServers(Rig):
    """External replicas that raise the given errors, one at each attempt to identify them."""

    def __init__(self, *errors: TeacherError, names: str = "a") -> None:
        super().__init__(names, external=True, options=WAITING)
        self.errors, self.attempts = list(errors), list[float]()

    def connect(self, teacher: str, replica: str, endpoint: Endpoint) -> Scripted:
        scripted = super().connect(teacher, replica, endpoint)
        self.attempts.append(self.clock.now())
        scripted.probe_error = self.errors.pop(0) if self.errors else None
        return scripted

    async def started(self, seconds: float) -> None:
        task = asyncio.create_task(self.pool.start())
        await self.clock.advance(seconds)
        assert task.done(), "the start is still waiting"
        try:
            await task
            self.width = self.pool.width
        finally:
            await self.pool.close()


def test_the_start_waits_for_an_external_server_that_is_not_ready() -> None:
    rig = UnreadyServers(REFUSED_CONNECTION, NotServing("(503) loading"), busy(7.0))
    asyncio.run(rig.started(20.0))
    assert rig.attempts == [0.0, 0.25, 0.75, 7.75]
    (event,) = rig.events_of(EventKind.PAUSED)
    assert event.message == (
        "connection refused; start its server at http://elsewhere, or name another one in teachers.math.urls. Waiting up to 60 s "
        "(cluster.start_timeout_seconds); Ctrl-C ends the wait"
    )
    assert [event.message for event in rig.events_of(EventKind.RESUMED)] == ["answers after 8 s"]
    assert rig.width == 1, "after the start the replica's Retry-After must no longer apply"


def test_a_start_that_times_out_reports_the_wait_and_the_last_answer_of_the_server() -> None:
    rig = UnreadyServers(REFUSED_CONNECTION, *[busy(1e9)] * 9)
    with pytest.raises(TeacherUnavailable) as error:
        asyncio.run(rig.started(61.0))
    assert rig.attempts == [0.0, 0.25, 60.0]
    assert str(error.value) == (
        "(429) slowly; start its server at http://elsewhere, or name another one in teachers.math.urls. Waited 60 s for it "
        "(cluster.start_timeout_seconds = 60); raise that if it takes longer"
    )


@pytest.mark.parametrize(
    "error",
    [NotAllowed("(401) no token"), NoSuchRoute("(404) no model"), TeacherError("serves no model 'x'"), BAD_REPLY],
)  # fmt: skip
def test_a_permanent_error_of_an_external_server_ends_the_start_at_once(error: TeacherError) -> None:
    rig = UnreadyServers(NotServing("(503) loading"), error)
    with pytest.raises(type(error), match=re.escape(str(error))):
        asyncio.run(rig.started(1.0))
    assert rig.attempts == [0.0, 0.25]


def test_a_cancelled_start_stops_waiting_for_external_servers() -> None:
    async def start() -> None:
        rig = UnreadyServers(*[REFUSED_CONNECTION] * 99)
        task = asyncio.create_task(rig.pool.start())
        await rig.clock.advance(3.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(start())


def test_a_late_reply_of_a_dead_replica_does_not_end_the_pause() -> None:
    """The next request would find no replica, and the user would be told of a second outage."""

    async def test(rig: Rig) -> None:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def slow(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await arrived
            return answer(replica.name, items)

        rig.start_error = RuntimeError("no machine")
        for name in "ab":
            rig.replicas[name].behaviour = slow
        early = asyncio.create_task(rig.pool.score(random_items(1, 0)))
        await settle()
        for name in "ab":
            rig.kill(name)
        late = asyncio.create_task(rig.pool.score(random_items(1, 1)))
        await rig.clock.advance(5.0)
        assert len(rig.events_of(EventKind.PAUSED)) == 1
        arrived.set_result(None)
        await rig.clock.advance(5.0)
        assert early.done() and not late.done()
        assert not rig.events_of(EventKind.RESUMED) and rig.pool.metrics().paused
        rig.start_error = None
        await rig.clock.advance(10.0)
        assert (await late)[0].key == "row-1-0"
        assert len(rig.events_of(EventKind.PAUSED)) == len(rig.events_of(EventKind.RESUMED)) == 1

    run_with_pool(test, Rig())


def test_one_failure_after_an_outage_is_a_retry_and_not_a_second_pause() -> None:
    """The failed rounds of a call that waited through the outage must not count after it."""

    async def test(rig: Rig) -> None:
        rig.start_error = RuntimeError("no machine")
        rig.kill("a")
        calls = [asyncio.create_task(rig.pool.score(random_items(1, seed))) for seed in range(3)]
        await rig.clock.advance(20.0)
        answers = itertools.count()

        async def stumbling(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            if next(answers) == 1:
                raise REFUSED_CONNECTION
            return answer(replica.name, items)

        def fresh(name: str) -> Scripted:
            replica = Scripted(name)
            replica.behaviour = stumbling
            return replica

        rig.fresh, rig.start_error = fresh, None
        await rig.clock.advance(10.0)
        assert all(call.done() for call in calls)
        assert len(rig.events_of(EventKind.PAUSED)) == len(rig.events_of(EventKind.RESUMED)) == 1

    run_with_pool(test, Rig("a"))


def test_the_only_replica_is_restarted_when_it_stops_answering_and_can_be_restarted() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        rig.replicas["a"].probe_error = TIMEOUT
        scores = await rig.score()
        assert (
            scores[0].key == "row-0-0"
            and [name for _, name in rig.starts] == ["a", "a"]
            and rig.stops == ["a"]
        )

    run_with_pool(test, Rig("a"))


def test_the_only_external_replica_is_never_ejected() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(REFUSED_CONNECTION)
        rig.replicas["a"].probe_error = REFUSED_CONNECTION
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(15.0)
        assert (
            rig.state("a") is State.SUSPECT
            and not rig.events_of(EventKind.EJECTED)
            and rig.events_of(EventKind.PAUSED)
        )
        rig.replicas["a"].behaviour = answer_correctly
        await rig.clock.advance(3.0)
        assert (await call)[0].key == "row-0-0"

    run_with_pool(test, Rig("a", external=True))


def test_an_ejected_external_replica_is_readmitted_after_a_successful_probe() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(REFUSED_CONNECTION)
        rig.replicas["a"].probe_error = REFUSED_CONNECTION
        await rig.score()
        assert rig.state("a") is State.EJECTED
        rig.replicas["a"].behaviour, rig.replicas["a"].probe_error = answer_correctly, None
        await rig.clock.advance(3.0)
        assert rig.state("a") is State.HEALTHY and rig.events_of(EventKind.READMITTED)

    run_with_pool(test, Rig(external=True))


def test_requests_go_to_the_replica_with_the_fewest_outstanding_tokens() -> None:
    async def test(rig: Rig) -> None:
        gate = asyncio.Event()

        async def held(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await gate.wait()
            return answer(replica.name, items)

        for replica in rig.replicas.values():
            replica.behaviour = held
        long = random_items(1, 0, lengths=(90, 91))
        short = [random_items(1, seed, lengths=(10, 11)) for seed in range(1, 9)]
        calls = [asyncio.create_task(rig.pool.score(items)) for items in [long, *short]]
        await settle()
        assert [len(rig.replicas[name].asked) for name in "ab"] == [1, 8]
        gate.set()
        await asyncio.gather(*calls)
        assert {r.name: r.outstanding_tokens for r in rig.pool.metrics().replicas} == {"a": 0, "b": 0}
        assert abs(rig.pool.metrics().replicas[0].share - 90 / 170) < 1e-9

    run_with_pool(test, Rig())


def test_request_deadlines_grow_with_waiting_tokens_and_after_a_timeout() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        await rig.pool.score(random_items(1, lengths=(50, 51)))
        assert rig.replicas["a"].timeouts == [pytest.approx(10.0 + 50 / 100)]
        assert rig.replicas["b"].timeouts == [pytest.approx(1.5 * (10.0 + 50 / 100))]

    run_with_pool(test, Rig())


def test_a_cancelled_call_leaves_no_outstanding_tokens_or_failures() -> None:
    async def test(rig: Rig) -> None:
        async def forever(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await asyncio.Event().wait()
            return []

        rig.replicas["a"].behaviour = forever
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await settle()
        call.cancel()
        await settle()
        metrics = rig.pool.metrics()
        assert metrics.queue_depth == 0 and metrics.replicas[0].outstanding_tokens == 0
        assert metrics.replicas[0].failures == 0

    run_with_pool(test, Rig())


def test_replicas_can_be_added_and_removed_while_the_pool_runs() -> None:
    async def test(rig: Rig) -> None:
        await rig.pool.add(ReplicaSpec("c"))
        assert rig.state("c") is State.HEALTHY
        with pytest.raises(TeacherError, match="already has a replica 'c'"):
            await rig.pool.add(ReplicaSpec("c"))
        await rig.pool.remove("a")
        await rig.pool.remove("b")
        assert rig.stops == ["a", "b"] and rig.replicas["a"].closed
        assert [s.teacher for s in await rig.pool.score(random_items(1))] == ["c"]
        with pytest.raises(TeacherError, match="last usable replica"):
            await rig.pool.remove("c")
        with pytest.raises(TeacherError, match="no replica 'zz'; it has c"):
            await rig.pool.remove("zz")

    run_with_pool(test, Rig())


def test_an_added_replica_with_another_manifest_is_refused() -> None:
    async def test(rig: Rig) -> None:
        def other_manifest(name: str) -> Scripted:
            replica = Scripted(name)
            replica.manifest_now = msgspec.structs.replace(MANIFEST, dtype="bfloat16")
            return replica

        rig.fresh = other_manifest
        with pytest.raises(TeacherError, match="dtype is bfloat16"):
            await rig.pool.add(ReplicaSpec("c"))
        assert [r.name for r in rig.pool.metrics().replicas] == ["a", "b"] and rig.stops == ["c"]

    run_with_pool(test, Rig())


def test_a_replica_added_during_a_publish_gets_the_new_weights() -> None:
    """Its manifest was read before the publish; it is identified again instead of refused for its old version."""

    async def test(rig: Rig) -> None:
        delivered: list[str] = []

        async def deliver(names: Sequence[str]) -> dict[str, str]:
            for name in names:
                rig.replicas[name].manifest_now = msgspec.structs.replace(MANIFEST, version=1)
            delivered.extend(names)
            return {}

        class Overtaken(Scripted):
            async def manifest(self) -> Manifest:
                found = self.manifest_now
                if not delivered:
                    await rig.pool.change_version(1, deliver)
                return found

        rig.fresh = Overtaken
        await rig.pool.add(ReplicaSpec("c"))
        assert delivered == ["a", "b", "c"] and rig.state("c") is State.HEALTHY
        await rig.pool.change_version(1, deliver)
        assert delivered[3:] == ["a", "b", "c"]

    run_with_pool(test, Rig())


def test_a_probe_begun_before_a_publish_does_not_eject_a_healthy_replica() -> None:
    async def test(rig: Rig) -> None:
        read, go_on = asyncio.Event(), asyncio.Event()

        async def slow_manifest() -> Manifest:
            read.set()
            await go_on.wait()
            return MANIFEST

        async def deliver(names: Sequence[str]) -> dict[str, str]:
            for name in names:
                rig.replicas[name].manifest_now = msgspec.structs.replace(MANIFEST, version=1)
            rig.replicas["a"].manifest = honest  # type: ignore[method-assign]
            go_on.set()
            await settle()
            return {}

        honest = rig.replicas["a"].manifest
        rig.replicas["a"].manifest = slow_manifest  # type: ignore[method-assign]
        rig.replicas["a"].behaviour = failing(TIMEOUT)
        assert (await rig.pool.score(random_items(1)))[0].teacher == "b"
        await read.wait()
        assert rig.state("a") is State.SUSPECT
        await rig.pool.change_version(1, deliver)
        await settle()
        assert rig.state("a") is rig.state("b") is State.HEALTHY and not rig.events_of(EventKind.EJECTED)

    run_with_pool(test, Rig())


def test_a_removed_replica_finishes_its_requests_first() -> None:
    async def test(rig: Rig) -> None:
        gate = asyncio.Event()

        async def held(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await gate.wait()
            return answer(replica.name, items)

        rig.replicas["a"].behaviour = held
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await settle()
        leaving = asyncio.create_task(rig.pool.remove("a"))
        await rig.clock.advance(1.0)
        assert not leaving.done() and not rig.replicas["a"].closed
        gate.set()
        await rig.clock.advance(0.1)
        assert leaving.done() and (await call)[0].teacher == "a"

    run_with_pool(test, Rig())


def test_a_failed_start_stops_all_replicas_when_one_differs_or_cannot_start() -> None:
    async def run(rig: Rig, message: str) -> None:
        with pytest.raises(Exception, match=message):
            await rig.pool.start()
        assert sorted(rig.stops) == ["a", "b"]

    different = Rig()

    def other_manifest(name: str) -> Scripted:
        replica = Scripted(name)
        if name == "b":
            replica.manifest_now = msgspec.structs.replace(MANIFEST, vocab_fingerprint="00")
        return replica

    different.fresh = other_manifest
    asyncio.run(run(different, "replica b: vocabulary is 00"))
    unable = Rig()
    unable.start_error = TeacherError("port in use")
    asyncio.run(run(unable, "port in use"))


class SlowToStart(Rig):
    """Replica a cannot start while replica b is still starting, as on a cluster with a slow machine."""

    async def start(self, replica: str) -> Endpoint:
        if replica == "a":
            raise TeacherError("port in use")
        await asyncio.sleep(0.1)
        return await super().start(replica)


def test_a_replica_still_starting_is_cancelled_when_another_cannot_start() -> None:
    async def run() -> None:
        rig = SlowToStart()
        with pytest.raises(TeacherError, match="port in use"):
            await rig.pool.start()
        await asyncio.sleep(0.2)
        assert not rig.living and not rig.replicas

    asyncio.run(run())


def test_a_started_replica_that_refuses_connections_is_asked_again_or_restarted_if_dead() -> None:
    """On a busy machine the first connection to a ready process may time out. External servers are not retried."""

    def slow(name: str) -> Scripted:
        replica = Scripted(name)
        replica.probe_error = TeacherUnavailable("/manifest failed: ConnectTimeout")
        return replica

    async def start(rig: Rig) -> asyncio.Task[None]:
        rig.fresh = slow
        starting = asyncio.create_task(rig.pool.start())
        await rig.clock.advance(2.0)
        return starting

    async def tolerant() -> None:
        rig = Rig("a")
        starting = await start(rig)
        assert not starting.done()
        rig.replicas["a"].probe_error = None
        await rig.clock.advance(1.0)
        await starting
        assert rig.state("a") is State.HEALTHY and len(rig.starts) == 1
        await rig.pool.close()

    async def died() -> None:
        rig = Rig("a")
        starting = await start(rig)
        rig.fresh = Scripted
        rig.living.clear()
        await rig.clock.advance(1.0)
        await starting
        assert rig.state("a") is State.HEALTHY and len(rig.starts) == 2
        await rig.pool.close()

    async def external_servers() -> None:
        message = r"ConnectTimeout; start its server at http://elsewhere, or name another one in teachers\.math\.urls"
        with pytest.raises(TeacherUnavailable, match=message):
            await (await start(Rig("a", external=True)))

    for case in (tolerant, died, external_servers):
        asyncio.run(case())


def test_a_pool_without_replicas_addresses_or_a_launcher_is_refused() -> None:
    with pytest.raises(TeacherError, match="at least one replica"):
        TeacherPool("math", [])

    async def start() -> None:
        await TeacherPool("math", [ReplicaSpec("a")]).start()

    with pytest.raises(TeacherError, match="neither an address nor a launcher"):
        asyncio.run(start())


def test_pool_metrics_flatten_to_named_floats() -> None:
    async def test(rig: Rig) -> None:
        await rig.pool.score(random_items(1))
        flat: dict[str, Any] = rig.pool.metrics().flat()
        assert flat["teacher/math/requests"] == 1.0 and flat["teacher/math/a/share"] == 1.0
        assert all(isinstance(value, float) for value in flat.values())

    run_with_pool(test, Rig())


def test_a_replica_that_does_not_score_the_probe_in_time_is_named() -> None:
    class Silent:
        def __getattr__(self, name: str) -> Any:
            async def never(*_: object, **__: object) -> None:
                await asyncio.sleep(60)

            return never

    processes, replica = SimpleNamespace(_teacher="add"), SimpleNamespace(name="0", client=Silent())
    identify: Any = ReplicaProcesses.identify
    with pytest.raises(
        TeacherError, match=r"teacher add, replica 0 did not score the fixed tokens within 0\.1 s"
    ):
        asyncio.run(identify(processes, replica, 0.1))
