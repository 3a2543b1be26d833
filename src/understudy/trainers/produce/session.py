"""Runs one session of a prompt: its agent loop and the reward of each output, under a deadline.

    prompt ──agent loop──> outputs 0, 1, … ──reward of each──> RowRef, or FailedOutput

A loop may return several outputs (a sub-agent, a branch, a context reset). If the loop fails, there is no
output. If a reward fails, only its output fails.

`rollout.deadline_seconds` covers the session's own work; waiting for the engine does not count. `rollouts.py`
runs the session, here or by a remote worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.media.pictures import usable_hashes
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.given import takes_given_answer
from understudy.rollout.seeds import derive_seed
from understudy.trainers.call_batching import CallBatcher
from understudy.trainers.produce.failures import PausedClock
from understudy.trainers.produce.rollouts import RolledOut, Session, TagsOf
from understudy.trainers.produce.row_journal import RowJournal
from understudy.trainers.system import Producer
from understudy.types.prompt import Prompt, row_key


async def roll_out(
    producer: Producer,
    prompt: Prompt,
    session: int,
    batcher: CallBatcher,
    tags_of: TagsOf,
    journal: RowJournal,
) -> RolledOut:
    """Runs one session and puts its outputs into the ledger; raises if the agent loop fails."""
    rollout = producer.settings.rollout
    limit = rollout.deadline_seconds
    clock = asyncio.timeout(limit)
    context = loop_context(producer, prompt, session, batcher, clock)
    if rollout.off_policy and takes_given_answer(producer.settings.seed, prompt, session, rollout.off_policy):
        context = replace(context, given=rollout.answer_column)
    key = row_key(prompt.key, session)
    async with producer.publish_gate.enter() if producer.publish_gate else nullcontext():
        return await producer.rollouts.run(Session(key, prompt, context, clock, limit, tags_of, journal))


def loop_context(
    producer: Producer, prompt: Prompt, session: int, batcher: CallBatcher, clock: asyncio.Timeout
) -> LoopContext:
    """The context of an agent loop. `clock` is stopped while the loop waits for the engine.

    The loop and these functions run on the trainer's event loop, in the session's task."""
    key, turns = row_key(prompt.key, session), batcher.one_at_a_time()

    def seed(turn: int) -> int:
        return derive_seed(producer.settings.seed, prompt.epoch, prompt.key, session, turn)

    async def generate(
        tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
    ) -> Generation:
        own = context.pictures_in(key, tokens, media)  # the context that is made below
        request = GenerateRequest(f"{key}/{turn}", tokens, sampling, seed(turn), session=key, media=own)
        async with turns:
            with PausedClock(clock):
                result: Generation = await batcher.call(producer.engine_queue, request.key, request)
        return result

    context = LoopContext(
        generate=generate,
        renderer=producer.renderer,
        sampling=producer.sampling,
        prompt_key=prompt.key,
        session=session,
        context=producer.renderer.context,
        max_generated=producer.settings.rollout.max_trajectory_tokens,
        media=usable_hashes(prompt.messages),
    )
    return context
