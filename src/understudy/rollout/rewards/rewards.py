"""Task rewards: plain callables, one or several with weights.

    def reward(row, text) -> float                    text: what the student wrote in its last turn
    def reward(row, trajectory) -> float | dict       recognised by the second parameter's name, `trajectory`
    def reward(data_source, solution_str, ground_truth, extra_info) -> float | dict
                                                      verl's `compute_score`, recognised by these names
    async def …                                       any of them

A dict holds `score` (or `reward`) and any further numbers, which become metrics of the row. A text `feedback` in
it can be shown to a teacher (`session.feedback` in `teachers.NAME.prompt`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from understudy.errors import NO_THREAD, ClusterError, ConfigError, DataError
from understudy.rollout.loading import load_object
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.reward_threads import DaemonThreads
from understudy.rollout.rewards.trial import Shape, call_with, is_async, score_in, shape_of
from understudy.rollout.user_code import awaited
from understudy.types.prompt import Prompt
from understudy.types.trajectory import FEEDBACK, Trajectory

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Reward:
    """One reward function and its weight in the sum. Its signature is read once, not for every row."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.function)

    @cached_property
    def is_async(self) -> bool:
        return is_async(self.function)

    @property
    def wants_trajectory(self) -> bool:
        return self.shape is Shape.TRAJECTORY


def load_reward(name: str, weight: float = 1.0, key: str = "data.reward") -> Reward:
    """Loads a reward by `"module:function"`; any callable object is accepted. `key`: what named it, for errors."""
    function = load_object(name, key)
    if not callable(function):
        raise ConfigError(f'{key} = "{name}" is a {type(function).__name__}; expected a function (row, text)')
    return Reward(name.partition(":")[2], function, weight)


def last_turn(trajectory: Trajectory) -> np.ndarray:
    """The ids of the student's last turn."""
    written = trajectory.positions
    if len(written) == 0:
        return trajectory.tokens[:0]
    breaks = np.flatnonzero(np.diff(written) > 1)
    start = written[breaks[-1] + 1] if len(breaks) else written[0]
    return trajectory.tokens[start : written[-1] + 1]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The dataset row as it is passed to rewards."""
    content: dict[str, Any] = (
        {"prompt": prompt.text} if prompt.text is not None else {"messages": prompt.messages}
    )
    return {**prompt.columns, **content, "data_source": prompt.data_source}


class Rewards:
    """Computes the rewards of finished rollouts. Without reward functions, rows keep the reward of their
    loop, if any. Called on the event loop; sync functions run on daemon threads."""

    def __init__(self, rewards: Sequence[Reward], renderer: Renderer) -> None:
        self._rewards, self._renderer = tuple(rewards), renderer
        self._threads = DaemonThreads()

    @property
    def names(self) -> str:
        return ", ".join(reward.name for reward in self._rewards)

    def __len__(self) -> int:
        return len(self._rewards)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward (the weighted sum) and each function's numbers as metrics."""
        if not self._rewards:
            return trajectory
        row = row_of(prompt)
        text = self._renderer.decode(last_turn(trajectory))
        total, metrics, feedback = 0.0, dict(trajectory.metrics), []
        for reward in self._rewards:
            score, more, remark = await self._ask(
                reward, row, trajectory if reward.wants_trajectory else text, trajectory.key
            )
            total += reward.weight * score
            feedback += [remark] if remark else []
            metrics[f"reward/{reward.name}"] = score
            metrics.update({f"reward/{reward.name}/{name}": value for name, value in more.items()})
        extra = {**trajectory.extra, FEEDBACK: "\n".join(feedback)} if feedback else trajectory.extra
        return replace(trajectory, reward=total, metrics=metrics, extra=extra)

    async def close(self) -> None:
        """Closes reward objects (grading processes, connections)."""
        for reward in self._rewards:
            close = getattr(reward.function, "close", None)
            if inspect.iscoroutinefunction(close):
                await close()
        self._threads.shutdown()

    async def _ask(
        self, reward: Reward, row: Mapping[str, Any], answer: str | Trajectory, key: str
    ) -> tuple[float, dict[str, float], str]:
        try:
            call = partial(call_with, reward.function, reward.shape, row, answer)
            if reward.is_async:
                result = await awaited(call())
            else:
                # On a thread: a slow reward must not block other rollouts.
                result = await awaited(asyncio.get_running_loop().run_in_executor(self._threads, call))
            if inspect.isawaitable(result):  # of a plain function that wraps an async one
                result = await awaited(result)
        except Exception as error:
            if NO_THREAD in str(error):
                raise ClusterError(
                    f"reward {reward.name} got no thread: this machine is out of memory or of processes; stop other programs, "
                    "then `understudy resume`"
                ) from error
            raise DataError(
                f"reward {reward.name} raised on row {key}: {type(error).__name__}: {error}"
            ) from error
        remark = result.get(FEEDBACK) if isinstance(result, Mapping) else None
        return *_numbers(result, reward.name, key), remark if isinstance(remark, str) else ""


def _numbers(result: Any, name: str, key: str) -> tuple[float, dict[str, float]]:
    """(score, further numbers), all finite."""
    found = score_in(result)
    if found is None:
        raise DataError(
            f"reward {name} gave {result!r} for row {key}; expected a finite number, or a dict with `score`"
        )
    return found
