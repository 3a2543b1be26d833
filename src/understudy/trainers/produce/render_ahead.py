"""The next step's prompts, rendered while this step's update runs.

Rendering is the host's work and needs no weights; in a sync step the event loop has nothing else to do while a thread or a GPU
updates the student. Only what the cursor shows is rendered: nothing is issued, so a checkpoint, a stop or a crash knows
nothing of it, and a step that does come to other prompts renders those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from understudy.policy.policy import Policy
from understudy.rollout.cursor import PromptCursor
from understudy.trainers.system import System

Result = TypeVar("Result")

PIECE = 32
"""Prompts rendered at a time: one or two milliseconds, after which the update's thread has its turn at Python again."""


async def with_next_prompts(system: System, work: Awaitable[Result]) -> Result:
    """What `work`, an update, gives; the prompts of the next step are rendered beside its backward pass, as far as there is time."""
    cursor = system.cursor
    if system.recipe.rollout.workers or not isinstance(cursor, PromptCursor):
        return await work  # workers render their prompts themselves
    rendering = asyncio.create_task(_render(system, cursor))
    try:
        return await work
    finally:
        rendering.cancel()


async def _render(system: System, cursor: PromptCursor) -> None:
    await _backward(system)
    prompts = cursor.peek(system.recipe.trainer.batch_size)
    system.renderer.ahead(())
    for start in range(0, len(prompts), PIECE):
        system.renderer.ahead(prompts[start : start + PIECE], forget=False)
        await asyncio.sleep(0)


async def _backward(system: System) -> None:
    """Waits until the student's gradients are being computed. Before that the update's thread needs Python itself: whatever else
    ran here would take its time, not add to it."""
    policy = system.policy
    if not isinstance(policy, Policy):
        return  # it works in processes of its own
    begun, loop, before = asyncio.Event(), asyncio.get_running_loop(), policy.on_backward

    def tell() -> None:
        loop.call_soon_threadsafe(begun.set)

    policy.on_backward = tell
    try:
        await begun.wait()
    finally:
        policy.on_backward = before
