"""How far the rows of one window have come, in a fully async run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


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
