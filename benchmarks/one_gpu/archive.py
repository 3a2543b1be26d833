"""One compressed file with what is worth keeping of a folder of results, small enough to be sent from machine to machine.

    write_archive(Path("gpu-results"), Path("results.tar.gz"))

Weights, checkpoints, the rows of a run and the journal of its data plane stay behind. Of a text longer than `_MOST_BYTES` its end is kept.
Result files come first, logs last: what does not fit any more is named in `left-out.txt`.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

MOST_ARCHIVED = 14 << 20
"""Compressed bytes."""
_MOST_BYTES = 4 << 20
_LOG_BYTES = 300_000
_KINDS = (".json", ".jsonl", ".toml", ".txt", ".log", ".md")
_LEFT_BEHIND = {"checkpoints", "dataplane", "data", "media", "kept_rows", "rollouts", "refused", "loggers"}
"""Folders of a run directory."""
_LAST = (".log",)


def write_archive(folder: Path, archive: Path) -> None:
    """Replaces `archive` in one step: a reader meets the old file or the new one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    left_out = []
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=6) as target:
        for path in _chosen(folder):
            if whole.tell() > MOST_ARCHIVED:
                left_out.append(f"{path.relative_to(folder)}\n")
                continue
            _add(target, str(path.relative_to(folder)), _end_of(path))
        if left_out:
            _add(target, "left-out.txt", "".join(left_out).encode())
    temporary = archive.with_name(archive.name + ".part")
    temporary.write_bytes(whole.getvalue())
    os.replace(temporary, archive)


def _chosen(folder: Path) -> list[Path]:
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix in _KINDS
        and path.is_file()
        and not _LEFT_BEHIND.intersection(path.relative_to(folder).parts)
    ]
    return sorted(found, key=lambda path: (path.suffix in _LAST, len(path.parts), path))


def _end_of(path: Path) -> bytes:
    """The file, or the whole lines of its end."""
    most = _LOG_BYTES if path.suffix in _LAST else _MOST_BYTES
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:  # deleted meanwhile
        return b""
    return data if size <= most else data.partition(b"\n")[2]


def _add(target: tarfile.TarFile, name: str, data: bytes) -> None:
    note = tarfile.TarInfo(name)
    note.size = len(data)
    target.addfile(note, io.BytesIO(data))
