"""Filters over the rewards of a prompt's n sessions, and the penalty for over-long responses.

Pure functions. The data plane calls a `GroupFilter` when a group's last session finishes; the trainer calls
the over-long penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Evicts a whole group when its rule returns a reason.

    The rule gets one value per row, in the order of sessions, from the rows' tag `tag`. It is applied when
    all rows of the group are finished and have the tag. Eviction frees the group's room, so producers that
    wait in `issue` replace what was filtered.
    """

    rule: Callable[[Sequence[float]], str | None]
    tag: str = "reward"


def no_signal(rewards: Sequence[float], tolerance: float = 1e-6) -> str | None:
    """DAPO's dynamic sampling: a group whose rewards are all equal has zero advantage everywhere.

    A group of one session is kept, as are groups with a missing (NaN) reward: whether a NaN is an error is
    decided where the reward is computed.
    """
    if len(rewards) < 2 or any(math.isnan(reward) for reward in rewards):
        return None
    low, high = min(rewards), max(rewards)
    if high - low > tolerance:
        return None
    return f"no signal: all {len(rewards)} rewards are {low:g}"


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft over-long punishment, added to the reward.

    0 up to `max_length − buffer`, then linear down to −1 at `max_length`, −1 beyond it.

    >>> [overlong_penalty(length, 100, 20) for length in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie in 1 … max_length={max_length}")
    over = length - (max_length - buffer)
    return -min(1.0, max(0.0, over / buffer)) + 0.0
