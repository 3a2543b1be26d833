"""Runs micro-batches in parallel on threads, for a small student on a CPU.

The operations of a small model are too short to be split over torch's threads: each thread would wait for
its peers hundreds of times a pass, and for a whole time slice if another process has the core. Micro-batches
do not depend on each other, and torch releases the GIL while it computes. Each lane runs one micro-batch
with one torch thread. The caller adds up the results in the order of the plan, so they do not depend on
which lane is faster, nor on the number of lanes that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

TOKENS_WORTH_A_LANE = 512
"""Below this, the fixed cost of a pass outweighs the work in it."""
_TRIES = 8
"""How many numbers of micro-batches are tried; rows of very different lengths may fit none of them."""


class CpuLanes:
    """Threads that run micro-batches in parallel; called on the update's or the head start's thread."""

    def __init__(self, count: int = 1) -> None:
        """`count` = 1 runs everything on the caller's own thread."""
        self.count = count
        self._threads: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Results in the order of `items`. No lane is still running when it returns or raises."""
        if self.count == 1 or len(items) < 2:
            return [work(item) for item in items]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="lane")
        futures = [self._threads.submit(work, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]


def balanced(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Cuts `rows`, in their order, into at most `parts` runs of about equal token counts."""
    total, seen = sum(lengths[row] for row in rows), 0
    runs: list[list[int]] = [[] for _ in range(parts)]
    for row in rows:
        # Assigned by the middle of the row, so no part is off by a whole row.
        runs[min((2 * seen + lengths[row]) * parts // (2 * total), parts - 1)].append(row)
        seen += lengths[row]
    return [run for run in runs if run]


def spread(
    groups: list[list[int]],
    lengths: Sequence[int],
    lanes: int,
    fits: Callable[[list[int], int], bool],
) -> list[list[int]]:
    """Re-cuts micro-batches so that up to `lanes` of them run at a time with about equal work, and together
    hold no more tokens than one did before. Returns `groups` unchanged if there are too few tokens. Depends
    only on the rows and the number of lanes.

    `fits(rows, share)`: whether these rows fit one micro-batch of 1/`share` of the token budget.
    """
    rows = [row for group in groups for row in group]
    lanes = min(lanes, sum(lengths[row] for row in rows) // TOKENS_WORTH_A_LANE)
    if lanes < 2:
        return groups
    for parts in islice(range(len(groups) * lanes, len(rows) + 1, lanes), _TRIES):
        cut = balanced(rows, lengths, parts)
        if all(fits(part, lanes) for part in cut):
            return cut
    return groups
