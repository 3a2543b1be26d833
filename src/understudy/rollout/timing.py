"""Timing of rollouts: seconds per activity of every row, and a summary per batch.

loop        the whole agent loop, which includes
  generate    waiting for the engine: queueing and decoding
  tool        running tools
reward      computing the reward
score       waiting for the teacher
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.rollout.agents.agent import AgentLoop, LoopContext
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class TimedLoop:
    """Wraps a loop and adds `extra["seconds"]` to its trajectories: `generate`, `loop`, and what the loop
    reports."""

    def __init__(self, loop: AgentLoop) -> None:
        self.loop = loop

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        start = time.perf_counter()
        generating = 0.0

        async def generate(
            tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
        ) -> Generation:
            nonlocal generating
            asked = time.perf_counter()
            try:
                if media is None:
                    return await context.generate(tokens, sampling, turn)
                return await context.generate(tokens, sampling, turn, media)
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
    """Collects the seconds of rows until the trainer takes the summary: of one step, or since the last
    call."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}
        self._lengths: dict[str, tuple[int, int]] = {}

    def add(self, key: str, seconds: Mapping[str, float]) -> None:
        """Add seconds of a row; repeated activities are summed."""
        spent = self._rows.setdefault(key, {})
        for activity, value in seconds.items():
            spent[activity] = spent.get(activity, 0.0) + value

    def lengths(self, key: str, tokens: int, written: int) -> None:
        """Record a row's length, and how many of its tokens the student wrote."""
        self._lengths[key] = (tokens - written, written)

    @contextmanager
    def during(self, key: str, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(key, {activity: time.perf_counter() - start})

    def take(self) -> dict[str, float | str]:
        """`time/rollout/{activity}/{min,mean,max}`, and `time/rollout/slowest/…` of the row with the largest
        total."""
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


_WHOLE = ("loop", "reward", "score")
"""The parts of a row's total time; `generate` and `tool` are inside `loop`."""
