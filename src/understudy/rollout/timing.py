"""Where a rollout's time goes: seconds per activity of every row, and a batch's summary.

loop        the agent loop from beginning to end, and inside it
  generate    waiting for tokens, and for a place in the engine
  tool        running tools
reward      judging what was written
score       waiting for the teacher
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.rollout.agents.agent import AgentLoop, LoopContext
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class TimedLoop:
    """Any loop, with `extra["seconds"]` on its trajectories: `generate`, `loop`, and what the loop itself reports."""

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
        spent = {"generate": generating, "loop": time.perf_counter() - start}
        return [
            replace(one, extra={**one.extra, "seconds": {**spent, **one.extra.get("seconds", {})}})
            for one in trajectories
        ]

    async def close(self) -> None:
        close = getattr(self.loop, "close", None)
        if close is not None:
            await close()


class BatchTimings:
    """Collects rows' seconds until somebody takes the summary: one step's rows, or those that came in since."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}
        self._lengths: dict[str, tuple[int, int]] = {}

    def add(self, key: str, seconds: Mapping[str, float]) -> None:
        """More seconds of a row; an activity named twice adds up."""
        spent = self._rows.setdefault(key, {})
        for activity, value in seconds.items():
            spent[activity] = spent.get(activity, 0.0) + value

    def lengths(self, key: str, tokens: int, written: int) -> None:
        """How long a row is, and how many of its tokens the student wrote."""
        self._lengths[key] = (tokens - written, written)

    def during(self, key: str, activity: str) -> AbstractContextManager[None]:
        return _During(self, key, activity)

    def take(self) -> dict[str, float | str]:
        """`time/rollout/{activity}/{min,mean,max}`, and `time/rollout/slowest/…` of the row that took longest in all."""
        rows, self._rows = self._rows, {}
        lengths, self._lengths = self._lengths, {}
        summary: dict[str, float | str] = {}
        for activity in sorted({activity for spent in rows.values() for activity in spent}):
            values = [spent[activity] for spent in rows.values() if activity in spent]
            for name, value in (
                ("min", min(values)),
                ("mean", sum(values) / len(values)),
                ("max", max(values)),
            ):
                summary[f"time/rollout/{activity}/{name}"] = value
        if rows:
            slowest = max(rows, key=lambda key: sum(rows[key].get(part, 0.0) for part in _WHOLE))
            summary["time/rollout/slowest/key"] = slowest
            summary |= {
                f"time/rollout/slowest/{activity}": value for activity, value in sorted(rows[slowest].items())
            }
            if slowest in lengths:
                read, written = lengths[slowest]
                summary["time/rollout/slowest/prompt_length"] = float(read)
                summary["time/rollout/slowest/response_length"] = float(written)
        return summary


class _During:
    """The context of `during`: a class, because every row has several."""

    __slots__ = ("_activity", "_key", "_start", "_timings")

    def __init__(self, timings: BatchTimings, key: str, activity: str) -> None:
        self._timings, self._key, self._activity = timings, key, activity

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self._timings.add(self._key, {self._activity: time.perf_counter() - self._start})


_WHOLE = ("loop", "reward", "score")
"""What a row's time is made of; generating and tools are inside its loop."""
