"""Lets a model answer a set of problems, and runs the reward on each answer.

If the agent loop or the reward of an answer raises or takes longer than `rollout.deadline_seconds`, or the
reward is not finite, the answer counts as unsolved and the reason is kept. An error that no problem causes (`INFRASTRUCTURE`, or
one of the engine, such as a lack of memory) ends the evaluation.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from understudy.engines.base import Engine, GenerateRequest, Generation, Sampling
from understudy.errors import DataError, UnderstudyError
from understudy.media.pictures import usable_hashes
from understudy.rollout.agents.agent import LoopContext, LostOutput, check_kinds, checked_outputs
from understudy.rollout.agents.registry import Loops
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards
from understudy.rollout.seeds import derive_seed
from understudy.rollout.user_code import awaited
from understudy.trainers.call_batching import BatchByKey, CallQueue
from understudy.trainers.produce.failures import INFRASTRUCTURE, PausedClock, as_timeout, reason_of
from understudy.trainers.row_columns import with_finite_reward
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import StopReason, Trajectory

Advance = Callable[[int], None]
"""Called with the number of newly finished answers."""


def ignore(answers: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class FailedAnswer:
    """An answer that counts as unsolved because its agent loop or its reward failed."""

    prompt: Prompt
    asked: str
    """"greedy" or "sampled"."""
    session: int
    error: Exception
    written: Trajectory | None = None
    """What the model wrote, if only the reward failed."""

    @property
    def reason(self) -> str:
        return reason_of(self.error)

    @property
    def trace(self) -> list[str]:
        return traceback.format_exception(self.error)[-6:]


@dataclass(frozen=True, slots=True)
class _Asking:
    """How one set of problems is asked."""

    kind: str
    """"greedy" or "sampled"."""
    sampling: Sampling
    queue: CallQueue
    engine_errors: list[Exception] = field(default_factory=list)
    """Errors of the engine that are not the fault of a problem. An agent loop may catch one and raise another, or none."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Answers problems with one engine, in batches composed by key. Used on the event loop."""

    engine: Engine
    loops: Loops
    rewards: Rewards
    renderer: Renderer
    sampling: Sampling
    context: int
    max_batch: int
    deadline_seconds: float
    """For an agent loop without its waits for the engine, and again for the reward."""
    seed: int = 0
    max_generated: int | None = None
    """Tokens the student may write in all turns of one answer (`rollout.max_trajectory_tokens`)."""
    failures: list[FailedAnswer] = field(default_factory=list)
    """The failures of all answers so far, in order of problem and session. Their trajectories have no
    reward."""

    async def greedy(self, prompts: Sequence[Prompt], advance: Advance = ignore) -> list[Trajectory]:
        """One greedy answer per problem, in order."""
        sampling = replace(self.sampling, temperature=0.0, candidates=0)
        return await self._answers([(prompt, 0) for prompt in prompts], sampling, advance, "greedy")

    async def sampled(
        self, prompts: Sequence[Prompt], k: int, advance: Advance = ignore
    ) -> list[list[Trajectory]]:
        """k answers per problem at the rollout's temperature."""
        sampling = replace(self.sampling, candidates=0)
        pairs = [(prompt, session) for prompt in prompts for session in range(k)]
        flat = await self._answers(pairs, sampling, advance, "sampled")
        return [flat[start : start + k] for start in range(0, len(flat), k)]

    async def _answers(
        self, pairs: Sequence[tuple[Prompt, int]], sampling: Sampling, advance: Advance, kind: str
    ) -> list[Trajectory]:
        """Answers with rewards, in the order of `pairs`. Batches are composed by key, so answers repeat to
        the bit."""
        asking = _Asking(kind, sampling, CallQueue("generate", self.engine.generate, self.max_batch))
        answers: list[Trajectory] = []
        for start in range(0, len(pairs), self.max_batch):
            chunk = pairs[start : start + self.max_batch]
            batcher = BatchByKey(len(chunk))
            found = await asyncio.gather(
                *(self._answer(prompt, session, asking, batcher) for prompt, session in chunk)
            )
            self.failures.extend(entry for entry in found if isinstance(entry, FailedAnswer))
            answers += [unrewarded(entry) if isinstance(entry, FailedAnswer) else entry for entry in found]
            advance(len(chunk))
        return answers

    async def _answer(
        self, prompt: Prompt, session: int, asking: _Asking, batcher: BatchByKey
    ) -> Trajectory | FailedAnswer:
        """One session of a problem: its agent loop under a deadline, then its reward under another."""
        async with batcher.member():
            written, limit = None, self.deadline_seconds
            clock, what = asyncio.timeout(limit), "agent loop"
            context = self._context(prompt, session, asking, batcher, clock)
            try:
                async with clock:
                    outputs = await awaited(self.loops.of(prompt).run(prompt, context))
                last = checked_outputs(outputs, context)[-1]
                if isinstance(last, LostOutput):
                    raise DataError(last.reason)
                check_kinds(last)
                written = last
                clock, what = asyncio.timeout(limit), f"reward {self.rewards.names}"
                async with clock:
                    return with_finite_reward(await self.rewards.score(prompt, written))
            except INFRASTRUCTURE:
                raise
            except Exception as error:
                if any(error is one for one in asking.engine_errors):
                    raise
                late = as_timeout(error, clock, f"{what} timed out: {prompt.key}", limit)
                return FailedAnswer(prompt, asking.kind, session, late, written)

    def _context(
        self, prompt: Prompt, session: int, asking: _Asking, batcher: BatchByKey, clock: asyncio.Timeout
    ) -> LoopContext:
        """The context of an agent loop. `clock` is stopped while the loop waits for the engine."""
        turns = batcher.one_at_a_time()

        async def generate(
            tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
        ) -> Generation:
            key = f"{prompt.key}/{session}/{turn}"
            seed = derive_seed(self.seed, prompt.epoch, prompt.key, session, turn)
            own = context.pictures_in(key, tokens, media)  # the context that is made below
            request = GenerateRequest(key, tokens, sampling, seed, media=own)
            try:
                async with turns:
                    with PausedClock(clock):
                        result: Generation = await batcher.call(asking.queue, key, request)
            except Exception as error:
                if not isinstance(error, UnderstudyError):
                    asking.engine_errors.append(error)
                raise
            return result

        context = LoopContext(
            generate,
            self.renderer,
            asking.sampling,
            prompt.key,
            session,
            self.context,
            self.max_generated,
            media=usable_hashes(prompt.messages),
        )
        return context


def unrewarded(failure: FailedAnswer) -> Trajectory:
    """The trajectory of a failed answer, without a reward: the tokens that were written, or none."""
    if failure.written is not None:
        return replace(failure.written, reward=None)
    key, none = row_key(failure.prompt.key, failure.session), np.zeros(0, np.int32)
    return Trajectory(key, none, none.astype(bool), none.astype(np.float32), none, StopReason.ABORTED)
