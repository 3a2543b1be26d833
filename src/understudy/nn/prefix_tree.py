"""A prefix tree of token rows, so that a prefix which several rows share is computed once.

    rows   7 5 1      nodes   7 ── 5 ── 1         6 tokens, 4 nodes
           7 5 2                   └─── 2

A token's state depends only on the tokens up to it, so rows with the same prefix share its states. Shared
prefixes are chat templates, the prompt of a group of samples, and the history of a conversation. Everything
in a model except attention works token by token and can be computed per node; attention sees whole rows.

Legend: B rows, L longest row, U nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The distinct prefixes of some rows as nodes, and the node of each token."""

    tokens_U: np.ndarray
    """int64."""
    positions_U: np.ndarray
    """int64: the number of tokens before each node."""
    nodes_BL: np.ndarray
    """int64: the node of each token; rows are padded on the right with node 0."""
    places_U: np.ndarray
    """int64: a node's index in the flattened `nodes_BL`, in the first row (by content) that contains it."""

    def __len__(self) -> int:
        return len(self.tokens_U)


def prefix_tree(rows: Sequence[np.ndarray]) -> PrefixTree:
    """The tree of rows of token ids; depends on the rows and their order alone.

    Rows are sorted by content, so rows with a common prefix are adjacent. A token is a new node from where
    its row differs from the row before.
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
    # Numbers grow downwards in a column, so the running maximum is the newest node.
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
