"""A simulated disk that can fail, and whose power can be cut: then all that no `fsync` covered is lost."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from understudy.dataplane.journal.journal import Journal
from understudy.dataplane.journal.writer import Writer

_WRITTEN_BY_SQLITE = "journal.sqlite"
"""SQLite flushes its main file itself, whenever it changes it."""


class Disk:
    """The folder of one data plane. While `mounted`, the plane's flushes and commits pass through here."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self._chance = folder, chance
        self.failing = 0.0
        """How likely a commit or a flush fails."""
        self._flushed: dict[Path, bytes] = {}

    @contextmanager
    def mounted(self) -> Iterator[None]:
        fsync, write, to_thread = os.fsync, Writer._write, Journal._to_thread

        def flush(descriptor: int) -> None:
            if self._chance.random() < self.failing:
                raise OSError(errno.EIO, "the simulated disk fails")
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self._flushed[path] = path.read_bytes()

        def checked(cursor: sqlite3.Cursor, batch: Any) -> None:
            write(cursor, batch)
            if self._chance.random() < self.failing:
                raise sqlite3.OperationalError("database or disk is full")

        os.fsync, Writer._write, Journal._to_thread = flush, staticmethod(checked), _here  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            os.fsync, Writer._write, Journal._to_thread = fsync, staticmethod(write), to_thread  # type: ignore[method-assign,assignment]

    def closed(self) -> None:
        """The plane was closed in order: SQLite has moved its log into the main file and flushed that."""
        self._flushed.clear()

    def kill(self, plane: Any, power_cut: bool) -> None:
        """Ends the plane as kill -9 does, or as a power cut does."""
        files = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        journal = plane._store.journal
        journal._work.put(None)
        journal._thread.join()
        journal.writer.failure = sqlite3.ProgrammingError("this process is dead")
        journal.writer.connection.close()  # would move the log into the main file; undone below
        plane._store.spill.close()
        plane._lock.release()
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()
        for path, content in files.items():
            if power_cut and path.name != _WRITTEN_BY_SQLITE:
                content = self._flushed.get(path, b"")
            if content and not path.name.endswith("-shm"):
                path.write_bytes(content)


def _here(journal: Journal, work: Any, deliver: Any) -> None:
    """Runs the journal thread's work on the event loop."""
    journal._in_thread += 1
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    assert journal._loop is not None
    journal._loop.call_soon(journal._done, deliver, result, error)
