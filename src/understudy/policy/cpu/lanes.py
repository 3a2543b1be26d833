"""Micro-batches side by side: threads for a small student on a CPU.

The operations of a small model are too short to be shared out among threads one by one: each would wait for the others hundreds
of times a pass, and for a whole time slice where something else has the core. Micro-batches need nobody but themselves, and
torch lets Python go while it computes. Each lane takes one with a single thread of torch's; the caller adds up what they bring
in the order of the plan, so that results do not depend on who was quicker, or on whether there were lanes at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

TOKENS_WORTH_A_LANE = 512
"""Below, a micro-batch is mostly what every pass costs however small it is."""
_TRIES = 8
"""Numbers of micro-batches that are tried; rows of very different lengths may fit none of them."""


class Lanes:
    def __init__(self, count: int = 1) -> None:
        """`count` = 1: the caller's own thread."""
        self.count = count
        self._threads: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """In the order of `items`. Whether it returns or raises, nobody is at work any more."""
        if self.count == 1 or len(items) < 2:
            return [work(item) for item in items]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="lane")
        futures = [self._threads.submit(work, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]


def balanced(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """`rows` in their order, cut into at most `parts` runs of about as many tokens each."""
    total, seen = sum(lengths[row] for row in rows), 0
    runs: list[list[int]] = [[] for _ in range(parts)]
    for row in rows:
        # By the middle of the row, so that none of the parts is a whole row off.
        runs[min((2 * seen + lengths[row]) * parts // (2 * total), parts - 1)].append(row)
        seen += lengths[row]
    return [run for run in runs if run]


def spread(
    groups: list[list[int]],
    lengths: Sequence[int],
    lanes: int,
    fits: Callable[[list[int], int], bool],
) -> list[list[int]]:
    """Micro-batches cut anew, so that up to `lanes` of them at a time have about as much to do and together hold no more than one
    did; as they are where there is too little for that. Depends on the rows and the number of lanes alone.

    `fits(rows, share)`: whether they may be a micro-batch that has one `share`-th of the room.
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
