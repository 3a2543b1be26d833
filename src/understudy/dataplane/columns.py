"""Cells of many rows as columns a trainer can use, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from understudy.dataplane.frame import decode
from understudy.errors import DataPlaneError
from understudy.types.jagged import Jagged


def gather(name: str, frames: Sequence[bytes], keys: Sequence[str]) -> Jagged | list[Any]:
    """One column over rows: arrays as a `Jagged` that owns its memory, anything else as a list."""
    cells = [decode(frame) for frame in frames]
    arrays = sum(isinstance(cell, np.ndarray) for cell in cells)
    if arrays == 0:
        return cells
    first = cells[0]
    for key, cell in zip(keys, cells, strict=True):
        if not isinstance(cell, np.ndarray) or cell.dtype != first.dtype or cell.shape[1:] != first.shape[1:]:
            raise DataPlaneError(
                f"column {name!r} is {_kind(first)} on row {keys[0]} and {_kind(cell)} on row {key}; "
                "one column has one dtype and one width"
            )
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum([len(cell) for cell in cells], out=offsets[1:])
    return Jagged(torch.from_numpy(np.concatenate(cells)), torch.from_numpy(offsets))


def _kind(cell: Any) -> str:
    return f"{cell.dtype} {cell.shape}" if isinstance(cell, np.ndarray) else type(cell).__name__


def scatter(name: str, column: Any, rows: int) -> list[Any]:
    """The reverse of `gather`: one cell per row from a `Jagged`, a tensor or array with rows first, or a sequence."""
    if isinstance(column, Jagged):
        cells: list[Any] = [_array(name, row) for row in column]
    elif isinstance(column, torch.Tensor):
        cells = column.tolist() if column.dim() == 1 else [_array(name, row) for row in column]
    elif isinstance(column, np.ndarray):
        cells = column.tolist() if column.ndim == 1 else list(column)
    elif isinstance(column, Sequence) and not isinstance(column, str | bytes):
        cells = [_array(name, cell) if isinstance(cell, torch.Tensor) else cell for cell in column]
    else:
        raise DataPlaneError(
            f"column {name!r}: {type(column).__name__} holds no rows; give a Jagged, a tensor or a list"
        )
    if len(cells) != rows:
        raise DataPlaneError(f"column {name!r} has {len(cells)} rows for {rows} keys")
    return cells


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values; bfloat16, which numpy lacks, as its bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
