"""Recommends a split of devices among rollout, trainer and teachers, by a search over simulations.

Throughput is close to the smallest of three capacities. The search starts where the capacities balance and
moves devices between two sides, many at a time and then fewer, as long as throughput improves. A large
cluster is searched on a slice: a quarter of the devices with a quarter of each batch behaves alike. The
result is simulated once in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from understudy.errors import ConfigError
from understudy.planning.simulation.inputs import Costs, Prediction, Split, Work
from understudy.planning.simulation.simulate import simulate
from understudy.planning.windows import Windows

_SLICE = 16
"""Approximate number of devices in a slice."""
_ENOUGH = 1.002
"""Smaller gains do not change the split."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The available devices, and how many of them one unit of each side takes."""

    total: int
    per_engine: int = 1
    per_replica: int = 1
    trainer_step: int = 1
    """The trainer takes a multiple of this: the minimum for its model."""

    @property
    def units(self) -> tuple[int, int, int]:
        return self.per_engine, self.trainer_step, self.per_replica


@dataclass(frozen=True, slots=True)
class Choice:
    split: Split
    prediction: Prediction
    devices: int
    """Devices in use; a remainder too small for a unit stays unused."""


def recommend(
    devices: Devices, costs: Costs, work: Work, windows: Windows, *, partial_rollouts: bool = True
) -> Choice:
    """The split with the most rows per second, without shared devices; there may be no teachers."""
    taught = costs.score_row > 0 or costs.score_token > 0
    least = devices.per_engine + devices.trainer_step + (devices.per_replica if taught else 0)
    if devices.total < least:
        raise ConfigError(
            f"{devices.total} devices cannot hold one of each side: an engine takes {devices.per_engine}, the trainer "
            f"{devices.trainer_step}{f', a teacher replica {devices.per_replica}' if taught else ''}"
        )
    slices = max(1, min(devices.total // max(_SLICE, 4 * least), windows.batch_size // 4))
    units = _search(
        replace(devices, total=devices.total // slices),
        replace(costs, host_row=costs.host_row * slices),  # all slices share one host
        work,
        replace(windows, batch_size=windows.batch_size // slices),
        partial_rollouts,
        taught,
    )
    engines, trainer, replicas = (slices * count for count in units)
    used = sum(slices * count * size for count, size in zip(units, devices.units, strict=True))
    spare = (devices.total - used) // devices.per_engine
    split = Split(engines + spare, trainer * devices.trainer_step, replicas)
    prediction = simulate(costs, work, windows, split, partial_rollouts=partial_rollouts)
    return Choice(split, prediction, used + spare * devices.per_engine)


def _search(
    devices: Devices, costs: Costs, work: Work, windows: Windows, partial_rollouts: bool, taught: bool
) -> tuple[int, int, int]:
    tried: dict[tuple[int, int, int], Prediction] = {}

    def rate(units: tuple[int, int, int]) -> float:
        if units not in tried:
            engines, trainer, replicas = units
            split = Split(engines, trainer * devices.trainer_step, replicas)
            tried[units] = simulate(costs, work, windows, split, partial_rollouts=partial_rollouts)
        return tried[units].rows_per_second

    best = _balanced(devices, costs, work, windows, taught)
    for move in _moves(devices.total):
        improved = True
        while improved:
            improved = False
            for giver, taker in permutations(range(3), 2):
                other = _moved(best, giver, taker, move, devices, taught)
                if other is not None and rate(other) > _ENOUGH * rate(best):
                    best, improved = other, True
    return best


def _moves(total: int) -> list[int]:
    """Devices moved at a time: an eighth of all, then halved down to one."""
    moves, size = [], max(1, total // 8)
    while size > 1:
        moves.append(size)
        size //= 2
    return [*moves, 1]


def _balanced(
    devices: Devices, costs: Costs, work: Work, windows: Windows, taught: bool
) -> tuple[int, int, int]:
    """Units in proportion to the device-seconds that a row costs each side."""
    length = float(np.mean(work.lengths))
    tokens = length + work.prompt_tokens
    rows = windows.batch_size * work.n
    cached = work.prompt_tokens + length / 2
    engine = (
        length * (costs.decode(work.max_batch) / work.max_batch + costs.decode_cached * cached)
        + costs.prefill_token * work.prompt_tokens
    )
    need = [
        engine * devices.per_engine,
        costs.update_token * tokens + (costs.update_fixed + costs.publish / windows.sync_every) / rows,
        (costs.score_row + costs.score_token * tokens) * devices.per_replica,
    ]
    counts = [
        max(1, int(devices.total * share / sum(need) / size))
        for share, size in zip(need, devices.units, strict=True)
    ]
    counts[2] = counts[2] if taught else 0
    while (used := sum(c * size for c, size in zip(counts, devices.units, strict=True))) > devices.total:
        richest = max((side for side in range(3) if counts[side] > 1), key=lambda side: counts[side])
        counts[richest] -= 1
    counts[0] += (devices.total - used) // devices.per_engine
    return counts[0], counts[1], counts[2]


def _moved(
    units: tuple[int, int, int], giver: int, taker: int, move: int, devices: Devices, taught: bool
) -> tuple[int, int, int] | None:
    """Moves about `move` devices from one side to another, in whole units, plus any unused ones. None: not
    possible."""
    sizes, counts = devices.units, list(units)
    if taker == 2 and not taught:
        return None
    counts[giver] -= -(-move // sizes[giver])
    if counts[giver] < (1 if giver < 2 or taught else 0):
        return None
    free = devices.total - sum(count * size for count, size in zip(counts, sizes, strict=True))
    gained = free // sizes[taker]
    if gained < 1:
        return None
    counts[taker] += gained
    return counts[0], counts[1], counts[2]
