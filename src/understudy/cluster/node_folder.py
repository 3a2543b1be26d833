"""The folder of a supervisor on its machine, for logs and ready files; what killed ones left there is swept by the next.

    /tmp/understudy-node-…/.owner   locked while its supervisor lives

The kernel lets go of the lock with the process, kill -9 included, whichever container or pid namespace it was in. A folder
without the mark is left alone: whose it is cannot be told.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "understudy-node-"
_MARK = ".owner"


class NodeFolder:
    """A new folder, ours until `close` or the end of this process."""

    def __init__(self) -> None:
        home = Path(tempfile.gettempdir())
        sweep(home)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
        unnamed = self.path / f"{_MARK}.new"
        self._file: int | None = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: nobody else can take one there either
            fcntl.flock(self._file, fcntl.LOCK_EX)
        # Locked before it gets its name: nobody ever finds a mark without its owner.
        unnamed.rename(self.path / _MARK)

    def close(self) -> None:
        if self._file is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._file)
            self._file = None


def sweep(home: Path) -> None:
    """Removes folders of this user's supervisors that are gone."""
    with contextlib.suppress(OSError):
        for folder in home.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """`OSError` where it is still held, or has no mark."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    file = os.open(folder / _MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        logger.info("removed %s, which a supervisor left behind", folder)
    finally:
        os.close(file)
