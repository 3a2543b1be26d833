"""Output to a terminal that may be closed.

After a terminal is closed, output is discarded, and the command continues to its end, or to the stop that
SIGHUP asks for.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO, cast


def survive_closed_terminal() -> None:
    """From now on the command survives the closing of its terminal."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, cast(TextIO, ClosableTerminal(getattr(sys, name))))


class ClosableTerminal:
    """A text stream that discards what is written once its terminal is closed, instead of raising EIO."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

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
        if error.errno != errno.EIO:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()  # discards what the stream still buffered
