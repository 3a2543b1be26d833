"""A teacher's pool in virtual time: the real pool, supervisor, health machine, canary and publish gate; simulated replicas.

One seed draws replicas, requests, publishes of new weights and faults: processes that die or cannot start, replicas
that hang, fail, send bad replies, shift their scores by one position, hold other weights or weights of an older
version. The time of day is changed now and then, and some trainers are frozen: then time passes and nothing happens.
After the last fault, every request must end within `LONGEST` seconds, with the scores of the right weights, in order.
An error is right only after as many bad replies as the options allow. The checks are at the end of the file and in
`Watched`.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
from virtual_time import Stalled, SystemClocks, VirtualLoop, run

from understudy.errors import TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import Restarts
from understudy.teacher.clients.http import ReplicaTimeout, ScoringFailed
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.pool import clock, supervisor
from understudy.teacher.pool.clock import MonotonicClock
from understudy.teacher.pool.health import HealthRules, ReplicaHealth, State
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions, SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.types.scores import ScoreItem, Signal, TeacherScores

LONGEST = 900.0
"""Virtual seconds from the last fault to the last answer. Backoffs are at most 30 s, deadlines at most 300 s."""
FAULTS = ("die", "hang", "fail", "lie", "shift", "other weights", "slow")
RIGHT, WRONG = "right", "wrong"
EDGES = {
    State.STARTING: {State.PROBING, State.EJECTED},
    State.PROBING: {State.HEALTHY, State.EJECTED},
    State.HEALTHY: {State.SUSPECT, State.EJECTED},
    State.SUSPECT: {State.HEALTHY, State.EJECTED},
    State.EJECTED: {State.PROBING, State.RESTARTING},
    State.RESTARTING: {State.PROBING, State.EJECTED},
    State.RETIRED: set[State](),
}
"""The drawing at the head of `teacher/pool/health.py`, written down a second time."""


class Process:
    """What a replica runs at the moment."""

    def __init__(self, version: int) -> None:
        self.alive, self.mode, self.weights, self.version = True, "", RIGHT, version

    @property
    def sound(self) -> bool:
        return self.alive and self.weights == RIGHT and self.mode not in ("shift", "lie", "fail")


def truth(weights: str, version: int, item: ScoreItem) -> np.ndarray:
    """The scores that these weights give: a function of weights and tokens alone."""
    seed = zlib.crc32(f"{weights} {version} {item.tokens.tobytes()!r}".encode())
    return -np.float32((seed % 997) / 100) - item.positions.astype(np.float32) / 8


class Client:
    """The connection to one replica: answers for the process that it was opened to."""

    def __init__(self, world: World, name: str, process: Process) -> None:
        self.world, self.name, self.process, self.probed_sound = world, name, process, False

    async def manifest(self) -> Manifest:
        self._reach()
        return Manifest(
            "math", "native", "m", self.process.weights, "ff", 61, 32, "float32", list(Signal),
            Limits(max_length=100, max_k=20), version=self.process.version,
        )  # fmt: skip

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        world, process, probe = self.world, self.process, items[0].key == "probe"
        world.steps += 1
        if not probe and not world.usable(self.name) and world.pool.options.hedge_after is None:
            world.problems.append(f"a request was sent to {self.name}, which is {world.state(self.name)}")
        self._reach()
        seconds = world.chance.expovariate(1 / (20 if process.mode == "slow" else 0.3))
        if process.mode == "hang" or seconds > (timeout or 60.0):
            await asyncio.sleep(timeout or 60.0)
            raise ReplicaTimeout("no answer")
        asked = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        if asyncio.get_running_loop().time() - asked > (timeout or 60.0):
            raise ReplicaTimeout("the trainer was frozen, and the deadline is over")
        self._reach()
        if process.mode in ("fail", "lie"):
            world.bad.update([] if probe else [items[0].key])
            raise ScoringFailed("500") if process.mode == "fail" else TeacherReplyError("NaN")
        self.probed_sound = probe and process.sound and process.version == world.version
        scores = [truth(process.weights, process.version, item) for item in items]
        if process.mode == "shift":
            scores = [np.roll(one, 1) if len(one) > 1 else one - 1 for one in scores]
        if not probe and not process.sound:
            world.bad[items[0].key] += 1
        return [
            TeacherScores(item.key, "math", item.signal, one, version=process.version)
            for item, one in zip(items, scores, strict=True)
        ]

    def _reach(self) -> None:
        if not self.process.alive:
            raise TeacherUnavailable("connection refused")

    async def health(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class World:
    """Replicas, faults and requests of one seed. Also the pool's launcher."""

    def __init__(self, seed: int, requests: int) -> None:
        self.chance = random.Random(seed)
        self.outside = random.Random(f"clocks {seed}")
        """For what is no part of the pool, so that it changes no other draw."""
        self.clocks = SystemClocks()
        self.requests = requests
        self.problems: list[str] = []
        self.steps = 0
        self.version = -1
        self.processes: dict[str, Process] = {}
        self.clients: dict[str, Client] = {}
        self.bad: Counter[str] = Counter()
        """Bad replies to requests, by the key of their first item."""
        self.start_failing = 0.0
        self.publishing = False
        self.calm_since: float | None = None
        self.follows = self.chance.random() < 0.4
        restarts = Restarts(None, first_wait_s=1.0, longest_wait_s=30.0)
        self.options = PoolOptions(
            deadline_base=10.0, hedge_after=self.chance.choice((None, None, 3.0)),
            supervisor=SupervisorOptions(health=HealthRules(restarts=restarts)),
        )  # fmt: skip

    # ---- the launcher

    async def start(self, name: str) -> Endpoint:
        await asyncio.sleep(self.chance.uniform(0.5, 5))
        if self.chance.random() < self.start_failing:
            raise TeacherError("the simulated process cannot start")
        stale = self.start_failing and self.version >= 0 and self.chance.random() < 0.2
        self.processes[name] = Process(self.version - 1 if stale else self.version)
        return Endpoint(f"http://{name}")

    async def stop(self, name: str) -> None:
        if name in self.processes:
            self.processes[name].alive = False

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    def end_of_log(self, name: str) -> str:
        return ""

    def connect(self, teacher: str, name: str, endpoint: Endpoint) -> Client:
        self.clients[name] = Client(self, name, self.processes[name])
        return self.clients[name]

    # ---- what happens

    async def go(self) -> None:
        names = "abcd"[: self.chance.randint(1, 4)]
        pool = self.pool = TeacherPool(
            "math", [ReplicaSpec(name) for name in names], self, MonotonicClock(), self.chance, self.options,
            connect=self.connect, on_event=lambda event: None,
        )  # fmt: skip
        self.gate = PublishGate()
        await pool.start()
        beside = [asyncio.create_task(work) for work in (self.break_things(names), self.set_clock())]
        if self.outside.random() < 0.3:
            beside.append(asyncio.create_task(self.freeze_trainer()))
        if self.follows:
            await self.publish()
            beside.append(asyncio.create_task(self.publish_often()))
        await asyncio.gather(*(self.ask(number) for number in range(self.requests)))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for replica in pool._supervisor.replicas.values():
            if replica.load.outstanding_tokens or replica.load.outstanding_requests:
                self.problems.append(f"{replica.name} still counts {replica.load}")
        if pool._waiting:
            self.problems.append(f"{pool._waiting} requests count as waiting")
        await pool.close()
        self.problems += [f"process {name} was left running" for name in names if self.alive(name)]

    async def ask(self, number: int) -> None:
        await asyncio.sleep(self.chance.uniform(0, 2 * self.requests))
        items = [self.item(f"{number}-{place}") for place in range(self.chance.randint(1, 3))]
        self.steps += 1
        async with self.gate.enter():
            version = self.version
            try:
                scores = await self.pool.score(items)
            except (TeacherReplyError, ScoringFailed) as error:
                if self.bad[items[0].key] < self.options.max_bad_attempts:
                    self.problems.append(
                        f"request {number} failed after {self.bad[items[0].key]} bad replies: {error}"
                    )
                return
        now = asyncio.get_running_loop().time()
        if self.calm_since is not None and now - self.calm_since > LONGEST:
            self.problems.append(f"request {number} ended {now - self.calm_since:.0f} s after the last fault")
        for item, one in zip(items, scores, strict=True):
            found = await one.fetch()
            right = truth(RIGHT, version, item)
            if found.key != item.key or not np.array_equal(found.sampled_logprobs, right):
                self.problems.append(f"row {item.key} got other scores than its own under version {version}")

    def item(self, key: str) -> ScoreItem:
        length = self.chance.randint(3, 30)
        tokens = np.array([self.chance.randrange(61) for _ in range(length)], np.int32)
        return ScoreItem(key, tokens, np.arange(1, length, dtype=np.int32), Signal.SAMPLED)

    async def break_things(self, names: str) -> None:
        until = asyncio.get_running_loop().time() + self.requests
        self.start_failing = self.chance.choice((0.0, 0.3, 0.6))
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(self.chance.expovariate(1 / 15))
            self.steps += 1
            process = self.processes[self.chance.choice(names)]
            kind = self.chance.choice(FAULTS)
            if kind == "die":
                process.alive = False
            elif kind == "other weights" and not self.publishing:
                process.weights = WRONG
            elif kind == "shift" and not self.publishing:
                process.mode = kind
            elif kind not in ("shift", "other weights"):
                process.mode = kind
                asyncio.get_running_loop().call_later(
                    self.chance.expovariate(1 / 30), self.mend, process, kind
                )
        await asyncio.sleep(60)
        self.start_failing = 0.0
        for process in self.processes.values():
            self.mend(process, process.mode)
        self.calm_since = asyncio.get_running_loop().time()

    async def set_clock(self) -> None:
        while True:
            await asyncio.sleep(self.outside.expovariate(1 / 20))
            self.clocks.set_by += self.outside.choice((-1e6, -3600.0, -5.0, 5.0, 3600.0, 1e6))

    async def freeze_trainer(self) -> None:
        """Freezes the trainer three times, sometimes for longer than every deadline."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(3):
            await asyncio.sleep(self.outside.uniform(0, 0.6 * self.requests))
            loop.now += self.outside.choice((self.outside.uniform(1, 10), self.outside.uniform(10, 100)))
            self.steps += 1

    @staticmethod
    def mend(process: Process, kind: str) -> None:
        """What a replica can recover from by itself; shifted scores and other weights last until a restart."""
        if process.mode == kind and kind != "shift":
            process.mode = ""

    async def publish_often(self) -> None:
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / 60))
            await self.publish()

    async def publish(self) -> None:
        self.publishing = True
        await self.gate.close()
        self.version += 1
        self.steps += 1
        await self.pool.change_version(self.version, self.deliver)
        self.gate.open()
        self.publishing = False

    async def deliver(self, names: Sequence[str]) -> Mapping[str, str]:
        """Some replicas do not take the weights; half of those do not report it."""
        lost = {}
        for name in names:
            await asyncio.sleep(self.chance.uniform(0, 1))
            process = self.processes[name]
            if self.chance.random() < 0.15:
                if self.chance.random() < 0.5:
                    lost[name] = "the simulated delivery failed"
                continue
            process.version, process.weights = self.version, RIGHT
            if process.mode == "shift":
                process.mode = ""
        return lost

    # ---- checks

    def state(self, name: str) -> State:
        return self.pool._supervisor.replicas[name].health.state

    def usable(self, name: str) -> bool:
        return self.state(name) in (State.HEALTHY, State.SUSPECT)

    def name_of(self, health: ReplicaHealth) -> str | None:
        replicas = self.pool._supervisor.replicas if hasattr(self, "pool") else {}
        return next((name for name, replica in replicas.items() if replica.health is health), None)

    def watched(self) -> type[ReplicaHealth]:
        """A `ReplicaHealth` that reports changes of state which `EDGES` does not have."""
        world = self

        class Watched(ReplicaHealth):
            def __setattr__(self, field: str, value: Any) -> None:
                before = getattr(self, "state", None)
                super().__setattr__(field, value)
                if field != "state" or before in (None, value):
                    return
                world.steps += 1
                if value not in EDGES[before] and value is not State.RETIRED:
                    world.problems.append(f"a replica went from {before} to {value}")
                name = world.name_of(self)
                admitted = before is State.PROBING and value is State.HEALTHY
                if admitted and name is not None and not world.clients[name].probed_sound:
                    world.problems.append(f"{name} was admitted, and its probe was not sound")

        return Watched


def judge(seed: int, requests: int = 60) -> tuple[list[str], int]:
    """The problems of this seed's pool, and its number of steps: requests, replies, faults, changes of state."""
    world = World(seed, requests)
    watched = mock.patch.object(supervisor, "ReplicaHealth", world.watched())
    with watched, mock.patch.object(clock, "time", world.clocks):
        try:
            run(_within(world.go(), requests * 10 + 3 * LONGEST))
        except (Stalled, TimeoutError) as error:
            world.problems.append(f"the pool stalls {error}")
        except Exception as error:
            world.problems.append(f"the pool fails: {error!r}")
    return world.problems, world.steps


async def _within(work: Any, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await work
