"""Idle time of an engine or teacher: the share of time with no call in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.trainers.call_batching import CallQueue
from understudy.trainers.system import Producer


@dataclass(slots=True)
class BusyMeter:
    """Counts calls in flight. Time without any counts as idle."""

    clock: Callable[[], float] = time.monotonic
    _in_flight: int = 0
    _busy: float = 0.0
    _since: float = field(init=False)
    _mark: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self._mark = self.clock()

    def enter(self) -> None:
        if self._in_flight == 0:
            self._since = self.clock()
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._busy += self.clock() - self._since

    def take_idle(self) -> float:
        """Share of the time since the last call in which nothing was in flight."""
        now = self.clock()
        busy = self._busy
        if self._in_flight:
            busy += now - self._since
            self._since = now
        elapsed, self._mark, self._busy = now - self._mark, now, 0.0
        return 1.0 - min(1.0, busy / elapsed) if elapsed > 0 else 0.0


def metered(queue: CallQueue, meter: BusyMeter) -> CallQueue:
    """The same queue, with its calls counted by `meter`."""

    async def run(items: Sequence[Any]) -> Sequence[Any]:
        meter.enter()
        try:
            return await queue.run(items)
        finally:
            meter.leave()

    return replace(queue, run=run)


@dataclass(frozen=True, slots=True)
class ProducerMeters:
    """The meters of a run's engine and of all its teachers together."""

    rollout: BusyMeter = field(default_factory=BusyMeter)
    teacher: BusyMeter = field(default_factory=BusyMeter)

    def watching(self, producer: Producer) -> Producer:
        """The same producer, with its calls to engine and teachers counted."""
        queues = {name: metered(queue, self.teacher) for name, queue in producer.teachers.queues.items()}
        return replace(
            producer,
            engine_queue=metered(producer.engine_queue, self.rollout),
            teachers=replace(producer.teachers, queues=queues),
        )
