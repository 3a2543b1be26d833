"""The set of settled keys (trained, dead or evicted), which are never made or trained again.

A long run settles tens of millions of keys. A set of strings would take a gigabyte, so 64-bit hashes are
kept: a small set of recent ones, merged into a sorted array (8 bytes per key) whenever it is full. Two keys
of one run share a hash with probability n² / 2⁶⁵ (3 in a million for 10 million keys). The second one would
then be skipped; no key is trained twice.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np


class SettledKeys:
    def __init__(self, merge_at: int = 65536) -> None:
        self._recent: set[int] = set()
        self._sorted = array("q")
        self._merge_at = merge_at

    def add(self, key: str) -> None:
        self._recent.add(hash(key))
        if len(self._recent) >= self._merge_at:
            self._merge()

    def _merge(self) -> None:
        """Merge by insertion, which copies; sorting all keys again would cost more per key as the array
        grows."""
        fresh = np.sort(np.fromiter(self._recent, np.int64, len(self._recent)))
        known = np.frombuffer(self._sorted, np.int64)
        places = np.searchsorted(known, fresh)
        new = np.ones(len(fresh), bool)
        inside = places < len(known)
        new[inside] = known[places[inside]] != fresh[inside]
        merged = np.insert(known, places[new], fresh[new])
        # As an `array`: reading single elements is much faster than with numpy.
        self._sorted = array("q", (0,)) * len(merged)
        np.frombuffer(self._sorted, np.int64)[:] = merged
        self._recent.clear()

    def __contains__(self, key: str) -> bool:
        value = hash(key)
        if value in self._recent:
            return True
        place = bisect_left(self._sorted, value)
        return place < len(self._sorted) and self._sorted[place] == value

    def __len__(self) -> int:
        return len(self._recent) + len(self._sorted)
