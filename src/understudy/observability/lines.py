"""Follows a jsonl file: every whole line since the last look, with its offset; never the file at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

_PIECE = 1 << 20
MOST_LINE = 64 << 20
"""A longer line is skipped: no record of a run is as long."""


class GrowingFile:
    """`for offset, line in file.new_lines()`. Starts again when the file was replaced or cut (a resume)."""

    def __init__(self, path: Path, forget: Callable[[], object] = lambda: None) -> None:
        """`forget` is called before the file is read from its start again: the reader drops what it has read before. The
        file may be empty then, and stay so for a while."""
        self.path, self._forget = path, forget
        self.place = 0
        self._inode = 0

    def new_lines(self, most: int = 1 << 62) -> Iterator[tuple[int, bytes]]:
        """At most about `most` bytes of lines; a last line without its end waits for the next look."""
        try:
            handle = self.path.open("rb")
        except OSError:
            return
        with handle:
            found = os.fstat(handle.fileno())
            if self._inode and (found.st_ino != self._inode or found.st_size < self.place):
                self.place = 0
                self._forget()
            self._inode = found.st_ino
            handle.seek(self.place)
            rest, end = b"", self.place + most
            while self.place < end and (piece := handle.read(_PIECE)):
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield self.place, line
                    self.place += len(line) + 1
                if len(rest) > MOST_LINE:
                    self.place += len(rest)
                    rest = b""


def record(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for anything else, such as half a line of a killed process."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def line_at(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    try:
        with path.open("rb") as handle:
            handle.seek(offset)
            return record(handle.read(length))
    except OSError:
        return None
