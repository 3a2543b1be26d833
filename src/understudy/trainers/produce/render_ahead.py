"""Renders the next step's prompts while this step's update runs.

Rendering is CPU work and needs no weights. In a sync step the event loop is otherwise idle while a thread or
a GPU updates the student. The prompts are only peeked from the cursor and none is issued, so checkpoints,
stops and crashes are not affected. If the next step gets other prompts, it renders those.
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
"""Prompts rendered at a time. They take one or two milliseconds; then the update's thread can get the
interpreter."""


async def with_next_prompts(system: System, work: Awaitable[Result]) -> Result:
    """The result of `work`, an update. Prompts of the next step are rendered during its backward pass, as
    many as time allows."""
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
    """Waits until the student's backward pass begins. Before that the update's thread needs the interpreter,
    and rendering would delay it."""
    policy = system.policy
    if not isinstance(policy, Policy):
        return  # it works in other processes
    begun, loop, before = asyncio.Event(), asyncio.get_running_loop(), policy.on_backward

    def tell() -> None:
        loop.call_soon_threadsafe(begun.set)

    policy.on_backward = tell
    try:
        await begun.wait()
    finally:
        policy.on_backward = before
