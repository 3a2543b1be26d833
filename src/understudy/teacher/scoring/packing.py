"""Lays sequences out for one forward: right-padded rows, or one packed row without padding.

Plans depend on the request alone, so the same request is always cut the same way. Floating-point results
depend on batch composition, and a score must not change with the other requests that are waiting.

Legend: B sequences of a micro-batch, L its longest, T packed tokens, N keys, S segments, P scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from understudy.nn.grouped_attention import in_groups
from understudy.teacher.scoring.shared_prefixes import PrefixGroup


def padded_plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches for right-padded forwards: similar lengths together, count × longest ≤ budget.

    A sequence longer than the budget is a micro-batch of its own; only the server's length limit refuses
    sequences.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    plan: list[list[int]] = []
    for i in order:
        # Lengths rise along `order`, so the new sequence is the longest of its micro-batch.
        if plan and (len(plan[-1]) + 1) * lengths[i] <= budget:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def pad_right(
    tokens_T: np.ndarray, starts_N: np.ndarray, counts_N: np.ndarray, rows: Sequence[int]
) -> np.ndarray:
    """int64 [B, L], zeros to the right. Attention is causal, so padding on the right needs no mask."""
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


def as_slice(places: np.ndarray) -> np.ndarray | slice:
    """Consecutive places as a slice, which copies many times faster; anything else unchanged."""
    if (
        len(places)
        and int(places[-1]) - int(places[0]) + 1 == len(places)
        and bool((np.diff(places) == 1).all())
    ):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed row and the indexes of its segments and sequences.

    Two samples of the prompt [7, 8] and one sequence of its own, with the prefix read once:

        tokens      7 8 | 5 6 | 9 | 4 4 4        segments: prefix, tail of sample 1, tail of sample 2, third
        positions   0 1 | 2 3 | 2 | 0 1 2
        key_places  0 1 | 0 1 2 3 | 0 1 4 | 5 6 7
    """

    tokens_T: np.ndarray
    positions_T: np.ndarray
    ends_q: np.ndarray
    """int32 [S + 1]: where each segment's queries start and end in the packed row."""
    ends_k: np.ndarray
    """int32 [S + 1]: the same for its keys, in `key_places` (or the packed row itself)."""
    key_places_N: np.ndarray | None
    rows: tuple[int, ...]
    """The sequences in the order of their states."""
    tail_starts: np.ndarray
    """int64 [rows]: the packed place of each sequence's token number `shared`."""
    prefix_starts: np.ndarray
    shared: np.ndarray
    groups_G3: np.ndarray | None = None
    """int64 (first token, segments, tokens of each) of neighbouring segments of one length, zeros at the end."""

    @property
    def longest_q(self) -> int:
        return int(np.diff(self.ends_q).max())

    @property
    def longest_k(self) -> int:
        return int(np.diff(self.ends_k).max())

    def places(self, positions_P: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
        """int64 [P]: the packed places of the states at `positions_P`, which are listed per sequence in
        `rows` order."""
        of_P = np.repeat(np.arange(len(self.rows)), counts_B)
        positions_P = positions_P.astype(np.int64)
        in_prefix_P = positions_P < self.shared[of_P]
        return np.where(
            in_prefix_P,
            self.prefix_starts[of_P] + positions_P,
            self.tail_starts[of_P] + positions_P - self.shared[of_P],
        )


def pack(
    tokens_T: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray, batch: Sequence[PrefixGroup]
) -> Packed:
    """Lay a micro-batch's prefix groups out in one row."""
    sources: list[tuple[int, int]] = []  # (start in tokens_T, count) of each run of packed tokens
    first_position: list[int] = []
    key_runs: list[tuple[int, int]] = []  # (packed start, count)
    queries: list[int] = []
    keys: list[int] = []
    rows: list[int] = []
    tails: list[int] = []
    prefixes: list[int] = []
    shared: list[int] = []
    at = 0

    def segment(source: int, count: int, position: int, before: tuple[int, int] | None) -> None:
        nonlocal at
        sources.append((source, count))
        first_position.append(position)
        key_runs.extend([*([before] if before else []), (at, count)])
        queries.append(count)
        keys.append(count + (before[1] if before else 0))
        at += count

    for group in batch:
        prefix_at = at
        if group.shared:
            segment(int(starts_N[group.rows[0]]), group.shared, 0, None)
        for row in group.rows:
            rows.append(row)
            prefixes.append(prefix_at)
            shared.append(group.shared)
            tails.append(at)
            own = int(lengths_N[row]) - group.shared
            if own:
                before = (prefix_at, group.shared) if group.shared else None
                segment(int(starts_N[row]) + group.shared, own, group.shared, before)
    if at == 1:  # a compiled layer would be recompiled for a single token; the second is ignored
        segment(0, 1, 0, None)
    runs = np.array(sources, dtype=np.int64).reshape(-1, 2)
    any_shared = any(group.shared for group in batch)
    key_places_N = ragged_ranges(*np.array(key_runs, dtype=np.int64).T) if any_shared else None
    return Packed(
        tokens_T=tokens_T[ragged_ranges(runs[:, 0], runs[:, 1])].astype(np.int64),
        positions_T=ragged_ranges(np.array(first_position, dtype=np.int64), runs[:, 1]),
        ends_q=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        ends_k=np.concatenate([[0], np.cumsum(keys)]).astype(np.int32),
        key_places_N=key_places_N,
        rows=tuple(rows),
        tail_starts=np.array(tails, dtype=np.int64),
        prefix_starts=np.array(prefixes, dtype=np.int64),
        shared=np.array(shared, dtype=np.int64),
    )


def pack_in_groups(
    tokens_T: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray, batch: Sequence[PrefixGroup]
) -> Packed | None:
    """Lay a micro-batch out with segments of equal length next to each other.

    Segments are filled up at the end with tokens that no real token attends to, since attention is causal.
    None if sequences share prefixes or are too short for this to pay.
    """
    rows = [row for group in batch for row in group.rows]
    own_B = lengths_N[rows].astype(np.int64)
    groups = None if any(group.shared for group in batch) else in_groups(own_B)
    if groups is None:
        return None
    packed_T = np.zeros(groups.total, dtype=np.int64)
    packed_T[ragged_ranges(groups.begins_B, own_B)] = tokens_T[ragged_ranges(starts_N[rows], own_B)]
    return Packed(
        tokens_T=packed_T,
        positions_T=ragged_ranges(np.zeros(len(rows), dtype=np.int64), groups.filled_B[groups.order_B]),
        ends_q=groups.bounds,
        ends_k=groups.bounds,
        key_places_N=None,
        rows=tuple(rows),
        tail_starts=groups.begins_B,
        prefix_starts=groups.begins_B,
        shared=np.zeros(len(rows), dtype=np.int64),
        groups_G3=groups.table_G3,
    )
