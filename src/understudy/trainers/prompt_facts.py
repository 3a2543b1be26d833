"""What the prompts of a run ask of its teachers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.render import Renderer


def longest_prompt(tokenizer: Any, dataset: Dataset, room: int) -> int:
    """Tokens of the longest prompt among those of at most `room` tokens; longer ones never reach a teacher."""
    renderer, longest = Renderer(tokenizer, context=room), 0
    for ordinal in range(len(dataset)):
        try:
            tokens = renderer.render(dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0))
        except DataError:  # becomes a dead letter when its turn comes
            continue
        longest = max(longest, len(tokens))
    return longest


def mixed_teachers(dataset: Dataset, column: str) -> set[str]:
    """Every teacher that some row names in a mixture."""
    named: set[str] = set()
    for row in dataset.rows:
        weights = row.get(column)
        if isinstance(weights, Mapping):
            named |= {str(name) for name, weight in weights.items() if weight}
    return named
