"""The slots that bound how many prompts are in flight, and the progress of one window's prompts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from understudy.planning.windows import Windows


@dataclass(slots=True)
class WindowProgress:
    """The progress of one window. Producers update it; the trainer's task waits for `complete`."""

    unfinished: int
    """Prompts not yet admitted, or not yet finished."""
    filtered: int = 0
    """Prompts without a learning signal that were removed (`rollout.filter_groups`)."""
    refills: int = 0
    """How often its most refilled place was refilled."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, prompts: int) -> None:
        self.unfinished -= prompts
        if self.unfinished == 0:
            self.complete.set()


class StalenessBudget:
    """How many prompts may be admitted. A publish frees slots and wakes the admission task.

    `ceiling` may be lowered below `windows.slots`, but not below one window. That only makes rows fresher, so
    the staleness bound still holds.
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
        """Weights trained on one more window were published, so its slots are free."""
        self.published += 1
        self._changed.set()

    def set_ceiling(self, slots: int) -> None:
        self.ceiling = max(self.windows.size, min(slots, self.windows.slots))
        self._changed.set()
