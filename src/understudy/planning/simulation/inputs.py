"""Inputs and result of the simulation: phase times, work, a split of devices, a prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from understudy.planning.windows import Windows


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decode step by its number of rows: linear between measured points."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        last = len(self.rows) - 1
        if last > 0 and rows > self.rows[last]:  # beyond the last point, extrapolate the last line
            slope = (self.seconds[last] - self.seconds[last - 1]) / (self.rows[last] - self.rows[last - 1])
            # Measured points may decrease by chance; an extrapolated decrease would reach negative times.
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
    decode_cached: float = 0.0
    """Seconds that each token in an engine's key-value cache adds to a decode step. When set, `decode` is the
    step without reading the cache."""
    prefill_pass: float = 0.0
    """Seconds of a pass over the prompts of rows that enter an engine together, besides those of their tokens."""
    prefill_token: float = 0.0
    """Seconds per prompt token on one engine, during which its other rows wait. A publish costs rows in
    flight the same."""
    host_row: float = 0.0
    """Seconds per row in the single host process: template, reward, journal."""
    score_row: float = 0.0
    score_token: float = 0.0
    """Seconds of one teacher replica per token of prompt and response."""
    update_fixed: float = 0.0
    """Seconds of an update that do not shrink with more devices: optimizer, claim, synchronisation."""
    update_token: float = 0.0
    """Seconds of one trainer device per token; several devices divide the tokens."""
    ahead_token: float = 0.0
    """The part of `update_token` that overlaps with scoring when rows are written only between updates."""
    update_spread: float = 0.0
    """Standard deviation of update times relative to their mean. With uneven times, queues run empty at
    times."""
    publish: float = 0.0


class SimulatedBatching(StrEnum):
    COMPOSED = "composed"
    """An empty engine takes a batch, and returns it when the batch's last row has ended."""
    CONTINUOUS = "continuous"
    """A row enters when a place is free, and is returned when it has ended."""


@dataclass(frozen=True, slots=True)
class Work:
    """The workload, independent of the split of devices."""

    lengths: tuple[int, ...]
    """The distribution of new tokens per row; sampled in a seeded order."""
    prompt_tokens: int = 0
    n: int = 1
    """Sessions per prompt."""
    max_batch: int = 128
    """Maximum rows in one engine."""
    batching: SimulatedBatching = SimulatedBatching.CONTINUOUS
    recompute_kv: bool = True
    """Whether a publish makes the engines compute the keys and values of rows under way again."""


@dataclass(frozen=True, slots=True)
class Split:
    """A split of devices. Engines and replicas are units (of one or more devices); the trainer is counted in
    devices."""

    engines: int
    trainer: int
    replicas: int
    capacity: float | None = None
    """How many sides can run at full speed at once if all share the same devices: 1 on a single GPU. None: no
    sharing."""

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


def enough_steps(max_staleness: float, sync_every: int = 1) -> int:
    """Updates to simulate: rows that wait in queues at the first publish that counts, up to `max_staleness` windows
    of them, must matter little beside those trained until the last."""
    return (16 + 10 * math.ceil(max_staleness)) * sync_every


def sync_windows(batch_size: int, steps: int) -> Windows:
    """The sync schedule: no prompt is admitted before the publish it is trained under."""
    return Windows(batch_size, 1, 0.0, steps)


def quantile_lengths(quantiles: Sequence[float], count: int = 1024) -> tuple[int, ...]:
    """Lengths interpolated between quantiles at even steps (0 … 1), as a distribution to sample from."""
    at = (np.arange(count) + 0.5) / count
    found = np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles)
    return tuple(max(1, round(float(length))) for length in found)
