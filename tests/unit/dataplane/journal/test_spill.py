"""Segment files: written records are read back, damage raises, unused files are deleted."""

import os
import threading
from pathlib import Path

import pytest

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.journal.spill import SpillFiles
from understudy.errors import DataPlaneError


def put(spill: SpillFiles, frame: bytes) -> SpillRef:
    ref = spill.reserve(frame)
    spill.write(ref, frame)
    return ref


def test_frames_fill_segments_and_are_read_back_in_any_order(tmp_path: Path) -> None:
    spill = SpillFiles(tmp_path, segment_bytes=100)
    frames = [bytes([i]) * size for i, size in enumerate((40, 40, 40, 250, 1, 0))]
    refs = [put(spill, frame) for frame in frames]
    assert [ref.segment for ref in refs] == [1, 1, 2, 3, 4, 4]
    assert [spill.read(ref) for ref in reversed(refs)] == frames[::-1]
    spill.close()
    again = SpillFiles(tmp_path, segment_bytes=100)
    assert [again.read(ref) for ref in refs] == frames
    assert put(again, b"new").segment == 5, (
        "a new process never appends to a segment that an old one may have left incomplete"
    )
    again.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_reading_a_changed_truncated_or_missing_segment_raises(tmp_path: Path, damage: str) -> None:
    spill = SpillFiles(tmp_path)
    ref = put(spill, b"x" * 1000)
    spill.close()
    file = tmp_path / "00000001.seg"
    body = bytearray(file.read_bytes())
    if damage == "flip":
        body[500] ^= 1
        file.write_bytes(body)
    elif damage == "cut":
        file.write_bytes(body[:-1])
    else:
        file.unlink()
    with pytest.raises(DataPlaneError, match=r"spilled column.*00000001.seg"):
        SpillFiles(tmp_path).read(ref)


def test_only_unreferenced_segments_below_the_given_number_are_deleted(tmp_path: Path) -> None:
    spill = SpillFiles(tmp_path, segment_bytes=10)
    for _ in range(4):
        put(spill, b"0123456789")
    spill.keep_only([2], below=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002.seg", "00000004.seg"]
    assert spill.roll() == 5 and spill.roll() == 5
    spill.keep_only([], below=5)
    assert list(tmp_path.iterdir()) == []
    spill.close()


def test_threads_that_read_a_segment_at_the_same_time_open_its_file_once(tmp_path: Path) -> None:
    """A second descriptor would keep the segment's disk space after its deletion."""
    first = SpillFiles(tmp_path)
    ref = put(first, b"frame")
    first.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        spill, together = SpillFiles(tmp_path), threading.Barrier(8)

        def read(spill: SpillFiles = spill, together: threading.Barrier = together) -> None:
            together.wait()
            spill.read(ref)

        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        spill.close()
    assert len(os.listdir("/proc/self/fd")) == before
