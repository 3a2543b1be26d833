"""Runs one session of a prompt: its agent loop and the reward of each output, under a deadline.

    prompt ──agent loop──> outputs 0, 1, … ──reward of each──> Trajectory, or Failed with the reason

A loop may return several outputs (a sub-agent, a branch, a context reset). If the loop fails, there is no
output. If a reward fails, only its output fails.

`rollout.deadline_seconds` covers the session's own work; waiting for the engine does not count. Each reward
gets the time that the loop left, so that one hanging reward does not fail the other outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.remote_tokens import PATIENCE_S, Bearer, FarRequest
from understudy.rollout.agents.agent import LoopContext, check_ids, checked_outputs
from understudy.rollout.seeds import derive_seed
from understudy.trainers.call_batching import Gather
from understudy.trainers.produce.failures import SampleFailed, own_fault, timed
from understudy.trainers.remote_rows.rollouts import FarRow, RowWorkers, TagsOf
from understudy.trainers.row_columns import finite
from understudy.trainers.system import System
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Failed:
    """An output that cannot be trained on, and its error."""

    key: str
    error: Exception


Output = Trajectory | FarRow | Failed


async def roll_out(system: System, prompt: Prompt, session: int, gather: Gather) -> list[Trajectory | Failed]:
    """Runs one session in this process. Returns its outputs with rewards; raises if the agent loop fails."""
    key, limit = row_key(prompt.key, session), system.recipe.rollout.deadline_seconds
    clock = asyncio.timeout(limit)
    gate = system.turnstile.rollout() if system.turnstile else nullcontext()
    async with gate:
        try:
            async with clock:
                with system.spans.span("rollout", key=key):
                    context = loop_context(system, prompt, session, gather, clock)
                    outputs = checked_outputs(await system.loops.of(prompt).run(prompt, context), context)
                due = clock.when()
        except Exception as error:
            raise timed(error, clock, f"agent loop timed out: {key}", limit) from error
        for one in outputs:
            system.timings.add(one.key, one.extra.get("seconds", {}))
            system.timings.lengths(one.key, len(one.tokens), int(one.loss_mask.sum()))
        # `due` is None if the loop returned while a generation was still running, which stops the clock.
        left = limit if due is None else due - asyncio.get_running_loop().time()
        return [await _judged(system, prompt, one, left) for one in outputs]


async def _judged(
    system: System, prompt: Prompt, trajectory: Trajectory, seconds: float
) -> Trajectory | Failed:
    key, clock = trajectory.key, asyncio.timeout(seconds)
    try:
        with system.spans.span("reward", key=key), system.timings.during(key, "reward"):
            check_ids(trajectory, system.sampling)
            async with clock:
                return finite(await system.rewards.judge(prompt, trajectory))
    except Exception as error:
        limit = system.recipe.rollout.deadline_seconds
        return Failed(key, own_fault(timed(error, clock, f"reward timed out: {key}", limit)))


async def roll_out_far(
    system: System, workers: RowWorkers, prompt: Prompt, session: int, gather: Gather, tags_of: TagsOf
) -> list[FarRow | Failed]:
    """Runs one session on a worker, which runs the rewards, writes the rows and reports their location.

    The worker gives each reward `rollout.deadline_seconds`. The clock here is for a worker that does not
    answer."""
    key, limit = row_key(prompt.key, session), system.recipe.rollout.deadline_seconds
    clock, what = asyncio.timeout(limit), "agent loop"

    def judging(outputs: int) -> None:
        nonlocal what
        what = "reward"
        clock.reschedule(asyncio.get_running_loop().time() + limit * (outputs + 1))

    context = loop_context(system, prompt, session, gather, clock, judging)
    gate = system.turnstile.rollout() if system.turnstile else nullcontext()
    try:
        async with gate, clock:
            with system.spans.span("rollout", key=key):
                kept = await workers.roll_out(prompt, context, tags_of, system.timings.add)
    except Exception as error:
        raise timed(error, clock, f"{what} timed out: {key}", limit) from error
    for row in kept:
        if isinstance(row, FarRow):
            system.timings.lengths(row.key, row.tokens, row.loss)
    return [row if isinstance(row, FarRow) else Failed(row.key, SampleFailed(row.failed)) for row in kept]


def loop_context(
    system: System,
    prompt: Prompt,
    session: int,
    gather: Gather,
    clock: asyncio.Timeout,
    judging: Callable[[int], None] | None = None,
) -> LoopContext:
    """The context of an agent loop. `clock` is stopped while the loop waits for the engine."""
    key = row_key(prompt.key, session)

    def seed(turn: int) -> int:
        return derive_seed(system.recipe.run.seed, prompt.epoch, prompt.key, session, turn)

    async def ask(request: GenerateRequest) -> Generation:
        with _Stopped(clock):
            result: Generation = await gather.call(system.engine_lane, request.key, request)
        return result

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        return await ask(GenerateRequest(f"{key}/{turn}", tokens, sampling, seed(turn), session=key))

    async def generate_far(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
        patience = system.recipe.rollout.deadline_seconds or PATIENCE_S
        return await ask(FarRequest.of(f"{key}/{turn}", length, most, seed(turn), key, bearer, patience))

    workers = system.row_workers
    return LoopContext(
        generate=generate,
        renderer=system.renderer,
        sampling=system.sampling,
        prompt_key=prompt.key,
        session=session,
        context=system.renderer.context,
        max_generated=system.recipe.rollout.max_trajectory_tokens,
        generate_far=generate_far if workers is not None and workers.bring_tokens else None,
        judging=judging,
    )


class _Stopped:
    """Stops a session's clock while it waits for the engine, and in a cohort for the other members.

    A class, because a step has hundreds of them and a generator costs several times as much."""

    __slots__ = ("_clock", "_left")

    def __init__(self, clock: asyncio.Timeout) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        due = self._clock.when()
        self._left = None if due is None else due - asyncio.get_running_loop().time()
        if due is not None:  # else stopped already, by another branch of the same loop
            self._clock.reschedule(None)

    def __exit__(self, *raised: object) -> None:
        if self._left is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._left)
