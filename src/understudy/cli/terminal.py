"""Output to a terminal that may be closed, and messages to a file on a disk that may be full.

After a terminal is closed, output is discarded, and the command continues to its end, or to the stop that
SIGHUP asks for. A message on stderr that finds no room changes neither the command nor its exit code.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO, cast

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def survive_closed_terminal() -> None:
    """From now on the command survives the closing of its terminal, and a full disk under its stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            terminal = ClosableTerminal(getattr(sys, name), needs_room=name == "stdout")
            setattr(sys, name, cast(TextIO, terminal))


class ClosableTerminal:
    """A text stream that discards what is written once its terminal is closed, instead of raising EIO.

    Without `needs_room`, writes to a full disk do not raise either; the stream tries them again with the next."""

    def __init__(self, stream: TextIO, *, needs_room: bool = True) -> None:
        self._stream = stream
        self._needs_room = needs_room

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if error.errno in _NO_ROOM and not self._needs_room:
            return
        if error.errno != errno.EIO:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()  # discards what the stream still buffered
