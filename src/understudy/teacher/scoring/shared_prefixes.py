"""Groups sequences with a common prefix, so that the model reads the prefix once.

The n samples of one prompt share the prompt, and the turns of one conversation share the earlier turns. A
group's tokens go through the model as one prefix and one tail per member; only attention reads the prefix's
keys again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LARGEST_GROUP = 64
"""Sequences. Bounds the search; a larger group reads its prefix once per 64 sequences."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences with a common prefix."""

    rows: tuple[int, ...]
    shared: int
    """Length of the common prefix, read once; 0 for a single sequence."""

    def tokens(self, lengths: np.ndarray) -> int:
        """How many tokens go through the model for this group."""
        return self.shared + sum(int(lengths[row]) - self.shared for row in self.rows)


def prefix_groups(sequences: Sequence[np.ndarray]) -> list[PrefixGroup]:
    """Group sequences by common prefix so that few tokens are left to read; every sequence appears once.

    Sorted by content, sequences with a common prefix are neighbours. A run of neighbours shares the shortest
    of the prefixes that adjacent ones share. Dynamic programming finds the best way to cut the sorted order
    into runs.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i4").tobytes())
    common = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    if not any(common):
        return [PrefixGroup((i,), 0) for i in range(len(sequences))]
    found = [
        PrefixGroup(tuple(sorted(order[start:end])), shared) for start, end, shared in _best_runs(common)
    ]
    return sorted(found, key=lambda group: group.rows[0])


def _best_runs(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, end, shared) of the runs that save most: a run of m sequences saves (m − 1) × shared tokens."""
    best = [0]
    run_of = [(0, 0, 0)]
    for end in range(1, len(common) + 2):
        saved, run = best[end - 1], (end - 1, end, 0)
        shared = None
        for start in range(end - 2, max(-1, end - 1 - LARGEST_GROUP), -1):
            shared = common[start] if shared is None else min(shared, common[start])
            if not shared:
                break
            if best[start] + (end - start - 1) * shared > saved:
                saved, run = best[start] + (end - start - 1) * shared, (start, end, shared)
        best.append(saved)
        run_of.append(run)
    runs = []
    end = len(common) + 1
    while end:
        runs.append(run_of[end])
        end = run_of[end][0]
    return runs[::-1]


def _group(members: list[int], shared: int) -> PrefixGroup:
    return PrefixGroup(tuple(sorted(members)), shared if len(members) > 1 else 0)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def saved_tokens(found: Sequence[PrefixGroup]) -> int:
    return sum((len(group.rows) - 1) * group.shared for group in found)


def split_to_budget(
    found: Sequence[PrefixGroup], lengths: np.ndarray, budget: int
) -> list[list[PrefixGroup]]:
    """Micro-batches of groups, in order, each of at most `budget` tokens.

    A group that is too large is cut into several, each with the prefix again. A single sequence that is too
    long is a micro-batch of its own.
    """
    batches: list[list[PrefixGroup]] = []
    used = budget
    for group in found:
        for part in _cut(group, lengths, budget):
            size = part.tokens(lengths)
            if used + size > budget or not batches:
                batches.append([])
                used = 0
            batches[-1].append(part)
            used += size
    return batches


def _cut(group: PrefixGroup, lengths: np.ndarray, budget: int) -> list[PrefixGroup]:
    if len(group.rows) == 1 or group.tokens(lengths) <= budget:
        return [group]
    parts: list[list[int]] = [[]]
    used = group.shared
    for row in group.rows:
        own = int(lengths[row]) - group.shared
        if parts[-1] and used + own > budget:
            parts.append([])
            used = group.shared
        parts[-1].append(row)
        used += own
    return [_group(part, group.shared) for part in parts]
