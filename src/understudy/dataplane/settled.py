"""The keys that were settled (trained, dead or evicted), so that none is ever made or trained again.

A long run settles tens of millions of keys. A set of strings would take a gigabyte, so 64-bit hashes are kept: a
small set of recent ones, merged into a sorted array (8 bytes a key) whenever it fills. Two keys of one run share a
hash with probability n² / 2⁶⁵ (3 in a million for 10 million keys); the second would be left out, never trained twice.
"""

from __future__ import annotations

import numpy as np


class SettledKeys:
    def __init__(self, merge_at: int = 65536) -> None:
        self._recent: set[int] = set()
        self._sorted = np.empty(0, np.int64)
        self._merge_at = merge_at

    def add(self, key: str) -> None:
        self._recent.add(hash(key))
        if len(self._recent) >= self._merge_at:
            fresh = np.fromiter(self._recent, np.int64, len(self._recent))
            self._sorted = np.union1d(self._sorted, fresh)
            self._recent.clear()

    def __contains__(self, key: str) -> bool:
        value = hash(key)
        if value in self._recent:
            return True
        if not len(self._sorted):
            return False
        place = int(np.searchsorted(self._sorted, value))
        return place < len(self._sorted) and int(self._sorted[place]) == value

    def __len__(self) -> int:
        return len(self._recent) + len(self._sorted)
