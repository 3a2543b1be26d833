"""File writes that are complete after a crash or absent, and the steps that have a checkpoint. Imports no torch.

A file is on disk only after its own fsync *and* the fsync of its folder. Renames within one file system are
atomic, so a reader sees the old state or the new one.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

STEP_FOLDER = re.compile(r"step-(\d{6,})")
_BLOCK = 1 << 20


def saved_steps(root: Path) -> list[int]:
    """The steps that have a complete checkpoint folder in `root`, ascending."""
    if not root.is_dir():
        return []
    found = (STEP_FOLDER.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


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
