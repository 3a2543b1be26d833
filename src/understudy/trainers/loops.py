"""Agent loops as a recipe asks for them: in this process, or in worker processes."""

from __future__ import annotations

from pathlib import Path

from understudy.config import Recipe
from understudy.rollout.loops import LoopChoice, Loops
from understudy.rollout.render import Renderer
from understudy.rollout.workers import LoopWorkers


async def open_loops(recipe: Recipe, renderer: Renderer, tokenizer_folder: Path) -> Loops:
    """Ready to run. Workers read the tokenizer from `tokenizer_folder`, so that all use the very one this run uses."""
    rollout = recipe.rollout
    if rollout.workers == 0:
        return LoopChoice(rollout.agent, rollout.agent_options)
    renderer.tokenizer.save_pretrained(tokenizer_folder)
    workers = LoopWorkers(
        rollout.workers,
        tokenizer=tokenizer_folder,
        agent=rollout.agent,
        context=renderer.context,
        reserve=rollout.max_new_tokens,
        options=rollout.agent_options,
        template_options=rollout.template_options,
    )
    try:
        await workers.start()
    except BaseException:
        await workers.close()
        raise
    return workers
