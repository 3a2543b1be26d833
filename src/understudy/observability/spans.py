"""spans.jsonl: every arrow of the drawing leaves a line: name, start, end, and what it was about.

Times are seconds since the run's own zero on the monotonic clock, so lines of one process compare exactly.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """Something that has begun and not ended."""

    name: str
    start: float
    about: Mapping[str, Any]


class Spans:
    def __init__(self, path: Path | None) -> None:
        self._handle = path.open("a") if path else None
        self._zero = time.monotonic()
        self._totals: dict[str, float] = {}
        self._numbers = itertools.count()
        self._open: dict[int, OpenSpan] = {}
        self.last_end = self._zero
        """When anything last ended, on the monotonic clock: the sign of progress."""

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        start, number = time.monotonic(), next(self._numbers)
        self._open[number] = OpenSpan(name, start, about)
        try:
            yield
        finally:
            end = self.last_end = time.monotonic()
            del self._open[number]
            self._totals[name] = self._totals.get(name, 0.0) + end - start
            if self._handle:
                line = {
                    "name": name,
                    "start": round(start - self._zero, 6),
                    "end": round(end - self._zero, 6),
                    **about,
                }
                self._handle.write(json.dumps(line) + "\n")

    def under_way(self) -> list[OpenSpan]:
        """What has begun and not ended, oldest first."""
        return list(self._open.values())

    def take_totals(self) -> dict[str, float]:
        """Seconds per name since the last call; concurrent spans add up, so a total may exceed the wall clock."""
        totals, self._totals = self._totals, {}
        return totals

    def flush(self) -> None:
        if self._handle:
            self._handle.flush()

    def close(self) -> None:
        if self._handle:
            self._handle.close()
