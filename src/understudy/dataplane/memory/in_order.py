"""A priority queue for the entries of a view, fast when entries arrive in order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[object, ...])


class InOrder(Generic[Entry]):
    """Entries that arrive in order, nearly all, go into a deque: push and pop are O(1). Entries that arrive
    out of order (released rows, smaller keys) go into a heap."""

    __slots__ = ("_early", "_rest")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._rest = deque(sorted(entries))
        self._early: list[Entry] = []

    def __len__(self) -> int:
        return len(self._rest) + len(self._early)

    def push(self, entry: Entry) -> None:
        rest = self._rest
        if not rest or rest[-1] < entry:
            rest.append(entry)
        else:
            heapq.heappush(self._early, entry)

    def first(self) -> Entry | None:
        rest, early = self._rest, self._early
        if early and (not rest or early[0] < rest[0]):
            return early[0]
        return rest[0] if rest else None

    def take_out(self, first: Entry) -> None:
        """Remove the entry that `first()` returned."""
        if self._rest and self._rest[0] is first:
            self._rest.popleft()
        else:
            heapq.heappop(self._early)
