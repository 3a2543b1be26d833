"""The next step's prompts are rendered beside an update, and nothing else is seen of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from learning_rig import batch_of, model, recipe_of

from understudy.assembly.build import objective_of, policy_settings
from understudy.policy.policy import Policy
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import load_dataset
from understudy.trainers.learn.update import learn
from understudy.trainers.produce.render_ahead import with_next_prompts
from understudy.trainers.system import Tally


class Rendering:
    def __init__(self) -> None:
        self.ready: list[str] = []

    def ahead(self, prompts: Any, *, forget: bool = True) -> None:
        self.ready = [*([] if forget else self.ready), *(prompt.key for prompt in prompts)]


def system_of(workers: int = 0) -> Any:
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(200)]
    recipe = SimpleNamespace(rollout=SimpleNamespace(workers=workers), trainer=SimpleNamespace(batch_size=70))
    return SimpleNamespace(
        recipe=recipe,
        cursor=PromptCursor(load_dataset(rows), seed=0, shuffle=True),
        renderer=Rendering(),
        policy=Policy(model(), policy_settings(recipe_of())),
    )


async def backward(system: Any, seconds: float = 0.2) -> str:
    """What an update does on its thread, and later than the first turn of the event loop."""
    await asyncio.sleep(0.02)
    assert system.renderer.ready == []  # not before the backward pass
    await asyncio.to_thread(system.policy.on_backward)
    await asyncio.sleep(seconds)
    return "result"


def test_the_prompts_that_come_next_are_ready_after_the_update() -> None:
    system = system_of()
    system.cursor.take(30)
    place, idle = system.cursor.state(), system.policy.on_backward
    assert asyncio.run(with_next_prompts(system, backward(system))) == "result"
    assert system.cursor.state() == place and system.policy.on_backward is idle
    assert system.renderer.ready == [prompt.key for prompt in system.cursor.take(70)]


def test_an_update_that_fails_fails_as_itself() -> None:
    system = system_of()
    idle = system.policy.on_backward

    async def broken() -> None:
        await backward(system, seconds=0)
        raise ValueError("no memory")

    async def never_begun() -> None:
        raise ValueError("no rows")

    for work, words in ((broken, "no memory"), (never_begun, "no rows")):
        system.renderer.ready = []
        with pytest.raises(ValueError, match=words):
            asyncio.run(with_next_prompts(system, work()))
        assert system.policy.on_backward is idle


def test_workers_render_for_themselves() -> None:
    system = system_of(workers=2)
    assert asyncio.run(with_next_prompts(system, backward(system, seconds=0))) == "result"
    assert system.renderer.ready == []


def test_a_real_update_says_when_its_backward_pass_begins() -> None:
    recipe = recipe_of()
    for lanes in (1, 2):
        policy = Policy(model(), policy_settings(recipe))
        policy.lanes.count = lanes
        begun: list[int] = []
        policy.on_backward = lambda policy=policy, begun=begun: begun.append(policy.updates)
        system = SimpleNamespace(
            recipe=recipe,
            policy=policy,
            critic=None,
            reference=None,
            objective=objective_of(recipe),
            teacher_heads=None,
            micro_batches=SimpleNamespace(tokens=lambda recipe: 4096),
            tally=Tally(),
        )
        learn(system, batch_of())
        assert begun and set(begun) == {0}
