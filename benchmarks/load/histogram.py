"""Latencies in buckets 2 % apart, from a microsecond to an hour: its memory does not grow with what it counts."""

from __future__ import annotations

import math

_SMALLEST, _RATIO = 1e-6, 1.02
_BUCKETS = math.ceil(math.log(3600 / _SMALLEST) / math.log(_RATIO))


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)

    def add(self, seconds: float) -> None:
        place = math.log(max(seconds, _SMALLEST) / _SMALLEST) / math.log(_RATIO)
        self._counts[min(int(place), _BUCKETS)] += 1

    def merge(self, counts: list[int]) -> None:
        self._counts = [own + other for own, other in zip(self._counts, counts, strict=True)]

    @property
    def counts(self) -> list[int]:
        return self._counts

    def quantile(self, share: float) -> float:
        """The upper end of the bucket that holds this share of all latencies; 0 without any."""
        wanted, seen = share * sum(self._counts), 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return _SMALLEST * _RATIO ** (place + 1)
        return 0.0

    def summary(self) -> dict[str, float]:
        return {"p50": self.quantile(0.5), "p99": self.quantile(0.99)}
