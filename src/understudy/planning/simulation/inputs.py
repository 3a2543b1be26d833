"""What a simulated run is made of: phase times, work, a split of devices; and what is said about it in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from understudy.planning.windows import Windows


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decode step by the number of rows in it: straight lines between measured points."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        last = len(self.rows) - 1
        if last > 0 and rows > self.rows[last]:  # beyond the last point, on along the last line
            slope = (self.seconds[last] - self.seconds[last - 1]) / (self.rows[last] - self.rows[last - 1])
            # Measured points may fall by chance; a step that went on falling would end before it began.
            return self.seconds[last] + max(0.0, slope) * (rows - self.rows[last])
        return float(np.interp(rows, self.rows, self.seconds))

    @staticmethod
    def affine(base: float, per_row: float = 0.0) -> StepTime:
        return StepTime((0.0, 1.0), (base, base + per_row))


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured phase times, each of one unit: one rollout engine, one teacher replica, one trainer device."""

    decode: StepTime
    """Of one engine."""
    prefill_token: float = 0.0
    """Seconds per prompt token on one engine; other rows of the engine wait. Also what a publish costs rows in flight."""
    host_row: float = 0.0
    """Seconds of the one host process per row: template, reward, journal."""
    score_row: float = 0.0
    score_token: float = 0.0
    """Of one teacher replica, per token of prompt and response."""
    update_fixed: float = 0.0
    """Seconds of an update that no number of devices shortens: optimizer, claim, synchronisation."""
    update_token: float = 0.0
    """Of one trainer device; several divide the tokens."""
    ahead_token: float = 0.0
    """The part of it that is made while teachers score, where rows are written only between updates."""
    update_spread: float = 0.0
    """Standard deviation of update times, as a share of their mean: between two uneven sides a queue runs empty at times."""
    publish: float = 0.0


class Batching(StrEnum):
    COMPOSED = "composed"
    """An engine takes a batch when it is empty, and answers when the batch's last row has ended."""
    CONTINUOUS = "continuous"
    """A row enters when a place is free, and is answered when it has ended."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done, whoever does it."""

    lengths: tuple[int, ...]
    """New tokens of rows; drawn from again and again in a seeded order."""
    prompt_tokens: int = 0
    n: int = 1
    """Sessions per prompt."""
    max_batch: int = 128
    """Rows of one engine."""
    batching: Batching = Batching.CONTINUOUS


@dataclass(frozen=True, slots=True)
class Split:
    """Who gets what. Engines and replicas are units (of one or more devices); the trainer is counted in devices."""

    engines: int
    trainer: int
    replicas: int
    capacity: float | None = None
    """Sides that can be at full speed at once where all share the same devices: 1 on a single GPU. None: nobody shares."""

    def __str__(self) -> str:
        return f"{self.engines} engines, {self.trainer} trainer devices, {self.replicas} teacher replicas"


@dataclass(frozen=True, slots=True)
class Prediction:
    rows_per_second: float
    step_seconds: float
    trainer_idle: float
    rollout_idle: float
    """Share of the engines' time with no row in them."""
    teacher_idle: float
    occupancy: float
    """Mean rows in an engine, as a share of `max_batch`."""


def sync_windows(batch_size: int, steps: int) -> Windows:
    """The sync schedule: nothing is admitted ahead."""
    return Windows(batch_size, 1, 0.0, steps)


def quantile_lengths(quantiles: Sequence[float], count: int = 1024) -> tuple[int, ...]:
    """Lengths between quantiles given at even steps (0 … 1), as a distribution to draw from."""
    at = (np.arange(count) + 0.5) / count
    found = np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles)
    return tuple(max(1, round(float(length))) for length in found)
