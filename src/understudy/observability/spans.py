"""spans.jsonl: one line per unit of work: name, start, end, and what it was about.

Times are seconds since the launch on the monotonic clock, so lines of one launch compare exactly. The first
line of a launch is `launch`, with its time of day.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger(__name__)


class OpenSpan(NamedTuple):
    """A span that has begun and not ended."""

    name: str
    start: float
    about: Mapping[str, Any]
    number: int = 0
    parent: int | None = None
    """The number of the enclosing span, also for a task that was started in it; None at the top."""


_within: ContextVar[int | None] = ContextVar("span", default=None)


class Spans:
    """The spans of one launch. They begin and end on the event loop, and a task knows the span in which it was started.
    `event` is called on the update thread too."""

    def __init__(self, path: Path | None) -> None:
        self._handle = path.open("ab") if path else None
        self._warned = False
        self._zero = time.monotonic()
        self._totals: dict[str, float] = {}
        self._numbers = itertools.count()
        self._open: dict[int, OpenSpan] = {}
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self.last_end = self._zero
        """When a span last ended, on the monotonic clock; shows that the run makes progress."""
        if path and self._handle and not _ends_with_a_line(path):
            # A killed launch left half a line, which would swallow the next one.
            with self._or_warn():
                self._handle.write(b"\n")
        self._write("launch", self._zero, self._zero, {"at": round(time.time(), 3)})

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Yields `about`: what the body adds to it is written too."""
        start, number, parent = time.monotonic(), next(self._numbers), _within.get()
        self._open[number] = OpenSpan(name, start, about, number, parent)
        _within.set(number)
        try:
            yield about
        finally:
            _within.set(parent)
            del self._open[number]
            end = self.last_end = time.monotonic()
            self._totals[name] = self._totals.get(name, 0.0) + end - start
            self._write(name, start, end, about)

    def event(self, text: str) -> None:
        """A span without duration: a replica was restarted, a row failed."""
        now = time.monotonic()
        self._write("event", now, now, {"text": text})

    def _write(self, name: str, start: float, end: float, about: Mapping[str, Any]) -> None:
        if self._handle:
            start, end = round(start - self._zero, 6), round(end - self._zero, 6)
            line = self._encode({"name": name, "start": start, "end": end, **about}) + b"\n"
            try:  # not `_or_warn`, which costs more than the write; a step has hundreds of spans
                self._handle.write(line)
            except OSError as error:
                self._warn(error)

    @contextmanager
    def _or_warn(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """A full disk costs spans, not the run. What is buffered is written once there is room."""
        if not self._warned:
            logger.warning("spans cannot be written: %s", error)
        self._warned = True

    def under_way(self) -> list[OpenSpan]:
        """The open spans, oldest first."""
        return list(self._open.values())

    def take_totals(self) -> dict[str, float]:
        """Seconds per name since the last call; concurrent spans add up, so a total may exceed the wall clock."""
        totals, self._totals = self._totals, {}
        return totals

    def flush(self) -> None:
        if self._handle:
            with self._or_warn():
                self._handle.flush()

    def close(self) -> None:
        """Closes the file. Spans that are still open may end later, but are no longer written."""
        if self._handle:
            with self._or_warn():
                self._handle.close()
            self._handle = None


def _ends_with_a_line(path: Path) -> bool:
    """Whether the file is empty or its last line is whole."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
