"""Output to a terminal that may go away.

A terminal that is closed takes no more output: what is printed from then on goes nowhere, and the command goes on to its end, or
to the stop that SIGHUP asks for.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO, cast


def outlive_the_terminal() -> None:
    """From now on the end of a terminal does not end what prints to it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, cast(TextIO, ClosableTerminal(getattr(sys, name))))


class ClosableTerminal:
    """A stream of text that loses what it is given once its terminal is closed, instead of raising EIO."""

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
        self._stream.flush()  # what the stream still held
