"""Temporary folders owned by a process; a lock shows other processes whether the owner still lives.

The owner holds a lock on a file inside. The kernel releases it when the process ends, kill -9 included, in
any container or pid namespace. So what a killed run left in /dev/shm is removed by its last engine process,
or by the next run. Processes may be killed while they create or remove a folder, too: the file is the last
that is removed, and a folder that has no such file yet is removed if there is nothing else in it.
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
_NEW_MARK = f"{_MARK}.new"
"""The mark until its owner has locked it."""


class OwnedFolder:
    """A new folder, owned until `close` or the end of this process."""

    def __init__(self, prefix: str, parent: Path | None, *, tidy: bool = True) -> None:
        """`tidy` removes what killed runs left beside it, now and at `close`: the processes of a run that was just
        killed may still be ending. Not used in a folder of the user's own: other
        machines may write there, and do not see our locks."""
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        self._tidied = (folder, prefix) if tidy else None
        self._tidy()
        self._file: int | None = None
        while self._file is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            self._file = _own(self.path)

    def close(self) -> None:
        if self._file is not None:
            _remove(self.path)
            os.close(self._file)
            self._file = None
            self._tidy()

    def _tidy(self) -> None:
        if self._tidied is not None:
            remove_abandoned(*self._tidied)


def _own(folder: Path) -> int | None:
    """The locked mark of a new folder; None if another process took the folder for an abandoned one."""
    try:
        file = os.open(folder / _NEW_MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        # Fails on a file system without locks: other processes cannot lock it either, so they never see the
        # folder as abandoned.
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        # Locked before it gets its name: no process ever finds the mark without its owner's lock.
        (folder / _NEW_MARK).rename(folder / _MARK)
    except FileNotFoundError:
        os.close(file)
        return None
    return file


def _remove(folder: Path) -> None:
    """The mark is removed last, so a process that is killed in between leaves a folder that the next one can remove."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name in (_MARK, _NEW_MARK):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_if_abandoned(folder: Path, first: Callable[[Path], object] | None = None) -> None:
    """Removes an owned folder whose owner is gone, after `first` was called on it; does nothing otherwise."""
    with _lock_of(folder) as free:
        if free:
            if first is not None:
                first(folder)
            _remove(folder)
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
    """Yields whether the folder has no owner; holds its lock meanwhile. Removes one without a mark that is empty."""
    name = _MARK
    if folder.is_symlink():
        yield False
        return
    with contextlib.suppress(OSError):
        inside = os.listdir(folder)
        if not inside:
            os.rmdir(folder)
        elif inside == [_NEW_MARK]:
            name = _NEW_MARK
    try:
        file = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
