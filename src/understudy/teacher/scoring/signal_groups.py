"""Groups the sequences of a request by signal and K, and puts their scores back in request order.

Legend: N sequences, P scored positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from understudy.teacher.protocol import ScoreRequest, exclusive_cumsum
from understudy.teacher.scoring.packing import ragged_ranges
from understudy.types.scores import Signal


@dataclass(frozen=True, slots=True)
class SignalGroup:
    """The sequences of a request that ask for the same signal with the same K."""

    signal: Signal
    k: int
    rows: list[int]


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The scores of one group, its positions in request order."""

    sampled: np.ndarray
    ids: np.ndarray | None
    logprobs: np.ndarray | None
    hidden: np.ndarray | None


def needed_lengths(request: ScoreRequest, rotary_border: int | None = None) -> np.ndarray:
    """int64 [N]: how many tokens of each sequence the model must read.

    Nothing after the state that predicts the last scored token matters, so that token itself is not read. A
    sequence longer than `rotary_border` is read beyond it in any case, because its length decides its rotary
    embedding.
    """
    lengths_N = np.zeros(len(request), dtype=np.int64)
    scored = np.flatnonzero(request.position_counts_N)
    ends_N = np.cumsum(request.position_counts_N, dtype=np.int64)
    lengths_N[scored] = request.positions_P[ends_N[scored] - 1]
    if rotary_border is not None:
        whole_N = np.diff(request.starts_N, append=len(request.tokens_T))
        beyond = scored[whole_N[scored] > rotary_border]
        lengths_N[beyond] = np.maximum(lengths_N[beyond], rotary_border + 1)
    return lengths_N


def groups_of(request: ScoreRequest) -> list[SignalGroup]:
    rows: dict[tuple[Signal, int], list[int]] = {}
    for i, kind in enumerate(zip(request.signals, request.k_N, strict=True)):
        rows.setdefault(kind, []).append(i)
    return [SignalGroup(signal, k, members) for (signal, k), members in rows.items()]


def named_ids(request: ScoreRequest, group: SignalGroup) -> np.ndarray | None:
    """int32 [P, K]: the ids the client named for the group's positions (`at_ids` only)."""
    if group.signal is not Signal.AT_IDS:
        return None
    sizes = np.array(
        [
            int(count) * k if signal is Signal.AT_IDS else 0
            for count, k, signal in zip(request.position_counts_N, request.k_N, request.signals, strict=True)
        ],
        dtype=np.int64,
    )
    return request.ids[ragged_ranges(exclusive_cumsum(sizes)[group.rows], sizes[group.rows])].reshape(
        -1, group.k
    )


def in_request_order(
    request: ScoreRequest, groups: Sequence[SignalGroup], columns: Sequence[GroupScores]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(ids, logprobs, hidden, sampled), flat. Usually there is one group, which costs no copy."""
    if len(groups) == 1:
        only = columns[0]
        return (
            np.empty(0, np.int32) if only.ids is None else only.ids.reshape(-1),
            np.empty(0, np.float32) if only.logprobs is None else only.logprobs.reshape(-1),
            np.empty(0, np.uint16) if only.hidden is None else only.hidden.reshape(-1),
            only.sampled,
        )
    parts: list[tuple[int, GroupScores, slice]] = []
    for group, column in zip(groups, columns, strict=True):
        ends = np.cumsum(request.position_counts_N[group.rows], dtype=np.int64).tolist()
        starts = [0, *ends[:-1]]
        parts += [(row, column, slice(a, b)) for row, a, b in zip(group.rows, starts, ends, strict=True)]
    parts.sort(key=lambda part: part[0])
    ids = [c.ids[at].reshape(-1) for _, c, at in parts if c.ids is not None]
    logprobs = [c.logprobs[at].reshape(-1) for _, c, at in parts if c.logprobs is not None]
    hidden = [c.hidden[at].reshape(-1) for _, c, at in parts if c.hidden is not None]
    return (
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(logprobs) if logprobs else np.empty(0, np.float32),
        np.concatenate(hidden) if hidden else np.empty(0, np.uint16),
        np.concatenate([c.sampled[at] for _, c, at in parts]) if parts else np.empty(0, np.float32),
    )
