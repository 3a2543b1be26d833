import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from understudy.types.jagged import Jagged

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=8)


@given(ROWS)
def test_rows_are_unchanged_by_from_rows_select_and_concat(rows: list[list[int]]) -> None:
    jagged = Jagged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
    assert [row.tolist() for row in jagged] == rows
    assert [jagged[i].tolist() for i in range(len(rows))] == rows
    assert jagged.lengths.tolist() == [len(row) for row in rows]
    order = list(reversed(range(len(rows))))
    assert [row.tolist() for row in jagged.select(order)] == [rows[i] for i in order]
    assert [row.tolist() for row in Jagged.concat([jagged, jagged])] == rows + rows


def test_rows_keep_their_trailing_dimensions() -> None:
    jagged = Jagged.from_rows([torch.zeros(2, 4), torch.ones(3, 4)])
    assert jagged[1].shape == (3, 4) and jagged.select([1]).values.shape == (3, 4)
    assert len(jagged.select([])) == 0


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 3, 2, 3], []])
def test_wrong_offsets_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Jagged(torch.zeros(3), torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        Jagged(torch.zeros(3), torch.tensor([0.0, 3.0]))
    with pytest.raises(IndexError):
        Jagged.from_rows([torch.zeros(1)])[1]
