"""A node is a distinct prefix: two tokens share a node exactly if everything up to them is equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.nn.prefix_tree import prefix_tree

ROWS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=12)


@given(ROWS)
@settings(max_examples=200, deadline=None)
def test_each_node_is_a_distinct_prefix_of_the_rows(rows: list[list[int]]) -> None:
    tree = prefix_tree([np.array(row, dtype=np.int32) for row in rows])
    prefixes: dict[tuple[int, ...], int] = {}
    for row, nodes_L in zip(rows, tree.nodes_BL, strict=True):
        for t, token in enumerate(row):
            node = int(nodes_L[t])
            assert prefixes.setdefault(tuple(row[: t + 1]), node) == node
            assert (tree.tokens_U[node], tree.positions_U[node]) == (token, t)
        assert not nodes_L[len(row) :].any()
    assert sorted(prefixes.values()) == list(range(len(tree))), (
        "each prefix has one node, and there are no others"
    )
    assert (tree.nodes_BL.ravel()[tree.places_U] == np.arange(len(tree))).all()
    real = [len(rows[place // tree.nodes_BL.shape[1]]) for place in tree.places_U]
    assert (tree.places_U % tree.nodes_BL.shape[1] < real).all(), (
        "the place of a node is a token and not padding"
    )


def test_rows_without_a_common_prefix_keep_every_token() -> None:
    tree = prefix_tree([np.arange(5), np.arange(5) + 1, np.array([70_000])])
    assert len(tree) == 11


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_token_ids_that_differ_only_in_high_bits_get_different_nodes(dtype: type) -> None:
    rows = [np.array([1, value], dtype=dtype) for value in (2, 258, 65_538, 16_777_218)]
    assert len(prefix_tree(rows)) == 5
