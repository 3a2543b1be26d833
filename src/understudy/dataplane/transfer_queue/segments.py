"""Spill segments for remote writers: each appends columns to its own segment and announces references.

    worker: SegmentWriter.append ──frames──> spill/00000007.seg (in the run directory, which all machines see)
            └──Written: small cells, references──> plane.adopt(…): ledger and journal, as if the plane had written them

The plane names the segment with every piece of work (`WriterSegments.take`). A writer that died, or was
declared dead, leaves unreferenced bytes in a segment that no other process writes.
"""

from __future__ import annotations

import asyncio
import os
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.journal.spill import SEGMENT_BYTES, SpillFiles
from understudy.errors import RowsUnreachable


class WrittenRow(msgspec.Struct, frozen=True):
    """One row's columns as their writer announces them."""

    cells: dict[str, bytes | SpillRef]
    """By column: the frame itself, or its reference into a segment."""
    queued: tuple[str, ...] = ()
    """Columns that are also in the queue."""
    mark: str = ""
    """The write's id, which is part of their name in the queue (`write_ids.py`)."""


class SegmentRef:
    """The right to append to a segment. The segment is kept as long as this object is referenced."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class WriterSegments:
    """The plane's side: the current segment of each writer. A writer gets a new one when its segment is full.
    Used on the plane's event loop."""

    def __init__(self, spill: SpillFiles, most_bytes: int = SEGMENT_BYTES) -> None:
        self._spill = spill
        self._most_bytes = most_bytes
        self._current: dict[int, int] = {}
        """By writer."""
        self._refs: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        """By segment in use: the end of its last adopted frame."""

    def take(self, writer: int) -> SegmentRef:
        segment = self._current.get(writer)
        if segment is not None and self._bytes[segment] >= self._most_bytes:
            self._retire(writer)
            segment = None
        if segment is None:
            segment = self._current[writer] = self._spill.lend_segment()
            self._bytes[segment] = 0
        self._refs[segment] += 1
        ref = SegmentRef(segment)
        weakref.finalize(ref, self._returned, segment).atexit = False
        return ref

    def noted(self, written: WrittenRow) -> None:
        """Called when this announcement is in the ledger."""
        for cell in written.cells.values():
            if isinstance(cell, SpillRef) and cell.segment in self._bytes:
                self._bytes[cell.segment] = max(self._bytes[cell.segment], cell.offset + cell.length)

    def end(self, writer: int) -> None:
        """Called when this writer is gone."""
        if writer in self._current:
            self._retire(writer)

    def roll(self) -> None:
        """Every writer continues in a new segment, so that the old ones can be deleted once their rows are
        settled."""
        for writer in [writer for writer, segment in self._current.items() if self._bytes[segment]]:
            self._retire(writer)

    def _retire(self, writer: int) -> None:
        self._give_back(self._current.pop(writer))

    def _returned(self, segment: int) -> None:
        self._refs[segment] -= 1
        if segment not in self._current.values():
            self._give_back(segment)

    def _give_back(self, segment: int) -> None:
        if self._refs[segment] == 0:
            del self._refs[segment], self._bytes[segment]
            self._spill.give_back(segment)


class SegmentWriter:
    """The writer's side: appends to the segments that the plane names. Frames that arrive together share one
    flush. Called on the writer's event loop; the writing runs on a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, tuple[int, int]] = {}
        """By segment: file and length."""
        self._waiting: list[tuple[int, Sequence[bytes], asyncio.Future[list[SpillRef]]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def append(self, segment: int, frames: Sequence[bytes]) -> list[SpillRef]:
        """Append frames and return their references; they are flushed and survive a power cut."""
        answer: asyncio.Future[list[SpillRef]] = asyncio.get_running_loop().create_future()
        self._waiting.append((segment, frames, answer))
        if self._flusher is None:
            self._flusher = asyncio.get_running_loop().create_task(self._flush())
        return await answer

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    places = await asyncio.to_thread(
                        self._write, [(segment, frames) for segment, frames, _ in batch]
                    )
                except Exception as error:
                    for _, _, answer in batch:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                for (_, _, answer), refs in zip(batch, places, strict=True):
                    if not answer.done():
                        answer.set_result(refs)
        finally:
            self._flusher = None

    def _write(self, batch: Sequence[tuple[int, Sequence[bytes]]]) -> list[list[SpillRef]]:
        places = []
        for segment, frames in batch:
            file, length = self._file(segment)
            refs = []
            for frame in frames:
                refs.append(SpillRef(segment, length, len(frame), zlib.crc32(frame)))
                view = memoryview(frame)
                while view:
                    written = os.pwrite(file, view, length)
                    view, length = view[written:], length + written
            self._files[segment] = (file, length)
            places.append(refs)
        for segment in {segment for segment, _ in batch}:
            os.fdatasync(self._files[segment][0])
        newest = max(self._files)
        for segment in [segment for segment in self._files if segment != newest]:
            os.close(self._files.pop(segment)[0])
        return places

    def _file(self, segment: int) -> tuple[int, int]:
        """File and length of a segment. Only one process writes it, so the next frame goes to its end."""
        if segment not in self._files:
            path = self._folder / f"{segment:08d}.seg"
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files[segment] = (file, os.fstat(file).st_size)
        return self._files[segment]

    async def read(self, refs: Sequence[SpillRef]) -> list[bytes]:
        """Frames of any writer's segment; raises `RowsUnreachable` if they are missing or damaged."""
        return await asyncio.to_thread(lambda: [self._read(ref) for ref in refs])

    def _read(self, ref: SpillRef) -> bytes:
        path = self._folder / f"{ref.segment:08d}.seg"
        try:
            with path.open("rb") as file:
                file.seek(ref.offset)
                frame = file.read(ref.length)
        except OSError as error:
            raise RowsUnreachable(f"{path} cannot be read: {error}") from None
        if len(frame) != ref.length or zlib.crc32(frame) != ref.crc:
            raise RowsUnreachable(f"{path} at {ref.offset} holds other bytes than were written")
        return frame

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()
