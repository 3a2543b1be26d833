"""Rows of different lengths as two plain tensors.

Two plain tensors are easy to serialise; `torch.nested` is accepted and produced at the edge.

    Jagged.from_rows([tensor([7, 8, 9]), tensor([4])])
      values   [7, 8, 9, 4]      every row, one after another
      offsets  [0, 3, 4]         row i is values[offsets[i] : offsets[i+1]]

Values may have trailing dimensions (`[total, K]` for top-k columns); offsets count along the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Jagged:
    values: torch.Tensor
    offsets: torch.Tensor
    """int64 [rows + 1], starts at 0, never decreases."""

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or len(self.offsets) < 1:
            raise ValueError(
                f"offsets must be int64 [rows + 1], got {self.offsets.dtype} {tuple(self.offsets.shape)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values) or (self.offsets.diff() < 0).any():
            raise ValueError(
                f"offsets must rise from 0 to the number of values ({len(self.values)}), got {self.offsets.tolist()[:8]} …"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[torch.Tensor]) -> Jagged:
        if not rows:
            return cls(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        lengths = torch.tensor([0] + [len(row) for row in rows], dtype=torch.int64)
        return cls(torch.cat(list(rows)), lengths.cumsum(0))

    @classmethod
    def concat(cls, parts: Sequence[Jagged]) -> Jagged:
        return cls.from_rows([row for part in parts for row in part])

    @property
    def lengths(self) -> torch.Tensor:
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    def count_true(self) -> tuple[int, ...]:
        """The number of true values in each row."""
        before = self.values.new_zeros(len(self.values) + 1, dtype=torch.int64)
        torch.cumsum(self.values, 0, out=before[1:])
        return tuple(before[self.offsets].diff().tolist())

    def select(self, indexes: Sequence[int]) -> Jagged:
        """The rows at these indexes, in the order given."""
        rows = list(self)
        if not indexes:
            return Jagged(self.values[:0], torch.zeros(1, dtype=torch.int64))
        return Jagged.from_rows([rows[i] for i in indexes])

    def to(self, device: torch.device | str) -> Jagged:
        return Jagged(self.values.to(device), self.offsets.to(device))
