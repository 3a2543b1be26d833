"""Metrics by name: the steps and values of each key of metrics.jsonl, filled line by line."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: `values[i]` was recorded at `steps[i]`."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def last(self, count: int) -> list[float]:
        return list(self.values[-count:])

    def ends(self, window: int) -> tuple[float, float] | None:
        """Medians of the first and of the last `window` values; None if the two windows would overlap."""
        if len(self) < 2 * window:
            return None
        return median(self.values[:window]), median(self.values[-window:])


class History:
    """Every metric of a run. Used by one thread at a time."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.series: dict[str, Series] = {}
        self.steps = 0
        """The last step recorded."""
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Numbers only: text and null (a value that was not finite) have no place on a curve."""
        step = line.get("step")
        if type(step) is not int:
            return
        self.steps = step
        for key, value in line.items():
            if type(value) in (int, float) and key != "step" and math.isfinite(value):
                one = self.series.get(key)
                if one is None:
                    one = self.series[key] = Series()
                one.steps.append(step)
                one.values.append(value)

    def get(self, key: str) -> Series:
        return self.series.get(key) or Series()

    def named(self, prefix: str, suffix: str = "") -> dict[str, Series]:
        """The series whose key is prefix + NAME + suffix, by NAME. With a suffix NAME has no slash; a data source at the
        end of a key may have one (`openai/gsm8k`)."""
        found = {}
        for key, one in self.series.items():
            if key.startswith(prefix) and key.endswith(suffix) and len(key) > len(prefix) + len(suffix):
                name = key[len(prefix) : len(key) - len(suffix)]
                if not suffix or "/" not in name:
                    found[name] = one
        return found
