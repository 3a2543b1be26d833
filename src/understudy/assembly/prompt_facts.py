"""Facts about a run's prompts that its teachers must fit: the longest one, and the mixtures they name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.render import Renderer

_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""


class LongestPrompt:
    """The length of the longest prompt. Measured once, on the first call, in a thread: the event loop starts
    teachers meanwhile."""

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
    """Tokens of the longest prompt that the renderer accepts. Longer ones never reach a teacher."""
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
    """All teachers that rows name in mixtures."""
    named: set[str] = set()
    for row in dataset.rows:
        weights = row.get(column)
        if isinstance(weights, Mapping):
            named |= {str(name) for name, weight in weights.items() if weight}
    return named
