"""The weight files of a model folder: their headers, and whether they are complete. Imports no torch.

`understudy check` reports a download that was cut short, a clone without git-lfs and a copy without one of its shards,
before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_LENGTH = struct.Struct("<Q")
_AGAIN = "download or copy it again"


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: one, or those of the index, which may be missing. Others beside them are not counted
    (`consolidated.safetensors`)."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return [folder / name for name in _shards(folder)]
    return sorted(folder.glob("*.safetensors"))


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a weight file, by name."""
    return {name: entry["shape"] for name, entry in _header(file)[0].items()}


def incomplete(folder: Path) -> str | None:
    """Which file of the model is missing, incomplete or a git-lfs pointer, and what to do; None if all are whole."""
    for name in ("tokenizer.json", _INDEX):
        if (folder / name).is_file() and _is_pointer(folder / name):
            return _pointer_problem(name)
    try:
        files = weight_files(folder)
    except (ValueError, KeyError, AttributeError):
        return f"{_INDEX} is not an index of weight files; {_AGAIN}"
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"{missing[0]}{more} of the {len(files)} files named in {_INDEX} {'are' if more else 'is'} missing; {_AGAIN}"
    for file in files:
        if problem := _cut_short(file):
            return problem
    return None


def _cut_short(file: Path) -> str | None:
    if _is_pointer(file):
        return _pointer_problem(file.name)
    size = file.stat().st_size
    try:
        tensors, begin = _header(file)
        expected = begin + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        return f"{file.name} ({size:,} bytes) is not a complete safetensors file; {_AGAIN}"
    if size != expected:
        return f"{file.name} has {size:,} bytes, its header promises {expected:,}; {_AGAIN}"
    return None


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The entry of each tensor, and where the data begins."""
    with file.open("rb") as handle:
        (length,) = _LENGTH.unpack(handle.read(_LENGTH.size))
        begin = _LENGTH.size + length
        if begin > file.stat().st_size:  # as in a file of another format: reading on would ask for exabytes
            raise ValueError("the header is longer than the file")
        header = json.loads(handle.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, begin


def _shards(folder: Path) -> list[str]:
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as handle:
        return handle.read(len(_POINTER)) == _POINTER


def _pointer_problem(name: str) -> str:
    return f"{name} is a git-lfs pointer, not the file itself; run `git lfs pull` in the folder"
