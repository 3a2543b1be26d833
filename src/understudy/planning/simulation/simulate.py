"""Simulates a run from phase times, a length distribution and a split; gives rows/s and idle shares.

    admit ──> [rollout engines] ──> [host] ──> [teacher replicas] ──> window complete? ──> [trainer] ──> publish
      ▲        rows share a step      one row     one row each, in                          update(s)       │
      └────────────────────────────── a whole window's slots are free again ────────────────────────────────┘

It is a discrete-event simulation of the schedule in `windows.py`: prompt i may be admitted after publish k
when i < k·R + C. Sync is the same schedule with C = R and one update per publish. Between two events every
row advances by one token per decode step of its engine, and time jumps from event to event. No torch, no
clock, all randomness from a seed: the same inputs give the same results.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from understudy.errors import ConfigError
from understudy.planning.simulation.inputs import Costs, Prediction, SimulatedBatching, Split, Work
from understudy.planning.windows import Windows


@dataclass(slots=True)
class _Engine:
    number: int
    clock: float = 0.0
    """Decode steps since the start."""
    stall: float = 0.0
    """Seconds of prefill still to be done."""
    at: float = 0.0
    """The side's time at which clock and stall were last updated."""
    rows: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (clock at which the row ends, row)."""
    ended: list[int] = field(default_factory=list)
    """With composed batches: ended rows that wait for the batch's last one."""
    cached: float = 0.0
    """Tokens of its rows in the key-value cache, prompts included, at `clock`."""
    active: bool = False
    life: int = 0
    """Counts changes; events planned before the last change are stale."""


@dataclass(slots=True)
class _Side:
    """One side (rollout, host, teacher, trainer), with its own time, which runs slower while devices are
    shared."""

    events: list[tuple[float, int, Callable[[], None]]]
    """Heap by the side's own time. Without shared devices all sides use one time and one heap."""
    active: int = 0
    busy: float = 0.0
    """Unit-seconds of work until `counted`."""
    counted: float = 0.0
    speed: float = 1.0
    own: float = 0.0
    """The side's time at `since`."""
    since: float = 0.0

    def now(self, time: float) -> float:
        return self.own + (time - self.since) * self.speed

    def set_speed(self, time: float, speed: float) -> None:
        if speed != self.speed:
            self.own, self.since, self.speed = self.now(time), time, speed

    def busy_until(self, time: float) -> float:
        return self.busy + (time - self.counted) * self.active

    def set_active(self, time: float, active: int) -> None:
        self.busy, self.counted, self.active = self.busy_until(time), time, active


class _Simulation:
    """The state of one simulation; the methods are the events."""

    def __init__(
        self, costs: Costs, work: Work, windows: Windows, split: Split, *, partial_rollouts: bool, seed: int
    ) -> None:
        self.costs, self.work, self.windows, self.split = costs, work, windows, split
        self.partial_rollouts = partial_rollouts
        rows = windows.prompts * work.n
        self.chance = np.random.default_rng([seed, 1])
        # Even a few rows cover the whole distribution, in a seeded order.
        spread = np.random.default_rng(seed).permutation(rows) * len(work.lengths) // rows
        self.lengths = np.asarray(work.lengths)[spread]
        self.step_seconds = [costs.decode(rows) for rows in range(work.max_batch + 1)]
        self.engines = [_Engine(i) for i in range(split.engines)]
        one_heap: list[tuple[float, int, Callable[[], None]]] = []
        self.sides = tuple(_Side([] if split.capacity is not None else one_heap) for _ in range(4))
        self.rollout, self.host, self.teacher, self.trainer = self.sides
        self.queue: deque[int] = deque()
        self.to_score: deque[int] = deque()
        self.to_handle: deque[int] = deque()
        self.unfinished_sessions = np.full(windows.prompts, work.n)
        self.ready_tokens: list[deque[int]] = [deque() for _ in range(windows.count)]
        """By window: the tokens of each prompt that is scored and not yet trained."""
        self.admitted = self.published = self.steps = self.running = 0
        self.draining = self.training = False
        self.time = self.rows_seconds = self.rows_counted = 0.0
        self.marks: list[tuple[float, ...]] = []
        """At every publish: the time, each side's busy seconds, and the row-seconds."""
        self.order = 0

    # --- time

    def run(self) -> None:
        self.admit()
        while self.published < self.windows.count:
            side = self.trainer if self.split.capacity is None else self.next_side()
            moment, _, action = heapq.heappop(side.events)
            self.time = max(self.time, side.since + (moment - side.own) / side.speed)
            action()

    def next_side(self) -> _Side:
        """With shared devices: sets each side's speed and returns the side with the next event."""
        assert self.split.capacity is not None
        shared = [side for side in (self.rollout, self.teacher, self.trainer) if side.active]
        for side in shared:
            side.set_speed(self.time, min(1.0, self.split.capacity / len(shared)))
        waiting = [side for side in self.sides if side.events]
        return min(waiting, key=lambda side: (side.events[0][0] - side.now(self.time)) / side.speed)

    def later(self, side: _Side, delay: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(side.events, (side.now(self.time) + delay, self.order, action))

    def now_running(self, rows: int) -> None:
        self.rows_seconds += (self.time - self.rows_counted) * self.running
        self.rows_counted, self.running = self.time, rows

    # --- rollout

    def admit(self) -> None:
        limit = self.windows.admissible(self.published, self.windows.slots)
        self.queue.extend(range(self.admitted * self.work.n, limit * self.work.n))
        self.admitted = limit
        self.fill(self.engines)

    def fill(self, engines: Sequence[_Engine]) -> None:
        """Assigns waiting rows to free places of these engines, the emptiest engine first."""
        open_to = [(len(e.rows), e.number) for e in engines if self.takes_rows(e)]
        heapq.heapify(open_to)
        filled, before = set(), len(self.queue)
        while self.queue and open_to:
            count, number = heapq.heappop(open_to)
            engine = self.engines[number]
            if number not in filled:
                filled.add(number)
                self.catch_up(engine)
                engine.stall += self.costs.prefill_pass
            row = self.queue.popleft()
            heapq.heappush(engine.rows, (engine.clock + float(self.lengths[row]), row))
            engine.cached += self.work.prompt_tokens
            engine.stall += self.costs.prefill_token * self.work.prompt_tokens
            if count + 1 < self.work.max_batch:
                heapq.heappush(open_to, (count + 1, number))
        self.now_running(self.running + before - len(self.queue))
        for number in sorted(filled):
            self.plan_next_end(self.engines[number])

    def takes_rows(self, engine: _Engine) -> bool:
        if self.work.batching is SimulatedBatching.COMPOSED:
            return not engine.rows and not engine.ended
        return len(engine.rows) < self.work.max_batch

    def catch_up(self, engine: _Engine) -> None:
        """Advances an engine's clock to the side's time."""
        now = self.rollout.now(self.time)
        seconds, engine.at = now - engine.at, now
        stalled = min(engine.stall, seconds)
        engine.stall -= stalled
        if engine.rows:
            steps = self.steps_within(engine, seconds - stalled)
            engine.clock += steps
            engine.cached += steps * len(engine.rows)

    def seconds_of(self, engine: _Engine, steps: float) -> float:
        """Seconds of the engine's next decode steps. Every step adds a token of each row to the cache."""
        rows, per_token = len(engine.rows), self.costs.decode_cached
        return steps * (self.step_seconds[rows] + per_token * (engine.cached + rows * steps / 2))

    def steps_within(self, engine: _Engine, seconds: float) -> float:
        """The inverse of `seconds_of`."""
        rows, per_token = len(engine.rows), self.costs.decode_cached
        first = self.step_seconds[rows] + per_token * engine.cached
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * per_token * rows * seconds))

    def plan_next_end(self, engine: _Engine) -> None:
        engine.life += 1
        if bool(engine.rows) != engine.active:
            engine.active = not engine.active
            self.rollout.set_active(self.time, self.rollout.active + (1 if engine.active else -1))
        if not engine.rows:
            return
        life, left = engine.life, max(0.0, engine.rows[0][0] - engine.clock)
        delay = engine.stall + self.seconds_of(engine, left)
        self.later(self.rollout, delay, lambda: self.row_ends(engine, life))

    def row_ends(self, engine: _Engine, life: int) -> None:
        if engine.life != life:
            return
        self.catch_up(engine)
        engine.clock = max(engine.clock, engine.rows[0][0])
        before = len(engine.rows)
        while engine.rows and engine.rows[0][0] <= engine.clock + 1e-9:
            row = heapq.heappop(engine.rows)[1]
            engine.cached -= self.work.prompt_tokens + float(self.lengths[row])
            engine.ended.append(row)
        self.now_running(self.running + len(engine.rows) - before)
        if self.work.batching is SimulatedBatching.CONTINUOUS or not engine.rows:
            ended, engine.ended = engine.ended, []
            self.to_handle.extend(ended)
            self.handle()
        self.plan_next_end(engine)
        self.fill([engine])  # rows wait only while all other engines are full
        self.publish_if_drained()

    # --- host and teachers

    def handle(self) -> None:
        if self.host.active or not self.to_handle:
            return
        self.host.set_active(self.time, 1)
        row = self.to_handle.popleft()
        self.later(self.host, self.costs.host_row, lambda: self.handled(row))

    def handled(self, row: int) -> None:
        self.host.set_active(self.time, 0)
        self.to_score.append(row)
        self.score()
        self.handle()

    def score(self) -> None:
        while self.to_score and self.teacher.active < max(self.split.replicas, 1):
            row = self.to_score.popleft()
            self.teacher.set_active(self.time, self.teacher.active + 1)
            tokens = self.work.prompt_tokens + int(self.lengths[row])
            seconds = self.costs.score_row + self.costs.score_token * tokens
            self.later(self.teacher, seconds if self.split.replicas else 0.0, partial(self.scored, row))

    def scored(self, row: int) -> None:
        self.teacher.set_active(self.time, self.teacher.active - 1)
        prompt = row // self.work.n
        self.unfinished_sessions[prompt] -= 1
        if self.unfinished_sessions[prompt] == 0:
            first = prompt * self.work.n
            tokens = (
                int(self.lengths[first : first + self.work.n].sum()) + self.work.n * self.work.prompt_tokens
            )
            self.ready_tokens[self.windows.of_prompt(prompt)].append(tokens)
            self.train()
        self.score()

    # --- trainer

    def train(self) -> None:
        """Starts the next update once its rows are there: a batch in order of arrival; the window's last
        takes the rest."""
        if self.training or self.steps == self.windows.steps:
            return
        window = self.windows.of_step(self.steps + 1)
        waiting = self.ready_tokens[window]
        done = (self.steps + 1 - self.windows.first_step(window)) * self.windows.batch_size
        last = self.steps + 1 == self.windows.last_step(window)
        wanted = len(self.windows.prompts_of(window)) - done if last else self.windows.batch_size
        if len(waiting) < wanted:
            return
        tokens = sum(waiting.popleft() for _ in range(wanted))
        self.training = True
        self.trainer.set_active(self.time, 1)
        token = self.costs.update_token - (0.0 if self.windows.oldest else self.costs.ahead_token)
        seconds = self.costs.update_fixed + token * tokens / self.split.trainer
        self.later(self.trainer, seconds * self.unevenness(), lambda: self.updated(last))

    def unevenness(self) -> float:
        """A seeded log-normal factor with mean 1; exactly 1 if `update_spread` is 0."""
        if not self.costs.update_spread:
            return 1.0
        variance = math.log(1 + self.costs.update_spread**2)
        return float(self.chance.lognormal(-variance / 2, math.sqrt(variance)))

    def updated(self, last: bool) -> None:
        self.steps += 1
        if not last:
            self.training = False
            self.trainer.set_active(self.time, 0)
            self.train()
        elif self.partial_rollouts:
            self.later(self.trainer, self.costs.publish, self.publish)
        else:
            self.draining = True
            self.trainer.set_active(self.time, 0)
            self.publish_if_drained()

    def publish_if_drained(self) -> None:
        """With `partial_rollouts = false`, publishes once every admitted row is written."""
        if self.draining and not self.running and not self.queue and not self.trainer.active:
            self.trainer.set_active(self.time, 1)
            self.later(self.trainer, self.costs.publish, self.publish)

    def publish(self) -> None:
        """Publishes a window's weights. Rows in flight continue with them, with `recompute_kv` after a prefill of
        their tokens so far."""
        self.published += 1
        self.training = self.draining = False
        self.trainer.set_active(self.time, 0)
        self.now_running(self.running)
        busy = (side.busy_until(self.time) for side in (self.trainer, self.rollout, self.teacher))
        self.marks.append((self.time, *busy, self.rows_seconds))
        if self.work.recompute_kv and self.costs.prefill_token:
            for engine in self.engines:
                if engine.rows:
                    self.catch_up(engine)
                    engine.stall += self.costs.prefill_token * engine.cached
                    self.plan_next_end(engine)
        self.admit()
        self.train()


def simulate(
    costs: Costs, work: Work, windows: Windows, split: Split, *, partial_rollouts: bool = True, seed: int = 0
) -> Prediction:
    """The steady state of a run with this schedule and split.

    Measured between two publishes: after the first ones, which start with empty queues and every slot free, and
    before the last ones, when no prompt is left to admit.
    """
    first, last = 2 + 4 * windows.oldest, windows.count - 1 - windows.oldest
    if min(split.engines, split.trainer) < 1 or split.replicas < 0:
        raise ConfigError(f"a split needs at least one engine and one trainer device: {split}")
    if last <= first:
        raise ConfigError(
            f"{windows.count} publishes are too few to measure between; simulate at least {4 + 5 * windows.oldest} windows"
        )
    run = _Simulation(costs, work, windows, split, partial_rollouts=partial_rollouts, seed=seed)
    run.run()
    seconds, trainer, rollout, teacher, rows = np.subtract(run.marks[last], run.marks[first]).tolist()
    publishes = last - first
    trained = publishes * windows.size * work.n
    return Prediction(
        rows_per_second=trained / seconds,
        step_seconds=seconds / (publishes * windows.sync_every),
        trainer_idle=1 - trainer / seconds,
        rollout_idle=1 - rollout / (seconds * split.engines),
        teacher_idle=1 - teacher / (seconds * split.replicas) if split.replicas else 0.0,
        occupancy=rows / (seconds * split.engines * work.max_batch),
    )
