"""The length that rows can reach, for engines that reserve memory for their longest row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt

_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""


def longest_row(renderer: Renderer, prompts: Iterable[Prompt], agent: str, new_tokens: int) -> int | None:
    """Tokens of the longest prompt and its answer. None if the loop of a row is not `single_turn`: how many turns
    follow is not known beforehand. `agent`: the loop of rows that name none."""
    longest, coming = 0, iter(prompts)
    while some := list(islice(coming, _AT_A_TIME)):
        if any((prompt.columns.get("agent") or agent) != "single_turn" for prompt in some):
            return None
        renderer.ahead(some)
        for prompt in some:
            with suppress(DataError):  # becomes a dead letter when its turn comes, and reaches no engine
                longest = max(longest, len(renderer.render(prompt)))
    return longest + new_tokens


def prompts_of(*datasets: Dataset | None) -> Iterator[Prompt]:
    for dataset in datasets:
        for ordinal in range(len(dataset) if dataset is not None else 0):
            assert dataset is not None
            yield dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0)
