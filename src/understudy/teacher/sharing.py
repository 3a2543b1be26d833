"""Sequences that begin alike: the shared beginning is read once.

The n samples of one prompt share it, and the turns of one conversation share their past. A family's tokens go
through the model as one prefix and one tail per member; only attention sees the prefix's keys again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Family:
    rows: tuple[int, ...]
    shared: int
    """Tokens all of them begin with, read once; 0 for a sequence on its own."""

    def tokens(self, lengths: np.ndarray) -> int:
        """How many tokens go through the model for this family."""
        return self.shared + sum(int(lengths[row]) - self.shared for row in self.rows)


def families(sequences: Sequence[np.ndarray]) -> list[Family]:
    """Group sequences by their common beginnings so that few tokens are left to read; every sequence appears once.

    Sorted by content, relatives are neighbours. A neighbour joins as long as that does not lower what is saved:
    (members − 1) × shared tokens.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i4").tobytes())
    found: list[Family] = []
    members, shared = [order[0]] if order else [], 0
    for last, row in zip(order, order[1:], strict=False):
        common = common_prefix(sequences[last], sequences[row])
        joint = common if len(members) == 1 else min(shared, common)
        if joint > 0 and len(members) * joint >= (len(members) - 1) * shared:
            members.append(row)
            shared = joint
        else:
            found.append(_family(members, shared))
            members, shared = [row], 0
    if members:
        found.append(_family(members, shared))
    return sorted(found, key=lambda family: family.rows[0])


def _family(members: list[int], shared: int) -> Family:
    return Family(tuple(sorted(members)), shared if len(members) > 1 else 0)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def saved_tokens(found: Sequence[Family]) -> int:
    return sum((len(family.rows) - 1) * family.shared for family in found)


def split_to_budget(found: Sequence[Family], lengths: np.ndarray, budget: int) -> list[list[Family]]:
    """Micro-batches of families, in order, each at most `budget` tokens; a family too large is cut into several,
    each with the prefix again, and a single sequence too long goes alone."""
    batches: list[list[Family]] = []
    used = budget
    for family in found:
        for part in _cut(family, lengths, budget):
            size = part.tokens(lengths)
            if used + size > budget or not batches:
                batches.append([])
                used = 0
            batches[-1].append(part)
            used += size
    return batches


def _cut(family: Family, lengths: np.ndarray, budget: int) -> list[Family]:
    if len(family.rows) == 1 or family.tokens(lengths) <= budget:
        return [family]
    parts: list[list[int]] = [[]]
    used = family.shared
    for row in family.rows:
        own = int(lengths[row]) - family.shared
        if parts[-1] and used + own > budget:
            parts.append([])
            used = family.shared
        parts[-1].append(row)
        used += own
    return [_family(part, family.shared) for part in parts]
