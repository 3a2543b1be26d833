"""A file lock that allows one process per data plane folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from understudy.errors import DataPlaneError
from understudy.observability.forks import close_in_forks


class FolderLock:
    """An exclusive `flock`. The kernel releases it when the process ends, so a crash leaves no stale lock."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise DataPlaneError(
                f"{folder} is in use by process {owner}: two runs cannot share a run directory; "
                "stop that process or choose another directory"
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())
        close_in_forks(self, FolderLock.release)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
