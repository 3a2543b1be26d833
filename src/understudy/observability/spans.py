"""spans.jsonl: one line per unit of work: name, start, end, and what it was about.

Times are seconds since the run's start on the monotonic clock, so lines of one process compare exactly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has begun and not ended."""

    name: str
    start: float
    about: Mapping[str, Any]
    number: int = 0
    parent: int | None = None
    """The number of the enclosing span, also for a task that was started in it; None at the top."""


_within: ContextVar[int | None] = ContextVar("span", default=None)


class _Span:
    """The context manager of one span. A class, because a step has hundreds of spans and a generator costs
    twice as much."""

    __slots__ = ("_about", "_name", "_number", "_parent", "_spans", "_start")

    def __init__(self, spans: Spans, name: str, about: Mapping[str, Any]) -> None:
        self._spans, self._name, self._about = spans, name, about

    def __enter__(self) -> None:
        self._start = time.monotonic()
        self._parent = _within.get()
        self._number = self._spans.begin(self._name, self._start, self._about, self._parent)
        _within.set(self._number)

    def __exit__(self, *raised: object) -> None:
        _within.set(self._parent)
        self._spans.end(self._number, self._name, self._start, self._about)


class Spans:
    def __init__(self, path: Path | None) -> None:
        self._handle = path.open("ab") if path else None
        self._zero = time.monotonic()
        self._totals: dict[str, float] = {}
        self._numbers = itertools.count()
        self._open: dict[int, OpenSpan] = {}
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self.last_end = self._zero
        """When a span last ended, on the monotonic clock; shows that the run makes progress."""

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        return _Span(self, name, about)

    def begin(self, name: str, start: float, about: Mapping[str, Any], parent: int | None = None) -> int:
        number = next(self._numbers)
        self._open[number] = OpenSpan(name, start, about, number, parent)
        return number

    def end(self, number: int, name: str, start: float, about: Mapping[str, Any]) -> None:
        end = self.last_end = time.monotonic()
        del self._open[number]
        self._totals[name] = self._totals.get(name, 0.0) + end - start
        if self._handle:
            times = {"start": round(start - self._zero, 6), "end": round(end - self._zero, 6)}
            self._handle.write(self._encode({"name": name, **times, **about}) + b"\n")

    def under_way(self) -> list[OpenSpan]:
        """The open spans, oldest first."""
        return list(self._open.values())

    def take_totals(self) -> dict[str, float]:
        """Seconds per name since the last call; concurrent spans add up, so a total may exceed the wall clock."""
        totals, self._totals = self._totals, {}
        return totals

    def flush(self) -> None:
        if self._handle:
            self._handle.flush()

    def close(self) -> None:
        """Closes the file. Spans that are still open may end later, but are no longer written."""
        if self._handle:
            self._handle.close()
            self._handle = None
