"""Teacher pools of real replica processes that are killed, suspended, wedged, all down, or send wrong replies ("lies").

The reference is a scorer in this process: every request must be answered once, with exactly the reference's scores.
A few trials always run; many more, with other seeds, run under `-m faults`.
"""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from replica_fork_server import LIES
from teacher_rig import ForkServerLauncher, ReplicaForkServer, random_items

from understudy.errors import TeacherReplyError
from understudy.serving.supervisor import Restarts
from understudy.teacher.pool.events import EventKind, PoolEvent
from understudy.teacher.pool.health import Failure, HealthRules, State
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions, SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal, TeacherScores

DEADLINE = 2.0
OPTIONS = PoolOptions(
    deadline_base=DEADLINE,
    retry_first=0.02,
    retry_most=0.2,
    supervisor=SupervisorOptions(
        probe_deadline=DEADLINE,
        watch_every=0.05,
        slowest_tokens_per_second=5000.0,
        health=HealthRules(eject_after=3, restarts=Restarts(None, 0.2, 1.0)),
    ),
)


@dataclass
class Trial:
    """A pool of real replicas under a stream of requests, with its replies and events."""

    fork_server: ReplicaForkServer
    model: Path
    seed: int
    names: tuple[str, ...] = ("a", "b", "c")
    lies: dict[str, tuple[str, float, int]] = field(default_factory=dict)
    requests: int = 40
    """The least number of requests; the stream continues until the disturbance is over."""
    options: PoolOptions = OPTIONS
    events: list[PoolEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.rng = random.Random(self.seed)
        self.launcher = ForkServerLauncher(self.fork_server, self.model, lies=self.lies)
        self.returned: dict[int, list[TeacherScores]] = {}
        self.asked = 0
        self.pool = TeacherPool(
            "math",
            [ReplicaSpec(name) for name in self.names],
            self.launcher,
            rng=random.Random(self.seed),
            options=self.options,
            on_event=self.events.append,
        )

    def batch(self, number: int) -> list[ScoreItem]:
        return random_items(4, 1000 * self.seed + number, Signal.TOPK, 4)

    async def ask(self, disturbance: asyncio.Task[None]) -> None:
        while self.asked < self.requests or not disturbance.done():
            number, self.asked = self.asked, self.asked + 1
            self.returned[number] = await self.pool.score(self.batch(number))

    def check(self) -> None:
        """Every request was answered once, with exactly the scores of a scorer in this process."""
        assert sorted(self.returned) == list(range(self.asked)), f"seed {self.seed}: requests lost"
        oracle = Scorer("math", load_frozen(str(self.model)))
        canary = self.pool._canary  # part of every request; the last digits of scores depend on it
        assert canary is not None
        for number, scores in self.returned.items():
            right_scores = oracle.score(request_of(canary.with_items(self.batch(number)))).split()[:-1]
            for got, right in zip(scores, right_scores, strict=True):
                assert got.key == right.key
                np.testing.assert_array_equal(got.sampled_logprobs, right.sampled_logprobs)
                np.testing.assert_array_equal(got.ids, right.ids)
                np.testing.assert_array_equal(got.logprobs, right.logprobs)

    def events_of(self, kind: EventKind, replica: str | None = None) -> list[PoolEvent]:
        return [e for e in self.events if e.kind is kind and (replica is None or e.replica == replica)]

    def replica_state(self, name: str) -> State:
        return next(r.state for r in self.pool.metrics().replicas if r.name == name)

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"seed {self.seed}: not within {seconds} s; {self.events[-5:]}"
            await asyncio.sleep(0.02)

    def run(self, disturb: Callable[["Trial"], Coroutine[None, None, None]]) -> None:
        """Streams requests, eight at a time, while `disturb` runs; then checks every reply."""

        async def disturb_and_stream() -> None:
            await self.pool.start()
            try:
                disturbance = asyncio.create_task(disturb(self))
                stream = [self.ask(disturbance) for _ in range(8)]
                await asyncio.wait_for(asyncio.gather(disturbance, *stream), 120)
            finally:
                await self.pool.close()
            assert not any(child.alive() for child in self.launcher.every), "a replica outlived its pool"

        asyncio.run(disturb_and_stream())
        self.check()


def trials(few: int, many: int) -> list[object]:
    """Seeds: a few that always run, and many under `-m faults`."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(few, many))]


@pytest.mark.parametrize("seed", trials(2, 24))
def test_no_row_is_lost_when_replicas_are_killed(
    seed: int, fork_server: ReplicaForkServer, model: Path
) -> None:
    async def kill_at_random_moments(trial: Trial) -> None:
        for _ in range(2):
            await asyncio.sleep(trial.rng.uniform(0.0, 0.4))
            victim = trial.rng.choice(trial.names)
            if child := trial.launcher.children.get(victim):
                child.signal(signal.SIGKILL)
        await trial.until(lambda: bool(trial.events_of(EventKind.RESTARTED)), 30)
        await trial.until(lambda: all(r.state is State.HEALTHY for r in trial.pool.metrics().replicas), 30)

    trial = Trial(fork_server, model, seed)
    trial.run(kill_at_random_moments)
    assert not trial.events_of(EventKind.PAUSED)


@pytest.mark.parametrize("seed", trials(1, 20))
def test_a_suspended_replica_is_ejected_within_two_deadlines(
    seed: int, fork_server: ReplicaForkServer, model: Path
) -> None:
    """After SIGSTOP the process exists and its port accepts connections, but no reply comes."""

    async def stop_one(trial: Trial) -> None:
        await asyncio.sleep(trial.rng.uniform(0.0, 0.2))
        victim = trial.rng.choice(trial.names)
        trial.launcher.children[victim].signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await trial.until(lambda: bool(trial.events_of(EventKind.EJECTED, victim)), 2 * DEADLINE + 1.0)
        assert time.monotonic() - stopped < 2 * DEADLINE + 0.5
        await trial.until(lambda: trial.replica_state(victim) is State.HEALTHY, 30)

    Trial(fork_server, model, seed).run(stop_one)


@pytest.mark.parametrize("seed", trials(1, 20))
def test_a_replica_whose_scoring_hangs_while_health_answers_is_ejected(
    seed: int, fork_server: ReplicaForkServer, model: Path
) -> None:
    """Its event loop runs and /health answers ok; only scoring hangs, from a seeded request on."""
    wedged_after = 3 + seed % 7

    async def wait_for_ejection_and_recovery(trial: Trial) -> None:
        wedged = trial.launcher.children["b"]
        await trial.until(lambda: bool(trial.events_of(EventKind.EJECTED, "b")), 20)
        assert wedged.alive()
        trial.launcher.lies.clear()
        await trial.until(lambda: trial.replica_state("b") is State.HEALTHY, 30)

    trial = Trial(fork_server, model, seed, lies={"b": ("wedged", 1.0, wedged_after)})
    trial.run(wait_for_ejection_and_recovery)
    assert "no answer" in trial.events_of(EventKind.RETRIED, "b")[0].message


@pytest.mark.parametrize(
    ("seed", "seconds"), [(0, 1.5), *(pytest.param(s, 10.0, marks=pytest.mark.faults) for s in range(1, 21))]
)
def test_the_pool_pauses_while_all_replicas_are_down_and_then_resumes(
    seed: int, seconds: float, fork_server: ReplicaForkServer, model: Path
) -> None:
    async def kill_all_replicas(trial: Trial) -> None:
        await asyncio.sleep(trial.rng.uniform(0.0, 0.3))
        trial.launcher.down = True
        for child in trial.launcher.children.values():
            child.signal(signal.SIGKILL)
        await asyncio.sleep(seconds)
        assert trial.pool.metrics().paused
        trial.launcher.down = False

    trial = Trial(fork_server, model, seed)
    trial.run(kill_all_replicas)
    assert len(trial.events_of(EventKind.PAUSED)) == len(trial.events_of(EventKind.RESUMED)) == 1
    assert "nothing is dropped" in trial.events_of(EventKind.PAUSED)[0].message
    assert trial.pool.metrics().paused_seconds >= seconds - 0.5


async def no_disturbance(trial: Trial) -> None:
    return None


def assert_wrong_replies_were_caught(trial: Trial, lies: list[str]) -> None:
    """Every wrong reply was caught; messages name teacher and replica, and row and position if the kind allows it."""
    caught = trial.events_of(EventKind.RETRIED, "b")
    assert lies and len(caught) == len(lies)
    for event in caught:
        assert event.message.startswith("teacher math, replica b")
    without_position = {"null", "json_null", "cut", "short", "other_rows", "shifted_scores"}
    with_position = [
        event for event in caught if "row 'row-" in event.message and "position " in event.message
    ]
    assert len(with_position) >= sum(lie not in without_position for lie in lies)


def test_every_kind_of_wrong_reply_is_caught(fork_server: ReplicaForkServer, model: Path) -> None:
    """A single replica sends every kind of wrong reply in turn; health rules keep it, so that it can send them all."""
    tolerant = HealthRules(eject_after=10**6, eject_after_bad_replies=10**6)
    options = replace(
        OPTIONS, max_bad_attempts=10**6, supervisor=replace(OPTIONS.supervisor, health=tolerant)
    )

    async def wait_for_every_kind_of_wrong_reply(trial: Trial) -> None:
        liar = trial.launcher.children["b"]
        await trial.until(lambda: set(liar.lies) == set(LIES), 60)

    trial = Trial(fork_server, model, 0, names=("b",), lies={"b": ("every", 0.7, 0)}, options=options)
    trial.run(wait_for_every_kind_of_wrong_reply)
    assert_wrong_replies_were_caught(trial, trial.launcher.every[0].lies)


@pytest.mark.faults
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("seed", range(20))
def test_each_kind_of_wrong_reply_is_caught_with_many_seeds(
    lie: str, seed: int, fork_server: ReplicaForkServer, model: Path
) -> None:
    """One of two replicas sends wrong replies now and then, is ejected for it, restarted, and does it again."""
    trial = Trial(fork_server, model, seed, names=("a", "b"), lies={"b": (lie, 0.3, seed)})
    trial.run(no_disturbance)
    assert_wrong_replies_were_caught(trial, [one for child in trial.launcher.every for one in child.lies])


def test_the_caller_gets_an_error_when_every_replica_sends_wrong_replies(
    fork_server: ReplicaForkServer, model: Path
) -> None:
    """No scores are made up: the request fails with an error that names teacher, replica, row and position."""

    async def run() -> None:
        trial = Trial(
            fork_server, model, 0, names=("a", "b"), lies={"a": ("nan", 1.0, 0), "b": ("nan", 1.0, 0)}
        )
        await trial.pool.start()
        try:
            with pytest.raises(
                TeacherReplyError,
                match=r"teacher math, replica [ab], row 'row-0-\d', position \d+: logprob nan",
            ):
                await trial.pool.score(trial.batch(0))
            failures = [f for r in trial.pool._supervisor.replicas.values() for f in r.failures]
            assert set(failures) == {Failure.BAD_REPLY}
        finally:
            await trial.pool.close()

    asyncio.run(run())
