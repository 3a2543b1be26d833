"""Learning-rate schedules as pure functions of the step, without state to save or restore."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class ScheduleKind(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    """Linear decay to `final_ratio` of the peak."""
    COSINE = "cosine"
    """Cosine decay to `final_ratio` of the peak."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then the decay.

    With warm-up w, total n and peak p, step i (counted from 0) trains with p·(i+1)/w while i < w. The first
    decayed step is i = w with the full peak. The decay would reach `final_ratio`·p at i = n, so the last
    step still learns.

        >>> Schedule(ScheduleKind.LINEAR, peak=1.0, total_steps=4).at(3)
        0.25
    """

    kind: ScheduleKind = ScheduleKind.CONSTANT
    peak: float = 1e-5
    total_steps: int = 1
    warmup_steps: int = 0
    final_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        share = _DECAYS[self.kind](progress)
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * share)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_DECAYS: dict[ScheduleKind, Callable[[float], float]] = {
    ScheduleKind.CONSTANT: _constant,
    ScheduleKind.LINEAR: _linear,
    ScheduleKind.COSINE: _cosine,
}
