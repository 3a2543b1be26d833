"""Conversion between the cells of many rows and the columns a trainer uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from understudy.dataplane.frame import decode, is_plain, joined_arrays
from understudy.errors import DataPlaneError
from understudy.types.jagged import Jagged


def gather(name: str, frames: Sequence[bytes], keys: Sequence[str]) -> Jagged | list[Any]:
    """One column over rows: arrays as a `Jagged` that owns its memory, anything else as a list."""
    alike = joined_arrays(frames)
    if alike is not None:
        return Jagged(*map(torch.from_numpy, alike))
    cells = _cells(frames)
    if not any(isinstance(cell, np.ndarray) for cell in cells):
        return cells
    row = next(row for row, cell in enumerate(cells) if _form(cell) != _form(cells[0]))
    raise DataPlaneError(
        f"column {name!r} is {_kind(cells[0])} on row {keys[0]} and {_kind(cells[row])} on row {keys[row]}; "
        "one column has one dtype and one width"
    )


def _cells(frames: Sequence[bytes]) -> list[Any]:
    """The decoded frames. Equal frames of strings, numbers and flat dicts (a teacher, a stop reason, the
    sizes of a short answer) are decoded once."""
    known: dict[bytes, Any] = {}
    cells = []
    for frame in frames:
        cell = known.get(frame, known)
        if cell is known:
            cell = decode(frame)
            if isinstance(cell, str | int | float | None) or is_plain(cell):
                known[frame] = cell
        elif type(cell) is dict:
            cell = cell.copy()  # rows must not share a mutable dict
        cells.append(cell)
    return cells


def _form(cell: Any) -> Any:
    """What all cells of an array column share: dtype and width."""
    return (cell.dtype, cell.shape[1:]) if isinstance(cell, np.ndarray) else None


def _kind(cell: Any) -> str:
    return f"{cell.dtype} {cell.shape}" if isinstance(cell, np.ndarray) else type(cell).__name__


def scatter(name: str, column: Any, rows: int) -> list[Any]:
    """The reverse of `gather`: one cell per row from a `Jagged`, a tensor or array with rows first, or a
    sequence."""
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
    """A tensor's values. bfloat16, which numpy lacks, is given as its bits in uint16."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
