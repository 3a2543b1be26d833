"""Spill files: large columns in append-only segment files beside the journal.

A cell of several megabytes (16k tokens × top-64) would pass through SQLite twice, once into its log and once
into its pages, and stay in memory until trained. Instead it is appended to a segment; memory and journal hold
a reference with a checksum.

Crash safety: a frame is written *before* the commit that refers to it, and a new process always starts a new
segment. So a reference never points at a torn frame. A crash can leave unreferenced bytes; segments without
any reference are deleted at the next start.

A segment may be assigned to a writer in another process (`transfer_queue/segments.py`), which is then its
only writer. It is deleted after that writer has returned it and no row refers to it.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path

from understudy.dataplane.frame import SpillRef
from understudy.errors import DataPlaneError

SEGMENT_BYTES = 256 * 2**20
_PWRITE_LIMIT = 2**30


class SpillFiles:
    """The open segment files. Space is reserved on the event loop, frames are written on the journal's
    thread, and any thread may read."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._files: dict[int, int] = {}
        self._opening = threading.Lock()
        """A file that two threads opened would stay open: its space is not freed when it is deleted."""
        folder.mkdir(parents=True, exist_ok=True)
        self._segment = 1 + max((number for number, _ in self._on_disk()), default=0)
        self._highest = self._segment
        self._offset = 0
        self._writer_segments: dict[int, int | None] = {}
        """Segments assigned to remote writers. None: in use. After the return: the plane's own segment at
        that time; a commit sealed at or after that segment follows everything the writer announced."""

    def _on_disk(self) -> list[tuple[int, Path]]:
        return [(int(path.stem), path) for path in self._folder.glob("*.seg") if path.stem.isdecimal()]

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.seg"

    def reserve(self, frame: bytes) -> SpillRef:
        """Reserve space for this frame and return its reference."""
        if self._offset and self._offset + len(frame) > self._segment_bytes:
            self._next_segment()
        ref = SpillRef(self._segment, self._offset, len(frame), zlib.crc32(frame))
        self._offset += len(frame)
        return ref

    def roll(self) -> int:
        """Start a new segment, so that the previous one can be deleted as a whole; returns the new number."""
        if self._offset:
            self._next_segment()
        return self._segment

    def _next_segment(self) -> None:
        self._highest += 1
        self._segment, self._offset = self._highest, 0

    def lend_segment(self) -> int:
        """A segment for a remote writer. Its file is created now, so that a restarted plane cannot reuse the
        number."""
        self._highest += 1
        self._writer_segments[self._highest] = None
        os.close(os.open(self._path(self._highest), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return self._highest

    def give_back(self, segment: int) -> None:
        """End a remote writer's use: nothing more is written, and all it announced is in a journal batch."""
        self._next_segment()
        self._writer_segments[segment] = self._segment

    def _file(self, segment: int, create: int = 0) -> int:
        found = self._files.get(segment)
        if found is not None:
            return found
        with self._opening:
            if segment not in self._files:
                flags = os.O_RDWR | os.O_CLOEXEC | create
                self._files[segment] = os.open(self._path(segment), flags, 0o600)
            return self._files[segment]

    def write(self, ref: SpillRef, frame: bytes) -> None:
        view, place, file = memoryview(frame), ref.offset, self._file(ref.segment, os.O_CREAT)
        while view:
            written = os.pwrite(file, view[:_PWRITE_LIMIT], place)
            view, place = view[written:], place + written

    def read(self, ref: SpillRef) -> bytes:
        try:
            file = self._file(ref.segment)
            parts, place, end = [], ref.offset, ref.offset + ref.length
            while place < end and (part := os.pread(file, min(end - place, _PWRITE_LIMIT), place)):
                parts.append(part)
                place += len(part)
        except OSError as error:
            raise DataPlaneError(
                f"spilled column: {self._path(ref.segment)} cannot be read: {error}"
            ) from None
        frame = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(frame) != ref.length or zlib.crc32(frame) != ref.crc:
            raise DataPlaneError(
                f"spilled column: {self._path(ref.segment)} at {ref.offset} holds other bytes than were written "
                f"({len(frame)} of {ref.length}, checksum differs); the file was changed or the disk is failing"
            )
        return frame

    def sync(self) -> None:
        """Flush every frame written so far, and the directory, so that they survive a power cut."""
        for file in list(self._files.values()):
            os.fsync(file)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def segment(self) -> int:
        """The current segment; later reservations are in this one or a higher number."""
        return self._segment

    def keep_only(self, segments: Iterable[int], below: int) -> None:
        """Delete the unreferenced segments before `below`; later ones may hold frames not yet committed."""
        keep = set(segments)
        for number, path in self._on_disk():
            until = self._writer_segments.get(number, number + 1)
            if number not in keep and until is not None and until <= below:
                self._writer_segments.pop(number, None)
                path.unlink(missing_ok=True)
                file = self._files.pop(number, None)
                if file is not None:
                    os.close(file)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
