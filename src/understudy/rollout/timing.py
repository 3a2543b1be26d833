"""Where a rollout's time goes: seconds per activity on every trajectory, and a batch's summary."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.rollout.agent import AgentLoop, LoopContext
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class TimedLoop:
    """Any loop, with `extra["seconds"]` on its trajectories: `generate`, `total`, and what the loop itself reports."""

    def __init__(self, loop: AgentLoop) -> None:
        self.loop = loop

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        start = time.perf_counter()
        generating = 0.0

        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            nonlocal generating
            asked = time.perf_counter()
            try:
                return await context.generate(tokens, sampling, turn)
            finally:
                generating += time.perf_counter() - asked

        trajectories = await self.loop.run(prompt, replace(context, generate=generate))
        spent = {"generate": generating, "total": time.perf_counter() - start}
        return [
            replace(one, extra={**one.extra, "seconds": {**spent, **one.extra.get("seconds", {})}})
            for one in trajectories
        ]

    async def close(self) -> None:
        close = getattr(self.loop, "close", None)
        if close is not None:
            await close()


def timing_summary(trajectories: Iterable[Trajectory]) -> dict[str, float | str]:
    """`timing/rollout/{activity}/{min,mean,max}` over a batch, and which row took longest in all."""
    seconds: dict[str, list[float]] = {}
    slowest, longest = "", -1.0
    for one in trajectories:
        spent: Mapping[str, float] = one.extra.get("seconds", {})
        for activity, value in spent.items():
            seconds.setdefault(activity, []).append(value)
        if spent.get("total", 0.0) > longest:
            slowest, longest = one.key, spent.get("total", 0.0)
    summary: dict[str, float | str] = {}
    for activity, values in sorted(seconds.items()):
        for name, value in (("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))):
            summary[f"timing/rollout/{activity}/{name}"] = value
    if seconds:
        summary["timing/rollout/slowest"] = slowest
    return summary
