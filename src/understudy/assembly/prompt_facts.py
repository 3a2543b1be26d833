"""What a run's prompts ask of its teachers: the longest one, mixtures, prompts that teachers read themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import cache

from transformers import PreTrainedTokenizerBase

from understudy.config import RolloutConfig, TeacherConfig
from understudy.errors import DataError
from understudy.planning.teacher_checks import own_prompts
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, Row
from understudy.rollout.render import Renderer
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.types.usable_ids import UsableIds

_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""
_NO_LIMIT = 1 << 30


def once_longest_prompt(
    renderer: Renderer, dataset: Dataset, scores: Callable[[str, Row], bool]
) -> Callable[[str], Awaitable[int]]:
    """A function for the tokens of the longest prompt that a teacher scores. Prompts are measured once, on the
    first call, in a thread: the event loop starts teachers meanwhile."""

    @cache
    def measuring() -> asyncio.Task[list[int]]:
        return asyncio.create_task(asyncio.to_thread(prompt_lengths, renderer, dataset))

    async def longest(teacher: str) -> int:
        lengths = await measuring()
        return max(
            (one for one, row in zip(lengths, dataset.rows, strict=True) if scores(teacher, row)), default=0
        )

    return longest


def prompt_lengths(renderer: Renderer, dataset: Dataset) -> list[int]:
    """Tokens of each prompt; 0 for one that the renderer refuses, which never reaches a teacher."""
    lengths = []
    for start in range(0, len(dataset), _AT_A_TIME):
        ordinals = range(start, min(start + _AT_A_TIME, len(dataset)))
        prompts = [dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0) for ordinal in ordinals]
        renderer.ahead(prompts)
        for prompt in prompts:
            try:
                lengths.append(len(renderer.render(prompt)))
            except DataError:  # becomes a dead letter when its turn comes
                lengths.append(0)
    return lengths


def mixed_teachers(dataset: Dataset, column: str) -> set[str]:
    """All teachers that rows name in mixtures."""
    named: set[str] = set()
    for row in dataset.rows:
        weights = row.get(column)
        if isinstance(weights, Mapping):
            named |= {str(name) for name, weight in weights.items() if weight}
    return named


def teacher_prompts_of(
    teachers: Mapping[str, TeacherConfig],
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    usable: UsableIds | None,
    stack: AsyncExitStack,
) -> TeacherPrompts:
    """The prompts that teachers read instead of the student's; `stack` closes what their tools opened."""
    own = own_prompts(teachers)
    renderer = Renderer(tokenizer, context=_NO_LIMIT, reserve=0, template_options=rollout.template_options)
    if not own:
        return TeacherPrompts(own, renderer, lambda prompt: None, usable)
    loops = LoopChoice(rollout.agent, rollout.agent_options)
    stack.push_async_callback(loops.close)
    return TeacherPrompts(own, renderer, loops.schemas, usable)


def longest_own_prompt(
    prompts: TeacherPrompts, teacher: str, dataset: Dataset, scored: Callable[[Row], bool]
) -> int:
    """Tokens of the longest prompt that a teacher reads itself, among the rows that it scores."""
    longest = 0
    for ordinal, row in enumerate(dataset.rows):
        if scored(row):
            with suppress(DataError):  # becomes a dead letter when its turn comes
                ids = prompts.ids(teacher, dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0))
                longest = max(longest, 0 if ids is None else len(ids))
    return longest
