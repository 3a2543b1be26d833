"""Temporary folders that belong to a process: whoever finds one can tell whether its owner still lives.

The owner holds a lock on a file inside. The kernel lets go of it with the process, kill -9 included, whichever container
or pid namespace it was in. So what a killed run left in /dev/shm is removed by its last engine process, or by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = ".owner"


class OwnedFolder:
    """A new folder, ours until `close` or the end of this process."""

    def __init__(self, prefix: str, parent: Path | None, *, tidy: bool = True) -> None:
        """`tidy` removes what killed runs left beside it; not in a folder of the user's own, where other machines may write too and
        not see our locks."""
        home = Path(tempfile.gettempdir()) if parent is None else parent
        if tidy:
            remove_abandoned(home, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
        # Locked before it gets its name: nobody ever finds a mark without its owner.
        file = os.open(self.path / f"{_MARK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: then nobody else finds it free either
            fcntl.flock(file, fcntl.LOCK_EX)
        (self.path / f"{_MARK}.new").rename(self.path / _MARK)
        self._file: int | None = file

    def close(self) -> None:
        if self._file is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._file)
            self._file = None


def remove_if_abandoned(folder: Path) -> None:
    """Removes an owned folder whose owner is gone; anything else is left alone."""
    with _lock_of(folder) as free:
        if free:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("removed %s, which its owner left behind", folder)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """What earlier runs of this user left: they were killed before they could tidy up."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid():
                    remove_if_abandoned(folder)


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[bool]:
    """Whether nobody holds the folder; held by us meanwhile."""
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
