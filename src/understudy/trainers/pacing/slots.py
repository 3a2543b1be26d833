"""The gate between prompts and producers: a count that waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from understudy.planning.windows import Windows


@dataclass(slots=True)
class Production:
    unfinished: int
    """Prompts not yet admitted, or not yet through."""
    filtered: int = 0
    """Prompts that taught nothing and were taken out (`rollout.filter_groups`)."""
    refills: int = 0
    """The most often one of its places had to be filled again."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, prompts: int) -> None:
        self.unfinished -= prompts
        if self.unfinished == 0:
            self.complete.set()


class Slots:
    """Says how many prompts may be admitted, and wakes the admission when a publish frees some.

    `ceiling` may be lowered below the windows' own number of slots (never under one window): that only makes rows
    fresher, so the bound stands.
    """

    def __init__(self, windows: Windows, admitted: int, published: int) -> None:
        self.windows = windows
        self.admitted = admitted
        self.published = published
        self.ceiling = windows.slots
        self._changed = asyncio.Event()

    @property
    def room(self) -> int:
        return max(0, self.windows.admissible(self.published, self.ceiling) - self.admitted)

    @property
    def in_use(self) -> int:
        return self.admitted - min(self.published * self.windows.size, self.windows.prompts)

    @property
    def exhausted(self) -> bool:
        """Every prompt of the run has been admitted."""
        return self.admitted >= self.windows.prompts

    async def wait_for_room(self) -> int:
        while self.room == 0 and not self.exhausted:
            self._changed.clear()
            await self._changed.wait()
        return self.room

    def charge(self, count: int) -> None:
        if count > self.room:
            raise AssertionError(f"{count} prompts admitted where {self.room} slots were free")
        self.admitted += count

    def publish(self) -> None:
        """Weights that include one more window are out: its slots are free."""
        self.published += 1
        self._changed.set()

    def set_ceiling(self, slots: int) -> None:
        self.ceiling = max(self.windows.size, min(slots, self.windows.slots))
        self._changed.set()
