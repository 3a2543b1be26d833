"""Temporary folders owned by a process; a lock shows other processes whether the owner still lives.

The owner holds a lock on a file inside. The kernel releases it when the process ends, kill -9 included, in
any container or pid namespace. So what a killed run left in /dev/shm is removed by its last engine process,
or by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = ".owner"


class OwnedFolder:
    """A new folder, owned until `close` or the end of this process."""

    def __init__(self, prefix: str, parent: Path | None, *, tidy: bool = True) -> None:
        """`tidy` removes what killed runs left beside it. Not used in a folder of the user's own: other
        machines may write there, and do not see our locks."""
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        if tidy:
            remove_abandoned(folder, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        # Locked before it gets its name: no process ever finds the file without its owner's lock.
        file = os.open(self.path / f"{_MARK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: other processes cannot lock it either, so they never see it as abandoned
            fcntl.flock(file, fcntl.LOCK_EX)
        (self.path / f"{_MARK}.new").rename(self.path / _MARK)
        self._file: int | None = file

    def close(self) -> None:
        if self._file is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._file)
            self._file = None


def remove_if_abandoned(folder: Path, first: Callable[[Path], object] | None = None) -> None:
    """Removes an owned folder whose owner is gone, after `first` was called on it; does nothing otherwise."""
    with _lock_of(folder) as free:
        if free:
            if first is not None:
                first(folder)
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("removed %s, which its owner left behind", folder)


def remove_abandoned(parent: Path, prefix: str, first: Callable[[Path], object] | None = None) -> None:
    """Removes what earlier runs of this user left because they were killed."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid():
                    remove_if_abandoned(folder, first)


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[bool]:
    """Yields whether the folder has no owner; holds its lock meanwhile."""
    try:
        file = os.open(folder / _MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(file)
