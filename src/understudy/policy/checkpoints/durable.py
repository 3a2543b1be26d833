"""File writes that are complete after a crash or absent.

A file is on disk only after its own fsync *and* the fsync of its folder. Renames within one file system are
atomic, so a reader sees the old state or the new one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK = 1 << 20


def sync_file(path: Path) -> None:
    """Flushes a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flushes a folder's entries to the disk: without it a rename may be lost in a power cut."""
    sync_file(path)


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a new file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file atomically: a reader finds the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_text(temporary, text)
    os.replace(temporary, path)
    sync_directory(path.parent)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
