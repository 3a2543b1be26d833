"""A run reduced to its bookkeeping, in virtual time: the real data plane, leases, windows, slots and cursor; no model.

    cursor ─> admit (StalenessBudget) ─> rows (issue, put, dead_letter) ─> claim ─> ack ─> publish ─> checkpoint
                                             └ or by workers under leases, some of which stall or die

One seed draws the run and its faults: kills, power cuts, failing commits and flushes, workers that outlive their
leases. A launch resumes as `trainers/checkpoints.py` does: from the newest checkpoint, after `rewind`. The journal is
then read as that of a real run, and `checker.violations` judges it. What only a simulation can know is checked here:
what a call acknowledged is still there after a kill (after a power cut: what `sync` acknowledged), every cell is the
one that was written, and the weights have seen each trained row exactly once.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checker import Event, History, Promise, violations
from reading import read_journal, read_letters
from simulated_disk import Disk
from virtual_time import Stalled, VirtualLoop

from understudy.dataplane.base import Count, GroupPolicy, Lease, Order, RowStatus
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import LeaseLost
from understudy.planning.windows import Windows
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import load_dataset
from understudy.trainers.pacing.staleness_budget import StalenessBudget, WindowProgress
from understudy.trainers.pacing.window_cursor import WindowCursor
from understudy.types.prompt import split_key

TRAIN = "train"
FIELDS = ("tokens", "score")
LEASE_SECONDS = 5.0
LONGEST = 10_000.0
"""Virtual seconds that a launch may take."""
DATASET = load_dataset([{"prompt": str(index)} for index in range(23)])


@dataclass(frozen=True)
class Plan:
    """What one seed draws."""

    windows: Windows
    sessions: int
    policy: GroupPolicy | None
    workers: int
    """0: rows are made in the trainer, without leases."""
    keep_rows: bool
    checkpoint_every: int
    spill_bytes: int
    bad: float
    """Share of failing rows among those of every other prompt, so that each step has a row left."""
    faults: int

    @classmethod
    def draw(cls, chance: random.Random) -> Plan:
        windows = Windows(
            batch_size=chance.randint(1, 4), sync_every=chance.choice((1, 1, 2)),
            max_staleness=chance.choice((0.0, 0.5, 1.0, 2.5)), steps=chance.randint(3, 8),
        )  # fmt: skip
        return cls(
            windows, chance.randint(1, 3), chance.choice((None, *GroupPolicy)), chance.choice((0, 0, 2, 3)),
            chance.random() < 0.5, chance.randint(1, 3), chance.choice((1 << 20, 8)),
            chance.choice((0.0, 0.1)) if windows.batch_size > 1 else 0.0, chance.randint(0, 4),
        )  # fmt: skip


@dataclass
class Checkpoint:
    step: int
    cursor: dict[str, Any]
    trained: Counter[str]
    """What the weights have seen."""


@dataclass
class SimulatedRun:
    seed: int
    folder: Path
    disturbed: bool = True
    operations: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.plan = Plan.draw(self.chance)
        self.faults = self.plan.faults if self.disturbed else 0
        self.disk = Disk(self.folder, self.chance)
        self.checkpoint = Checkpoint(0, PromptCursor(DATASET, 0, True).state(), Counter())
        self.launches = 0
        self.metrics: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.acknowledged: dict[str, frozenset[str]] = {}
        """Key → the columns that a call said to be safe."""
        self.flushed: dict[str, frozenset[str]] = {}
        """The same when `sync` returned last."""
        self.leaving: set[str] = set()
        """Keys that a call was settling; it may have been committed without an answer."""

    # ---- launches

    def carry_out(self) -> History:
        shutil.rmtree(self.folder, ignore_errors=True)
        finished, now = False, 0.0
        with self.disk.mounted():
            while not finished and self.launches < self.plan.faults + 2:
                loop = VirtualLoop(now)
                try:
                    finished = self._launch(loop)
                finally:
                    now = loop.now
                    loop.abandon()
                self.launches += 1
        events, in_flight = read_journal(self.folder)
        return History(
            (), events, in_flight, self.metrics, read_letters(self.folder), self.kept, {}, (), finished
        )

    def _launch(self, loop: VirtualLoop) -> bool:
        plane = EmbeddedDataPlane.open(
            self.folder, max_rows=1000, max_bytes=10**6, spill_bytes=self.plan.spill_bytes, clock=loop.time
        )
        fault, power_cut = self.faults > 0, self.chance.random() < 0.4
        kind = self.chance.choice(("kill", "kill", "disk")) if fault else ""
        self.faults -= fault
        self.disk.failing = 0.02 if kind == "disk" else 0.0
        launch = Launch(self, plane)
        main = loop.create_task(launch.go())
        if kind == "kill":
            loop.call_later(self.chance.expovariate(1 / 15), loop.stop)
        loop.call_later(LONGEST, loop.stop)
        try:
            main.add_done_callback(lambda _: loop.stop())
            loop.run_forever()
        except Stalled as error:
            self.problems.append(f"the run stalls {error}")
            kind = "stalled"
        if main.done() and not main.cancelled() and main.exception() is None:
            loop.run_until_complete(plane.close())
            self.disk.closed()
            return True
        if main.done():
            error = main.exception()
            if kind != "disk" or not all("disk" in str(one) for one in _leaves(error)):
                self.problems.append(f"the launch failed: {error!r}")
        elif kind != "kill" and kind != "stalled":
            self.problems.append(f"the launch has not ended after {LONGEST:.0f} s")
        self.disk.failing = 0.0
        self.disk.kill(plane, power_cut)
        if power_cut:
            self.acknowledged = dict(self.flushed)
        return False


class Launch:
    """One process of the run."""

    def __init__(self, run: SimulatedRun, plane: EmbeddedDataPlane) -> None:
        self.run, self.plan, self.plane, self.chance = run, run.plan, plane, run.chance
        self.windows = run.plan.windows
        self.step = self.version = run.checkpoint.step
        self.trained = Counter(run.checkpoint.trained)
        self.progresses: dict[int, WindowProgress] = {}
        self.finished: dict[str, asyncio.Event] = {}
        self.number = run.launches

    async def go(self) -> None:
        self.check_acknowledged_rows(await self.plane.list(TRAIN))
        checkpoint, windows = self.run.checkpoint, self.windows
        await self.plane.rewind(checkpoint.step, keep_rows=self.plan.keep_rows)
        await self.learn_rows()
        self.run.metrics[:] = [line for line in self.run.metrics if line["step"] <= checkpoint.step]
        self.run.kept[:] = [row for row in self.run.kept if row["step"] <= checkpoint.step]
        cursor = PromptCursor(DATASET, 0, True)
        cursor.restore(checkpoint.cursor)
        published = self.step // windows.sync_every
        self.cursor = WindowCursor(cursor, windows, published)
        self.slots = StalenessBudget(windows, published * windows.size, published)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self.admit(tasks))]
            beside += [tasks.create_task(self.work()) for _ in range(self.plan.workers)]
            while self.step < windows.steps:
                await self.train()
            for task in beside:
                task.cancel()

    def check_acknowledged_rows(self, rows: Any) -> None:
        for key, columns in self.run.acknowledged.items():
            if key in self.run.leaving:
                continue
            if key not in rows:
                self.run.problems.append(f"row {key} was acknowledged and is gone after a restart")
            elif not columns <= set(rows[key].columns):
                self.run.problems.append(f"row {key} lost {sorted(columns - set(rows[key].columns))}")

    async def learn_rows(self) -> None:
        rows = await self.plane.list(TRAIN)
        self.run.acknowledged = {key: frozenset(row.columns) for key, row in rows.items()}
        self.run.leaving.clear()
        self.run.flushed = {}

    def did(self, key: str, *columns: str) -> None:
        before = self.run.acknowledged.get(key, frozenset())
        self.run.acknowledged[key] = before | set(columns)

    async def pause(self, mean: float) -> None:
        await asyncio.sleep(self.chance.expovariate(1 / mean))

    # ---- rows

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        while not self.slots.exhausted:
            room = await self.slots.wait_for_room()
            first = self.slots.admitted
            window = self.windows.of_prompt(first)
            count = self.chance.randint(1, min(room, self.windows.prompts_of(window).stop - first))
            self.slots.charge(count)
            tasks.create_task(self.produce(window, [prompt.key for prompt in self.cursor.take(count)]))

    def progress(self, window: int) -> WindowProgress:
        return self.progresses.setdefault(window, WindowProgress(len(self.windows.prompts_of(window))))

    async def produce(self, window: int, prompts: list[str]) -> None:
        keys = [f"{prompt}_{session}_0" for prompt in prompts for session in range(self.plan.sessions)]
        step = self.windows.first_step(window)
        for key in keys:
            self.finished[key] = asyncio.Event()
        new = await self.plane.issue(
            TRAIN, keys, step=step, group=self.plan.policy, reserved=True,
            tags={key: {"step": step, "admitted": self.number} for key in keys},
        )  # fmt: skip
        for key in new:
            self.did(key)
        held = await self.plane.list(TRAIN)
        waiting = [key for key in keys if key in held]
        if self.plan.workers:
            # Of rows that an earlier launch issued, workers may make those alone that have their slots again.
            await self.plane.put_tags(TRAIN, {key: {"admitted": self.number} for key in waiting})
            for key in waiting:
                if held[key].status is RowStatus.FINISHED:
                    self.finished[key].set()
            await asyncio.gather(*(self.finished[key].wait() for key in waiting))
        else:
            await asyncio.gather(*(self.make(key, set(held[key].columns)) for key in waiting))
        for key in keys:
            del self.finished[key]
        self.progress(window).finish(len(prompts))

    async def make(self, key: str, columns: set[str]) -> None:
        try:
            if "tokens" not in columns:
                version = self.version
                await self.pause(2.0)
                await self.put(key, None, tokens=value_of(key, "tokens"), version=version)
            await self.pause(1.0)
            if self.is_bad(key):
                await self.make_dead_letter(key)
            elif "score" not in columns:
                await self.put(key, None, score=value_of(key, "score"))
        except LeaseLost:
            pass  # its group was dropped

    async def put(self, key: str, lease: Lease | None, **columns: int) -> None:
        self.run.operations += 1
        await self.plane.put(TRAIN, {key: columns}, lease=lease)
        self.did(key, *columns)

    def is_bad(self, key: str) -> bool:
        odd = int(split_key(key)[0][-7:]) % 2
        return bool(odd) and zlib.crc32(f"{self.run.seed} {key}".encode()) % 1000 < 1000 * self.plan.bad

    async def make_dead_letter(self, key: str) -> None:
        self.run.operations += 1
        group = {key}
        if self.plan.policy is GroupPolicy.DROP_GROUP:
            group |= {other for other in self.run.acknowledged if split_key(other)[0] == split_key(key)[0]}
        self.run.leaving |= group
        await self.plane.dead_letter(TRAIN, key, f"row {key} is too long")
        for other in group:
            if other in self.finished:
                self.finished[other].set()

    async def work(self) -> None:
        """A worker in another process: it makes rows under leases, and may stall for longer than they last."""
        while True:
            lease = await self.plane.claim(
                TRAIN, self.chance.randint(self.plan.sessions, 5), at_least=1, status=RowStatus.PENDING,
                order=self.chance.choice(list(Order)), lease_seconds=LEASE_SECONDS, where={"admitted": self.number},
            )  # fmt: skip
            self.run.operations += 1
            version = self.version
            await self.pause(12.0 if self.chance.random() < 0.1 else 1.0)
            if self.chance.random() < 0.05:
                continue  # died; its rows go back when the lease ends
            for key in lease.meta.keys:
                try:
                    if self.is_bad(key):
                        await self.make_dead_letter(key)
                        continue
                    cells = {name: value_of(key, name) for name in FIELDS}
                    await self.put(key, lease, **cells, version=version)
                except LeaseLost:
                    continue
                if key in self.finished:
                    self.finished[key].set()

    # ---- steps

    async def train(self) -> None:
        step = self.step + 1
        window = self.windows.of_step(step)
        first = self.windows.first_step(window)
        await self.progress(window).complete.wait()
        await self.learn(await self.claim(step, window, first), step)
        self.step = step
        if step == self.windows.last_step(window):
            del self.progresses[window]
            await self.pause(0.3)
            self.version = step
            self.cursor.window_trained()
            self.slots.publish()
        oldest = max(self.windows.age(row["oldest"], step) for row in self.run.kept if row["step"] == step)
        self.run.metrics.append({"step": step, "actor/loss": 0.0, "async/staleness/max": oldest})
        if step % self.plan.checkpoint_every == 0 or step == self.windows.steps:
            await self.save(step)

    async def claim(self, step: int, window: int, first: int) -> Lease:
        """All rows of the window that are left, or an even share of its groups."""
        mine, last = {"step": first}, self.windows.last_step(window)
        self.run.operations += 1
        if step == last:
            ready = (await self.plane.depth(TRAIN, fields=FIELDS, where=mine)).ready
            return await self.plane.claim(
                TRAIN, ready, fields=FIELDS, where=mine, order=Order.KEY, timeout=60, lease_seconds=None
            )
        rows = await self.plane.list(TRAIN)
        units = {split_key(key)[0] if row.group else key for key, row in rows.items() if row.step == first}
        return await self.plane.claim(
            TRAIN, -(-len(units) // (last - step + 1)), fields=FIELDS, where=mine, order=Order.ARRIVAL,
            count=Count.GROUPS, timeout=60, lease_seconds=None,
        )  # fmt: skip

    async def learn(self, lease: Lease, step: int) -> None:
        keys = lease.meta.keys
        columns = await self.plane.get(lease.meta, (*FIELDS, "version"))
        for place, key in enumerate(keys):
            for name in FIELDS:
                if columns[name][place] != value_of(key, name):
                    self.run.problems.append(f"row {key} has another row's {name}")
            oldest = int(columns["version"][place])
            self.run.kept.append({"step": step, "key": key, "oldest": oldest, "newest": oldest})
        self.trained.update(keys)
        await self.pause(1.0)
        self.run.leaving.update(keys)
        self.run.operations += 1
        await self.plane.ack(lease, step)
        for key in keys:
            self.run.acknowledged.pop(key, None)

    async def save(self, step: int) -> None:
        cursor = self.cursor.state()
        trained = Counter(self.trained)
        promised = {
            key: columns for key, columns in self.run.acknowledged.items() if key not in self.run.leaving
        }
        await self.plane.sync()
        self.run.flushed = promised
        await self.pause(0.5)
        self.run.checkpoint = Checkpoint(step, cursor, trained)
        await self.plane.settle(step)


def _leaves(error: BaseException | None) -> list[BaseException | None]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]


def value_of(key: str, name: str) -> int:
    """The cell that belongs to this row and column."""
    return zlib.crc32(f"{key} {name}".encode())


def judge(seed: int, folder: Path) -> tuple[list[str], int]:
    """The problems of this seed's run, and its number of operations."""
    run = SimulatedRun(seed, folder)
    found = run.carry_out()
    undisturbed = SimulatedRun(seed, folder, disturbed=False)
    expected = undisturbed.carry_out()
    windows = run.plan.windows
    rows_vary = run.plan.policy is GroupPolicy.DROP_GROUP or windows.sync_every > 1
    promise = Promise(windows.steps, False, not rows_vary, windows.oldest)
    problems = [*undisturbed.problems, *run.problems]
    if not problems:
        problems += violations(found, expected, promise)
        problems += _weights(run, found.events)
    return problems, run.operations + undisturbed.operations


def _weights(run: SimulatedRun, events: Any) -> list[str]:
    counts: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Event) and event.kind == "trained":
            counts[event.key] += event.sign
    seen = run.checkpoint.trained
    return [
        f"the weights have seen row {key} {seen[key]} times, the journal says {counts[key]}"
        for key in seen.keys() | counts.keys()
        if seen[key] != counts[key]
    ][:3]
