"""Rows that begin alike, as a tree: the state of a token depends on the tokens before it alone, so one will do for all rows.

    rows   7 5 1      nodes   7 ── 5 ── 1         6 tokens, 4 nodes
           7 5 2                   └─── 2

A chat template, the question of a group of samples and the past of a conversation are such beginnings. Everything in a model but
attention works token by token and can be done by node; attention sees whole rows.

Legend: B rows, L longest row, U nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefixTree:
    tokens_U: np.ndarray
    """int64."""
    positions_U: np.ndarray
    """int64: how many tokens come before it."""
    nodes_BL: np.ndarray
    """int64: the node of each row's tokens, rows filled up on the right with node 0."""
    places_U: np.ndarray
    """int64: where a node stands in the flattened `nodes_BL`; the first row it belongs to in the order of their tokens."""

    def __len__(self) -> int:
        return len(self.tokens_U)


def prefix_tree(rows: Sequence[np.ndarray]) -> PrefixTree:
    """The tree of rows of token ids; depends on the rows and their order alone.

    Sorted by content, rows that begin alike are neighbours, and a token is a new node where a row parts from the one before.
    """
    lengths_B = np.array([len(row) for row in rows])
    longest = int(lengths_B.max())
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">u4").tobytes())
    sorted_BL = np.full((len(rows), longest), -1, dtype=np.int64)
    for place, i in enumerate(order):
        sorted_BL[place, : lengths_B[i]] = rows[i]
    real_BL = sorted_BL >= 0
    new_BL = real_BL.copy()
    alike_BL = np.logical_and.accumulate((sorted_BL[1:] == sorted_BL[:-1]) & real_BL[1:], axis=1)
    new_BL[1:] &= ~alike_BL
    # A column's nodes are numbered downwards, so the newest so far is the greatest.
    numbers_BL = (np.cumsum(new_BL) - 1).reshape(new_BL.shape)
    found_BL = np.maximum.accumulate(np.where(new_BL, numbers_BL, 0), axis=0)
    nodes_BL = np.zeros_like(sorted_BL)
    nodes_BL[order] = np.where(real_BL, found_BL, 0)
    place_B, positions_U = np.nonzero(new_BL)
    return PrefixTree(
        tokens_U=sorted_BL[place_B, positions_U],
        positions_U=positions_U,
        nodes_BL=nodes_BL,
        places_U=np.asarray(order)[place_B] * longest + positions_U,
    )
