"""Segments that other processes write: the plane reads what they announce, and deletes them when unused, not before."""

import asyncio
import gc
from pathlib import Path

import pytest

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.transfer_queue.segments import SegmentWriter, WriterSegments, WrittenRow


def on_disk(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.seg"))


def test_concurrent_appends_of_a_segment_writer_are_readable_and_flushed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    flushes: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (flushes.append(file), real(file)))
    spill = SpillFiles(tmp_path)
    frames = [[bytes([i]) * (100 + i), bytes([i]) * 3] for i in range(20)]

    async def body() -> list[list[SpillRef]]:
        writer = SegmentWriter(tmp_path)
        try:
            return await asyncio.gather(*(writer.append(7, pair) for pair in frames))
        finally:
            writer.close()

    references = asyncio.run(body())
    assert [[spill.read(ref) for ref in refs] for refs in references] == frames
    assert len(flushes) <= 2, "one flush for the first append, one for all that came during it"

    async def more() -> SpillRef:
        writer = SegmentWriter(tmp_path)
        (ref,) = await writer.append(7, [b"later"])
        return ref

    ref = asyncio.run(more())
    assert ref.offset == sum(len(frame) for pair in frames for frame in pair) and spill.read(ref) == b"later"


def test_a_segment_is_kept_until_every_reference_is_dropped_and_its_rows_are_committed(
    tmp_path: Path,
) -> None:
    spill = SpillFiles(tmp_path)
    writer_segments = WriterSegments(spill)
    first, second = writer_segments.take(1), writer_segments.take(1)
    assert first.number == second.number and writer_segments.take(2).number != first.number
    before = spill.segment
    writer_segments.end(1)
    spill.keep_only((), before + 100)
    assert first.number in on_disk(tmp_path), "a writer may still announce rows in it"
    number = first.number
    sealed = spill.segment
    del first, second
    gc.collect()
    spill.keep_only((), sealed)
    assert number in on_disk(tmp_path), (
        "a commit begun before the last reference was dropped may lack its rows"
    )
    spill.keep_only((number,), spill.segment)
    assert number in on_disk(tmp_path), "rows refer to it"
    spill.keep_only((), spill.segment)
    assert number not in on_disk(tmp_path)


def test_a_full_segment_or_a_checkpoint_starts_a_new_segment(tmp_path: Path) -> None:
    spill = SpillFiles(tmp_path)
    writer_segments = WriterSegments(spill, most_bytes=100)
    number = writer_segments.take(1).number
    assert writer_segments.take(1).number == number
    writer_segments.noted(WrittenRow({"x": SpillRef(number, 90, 10, 0), "reward": b"small"}))
    after = writer_segments.take(1).number
    assert after > number
    writer_segments.roll()
    assert writer_segments.take(1).number == after, "an empty segment is not replaced"
    writer_segments.noted(WrittenRow({"x": SpillRef(after, 0, 10, 0)}))
    writer_segments.roll()
    assert writer_segments.take(1).number > after
    assert spill.reserve(b"own").segment not in on_disk(tmp_path), (
        "the plane's own frames are in another segment"
    )


def test_a_reopened_spill_folder_does_not_reuse_the_number_of_a_lent_segment(tmp_path: Path) -> None:
    writer_segments = SpillFiles(tmp_path).lend_segment()
    assert SpillFiles(tmp_path).segment > writer_segments
