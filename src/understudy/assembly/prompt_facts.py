"""What the prompts of a run ask of its teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.render import Renderer

_AT_A_TIME = 256
"""Prompts rendered in one go, which is half the work."""


class LongestPrompt:
    """Measured when the first teacher asks, once for all of them; not on the event loop, which has teachers to start."""

    def __init__(self, renderer: Renderer, dataset: Dataset) -> None:
        self._renderer, self._dataset = renderer, dataset
        self._measuring: asyncio.Task[int] | None = None

    async def __call__(self) -> int:
        if self._measuring is None:
            self._measuring = asyncio.create_task(
                asyncio.to_thread(longest_prompt, self._renderer, self._dataset)
            )
        return await self._measuring


def longest_prompt(renderer: Renderer, dataset: Dataset) -> int:
    """Tokens of the longest prompt among those the renderer has room for; longer ones never reach a teacher."""
    longest = 0
    for start in range(0, len(dataset), _AT_A_TIME):
        ordinals = range(start, min(start + _AT_A_TIME, len(dataset)))
        prompts = [dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0) for ordinal in ordinals]
        renderer.ahead(prompts)
        for prompt in prompts:
            try:
                longest = max(longest, len(renderer.render(prompt)))
            except DataError:  # becomes a dead letter when its turn comes
                continue
    return longest


def mixed_teachers(dataset: Dataset, column: str) -> set[str]:
    """Every teacher that some row names in a mixture."""
    named: set[str] = set()
    for row in dataset.rows:
        weights = row.get(column)
        if isinstance(weights, Mapping):
            named |= {str(name) for name, weight in weights.items() if weight}
    return named
