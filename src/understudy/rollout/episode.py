"""One session of one prompt, from rendering to reward, under a deadline; a bad one is data, not a crash."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.errors import DataError, EngineError
from understudy.rollout.agent import LoopContext
from understudy.rollout.gather import Gather
from understudy.rollout.loops import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.rewards import Rewards
from understudy.rollout.seeds import derive_seed
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory


class DeathCause(StrEnum):
    """Why a session gave no row to train on."""

    DATA = "data"
    """The row cannot be rendered, fits no context, or its reward is not a number."""
    LOOP = "loop"
    """The agent loop (or a user's code in it) raised."""
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A session that cannot be trained on, with everything needed to see why."""

    key: str
    prompt: Prompt
    session: int
    cause: DeathCause
    message: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """A session that ended well."""

    prompt: Prompt
    session: int
    trajectories: tuple[Trajectory, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: `generate`, `reward`, `total`, and what the loop reports (`tool`). Not deterministic."""


Outcome = Episode | DeadLetter


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Attempts prompts. One instance serves a whole run."""

    gather: Gather
    loops: LoopChoice
    renderer: Renderer
    rewards: Rewards
    sampling: Sampling
    run_seed: int
    context: int
    """The longest sequence the student can hold."""
    sessions: int = 1
    """Rollouts per prompt."""
    deadline_s: float = 3600.0
    """For one session, everything included."""

    async def attempt_all(self, prompts: Sequence[Prompt]) -> AsyncIterator[Outcome]:
        """Every session of every prompt, concurrently; outcomes in the order they end."""
        work = [(prompt, session) for prompt in prompts for session in range(self.sessions)]
        for _ in work:
            self.gather.join()
        tasks = [asyncio.ensure_future(self._member(prompt, session)) for prompt, session in work]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def attempt(self, prompt: Prompt, session: int) -> Outcome:
        """One session by itself."""
        self.gather.join()
        return await self._member(prompt, session)

    async def _member(self, prompt: Prompt, session: int) -> Outcome:
        clock = _Clock()
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self.gather.leave()

        try:
            async with asyncio.timeout(self.deadline_s):
                trajectories = await self._run_loop(prompt, session, clock)
                leave()  # rewards need no generation: do not hold the others up
                with clock.measure("reward"):
                    judged = [await self.rewards.judge(prompt, trajectory) for trajectory in trajectories]
            return Episode(prompt, session, tuple(judged), clock.seconds())
        except EngineError:
            raise  # not this row's fault
        except TimeoutError:
            message = f"session {row_key(prompt.key, session)} was not done after {self.deadline_s:g} s (rollout.deadline_s)"
            return self._dead(prompt, session, DeathCause.DEADLINE, message)
        except DataError as error:
            return self._dead(prompt, session, DeathCause.DATA, str(error))
        except Exception as error:
            return self._dead(
                prompt, session, DeathCause.LOOP, f"{type(error).__name__}: {error}", traceback.format_exc()
            )
        finally:
            leave()

    async def _run_loop(self, prompt: Prompt, session: int, clock: _Clock) -> list[Trajectory]:
        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            key = f"{row_key(prompt.key, session)}_{turn:04d}"
            room = self.context - len(tokens)
            if room < 1:
                raise DataError(
                    f"{key} has {len(tokens)} tokens; the context is {self.context}, so no token can follow"
                )
            if sampling.max_new_tokens > room:
                sampling = replace(sampling, max_new_tokens=room)
            seed = derive_seed(self.run_seed, prompt.epoch, prompt.key, session, turn)
            request = GenerateRequest(key, tokens, sampling, seed, session=row_key(prompt.key, session))
            with clock.measure("generate"):
                return await self.gather.generate(request)

        context = LoopContext(generate, self.renderer, self.sampling, prompt.key, session, self.context)
        trajectories = await self.loops.of(prompt).run(prompt, context)
        keys = [trajectory.key for trajectory in trajectories]
        if len(set(keys)) != len(keys):
            raise DataError(
                f"the loop of {row_key(prompt.key, session)} gave trajectories with the same key: {keys}"
            )
        return trajectories

    def _dead(
        self, prompt: Prompt, session: int, cause: DeathCause, message: str, trace: str = ""
    ) -> DeadLetter:
        return DeadLetter(row_key(prompt.key, session), prompt, session, cause, message, trace)


class _Clock:
    """Seconds by activity."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._sums: dict[str, float] = {}

    def measure(self, name: str) -> _Measure:
        return _Measure(self._sums, name)

    def seconds(self) -> dict[str, float]:
        return {**self._sums, "total": time.perf_counter() - self._start}


class _Measure:
    def __init__(self, sums: dict[str, float], name: str) -> None:
        self._sums, self._name = sums, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._sums[self._name] = self._sums.get(self._name, 0.0) + time.perf_counter() - self._start
