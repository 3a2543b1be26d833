"""Which sequences go through the model together.

Plans depend on the lengths alone, so the same request is always cut the same way: floating-point results follow
batch composition, and a score must not change with what else happens to be waiting.

Legend: B sequences of a micro-batch, L its longest, N sequences of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def padded_plan(token_counts: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches for right-padded forwards: near lengths together, count × longest ≤ budget.

    A sequence longer than the budget goes alone; the server's length limit is what refuses a sequence.
    """
    order = sorted(range(len(token_counts)), key=lambda i: (token_counts[i], i))
    plan: list[list[int]] = []
    for i in order:
        # Lengths rise along `order`, so the newcomer is the longest of its micro-batch.
        if plan and (len(plan[-1]) + 1) * token_counts[i] <= budget:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def packed_plan(token_counts: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches for packed forwards, in request order: the sum of lengths ≤ budget."""
    plan: list[list[int]] = []
    used = 0
    for i, count in enumerate(token_counts):
        if plan and used + count <= budget:
            plan[-1].append(i)
            used += count
        else:
            plan.append([i])
            used = count
    return plan


def pad_right(
    tokens_T: np.ndarray, starts_N: np.ndarray, counts_N: np.ndarray, rows: Sequence[int]
) -> np.ndarray:
    """int64 [B, L], zeros to the right. Causal attention never looks right, so no mask is needed."""
    starts_B, counts_B = starts_N[rows], counts_N[rows].astype(np.int64)
    longest = int(counts_B.max())
    columns_L = np.arange(longest)
    inside_BL = columns_L < counts_B[:, None]
    padded_BL = np.zeros((len(rows), longest), dtype=np.int64)
    padded_BL[inside_BL] = tokens_T[(starts_B[:, None] + columns_L)[inside_BL]]
    return padded_BL


def ragged_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: start, start+1, … (count of them) for each pair, one after another."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts.astype(np.int64) - (ends - counts), counts)
