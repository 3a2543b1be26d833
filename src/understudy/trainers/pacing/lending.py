"""Generates on the trainer's device while the trainer waits for rows (`trainer.lend_after`).

    calls ──> remote engines have capacity? ──yes──> generate there
                     │ no                               ▲
                     ▼                                  │ aborted: continue after the tokens written so far
              the trainer waits: local engine ──> generate here, with the tensors that are trained

The remote engines (`rollout.processes`, servers) are filled first. A call beyond their capacity may run on an
engine in the trainer's process. That engine shares the student's tensors, so it may run only while the
trainer does not train. Before an update it is aborted: each generation keeps its tokens and continues on a
remote engine, with per-token versions and a new seed.

In a step, the local engine opens after the trainer has waited `lend_after` seconds. This is switched on after
the trainer has waited that long in two steps in a row, and switched off after rows came in time in two steps
in a row. So one slow batch changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from understudy.engines.base import Engine, GenerateRequest, Generation
from understudy.engines.local.engine import HFEngine, sharing_copy
from understudy.engines.local.kv_pool import KeptAs
from understudy.engines.local.scheduler import Batching
from understudy.rollout.seeds import hash63
from understudy.trainers.call_batching import Lane
from understudy.trainers.system import System
from understudy.types.trajectory import StopReason

_TWICE = 2


@dataclass(slots=True)
class LendingDecision:
    """Whether the trainer's device generates at all, from how long the trainer waited in each step."""

    after: float
    lends: bool = False
    _findings: int = 0
    """Steps in a row whose wait calls for a change."""

    def observe(self, waited: float) -> str | None:
        """Called once per step. Returns the decision as text if it changes."""
        starved = waited > self.after
        self._findings = self._findings + 1 if starved is not self.lends else 0
        if self._findings < _TWICE:
            return None
        self.lends, self._findings = starved, 0
        if starved:
            return (
                f"lending the trainer's device to rollouts: it waited {waited:.1f} s for rows, twice running"
            )
        return f"no longer lending the trainer's device: rows came within {self.after:g} s, twice running"


@dataclass(slots=True)
class Lender:
    """Routes calls to the remote engines or to the local one. The local engine takes calls between `open` and
    `close`.

    Producers call `run` and the trainer's task calls `while_waiting`, all on the event loop.
    """

    here: Engine
    lane: Lane
    """The lane of the remote engines."""
    places_there: int
    """How many calls the remote engines decode at once."""
    places_here: int
    """How many calls the local engine decodes at once."""
    decision: LendingDecision
    served: int = 0
    """Calls generated locally, at least in part, since `take_counts`."""
    cut: int = 0
    """How many of them were aborted and continued on a remote engine."""
    _at_there: int = 0
    _at_here: int = 0
    _is_open: bool = False
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def as_lane(self) -> Lane:
        return Lane(self.lane.name, self.run, self.lane.limit)

    async def run(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        size = len(requests)
        if await self._seat(size):
            try:
                # No other task runs between `_seat` and the engine's queue, so `close` cannot come between.
                written = await self.here.generate(requests)
            finally:
                self._at_here -= size
                await self._tell()
            self.served += size
            return await asyncio.gather(*map(self._finished, requests, written))
        try:
            return list(await self.lane.run(requests))
        finally:
            self._at_there -= size
            await self._tell()

    async def _seat(self, size: int) -> bool:
        """Waits until an engine has capacity for `size` calls. True: the local engine."""
        async with self._changed:
            while True:
                # A batch larger than `places_there` goes when the remote engines are empty.
                if self._at_there == 0 or self._at_there + size <= self.places_there:
                    self._at_there += size
                    return False
                if self._is_open and self._at_here + size <= self.places_here:
                    self._at_here += size
                    return True
                await self._changed.wait()

    async def _finished(self, request: GenerateRequest, written: Generation) -> Generation:
        if written.stop_reason is not StopReason.ABORTED:
            return written
        self.cut += 1
        (rest,) = await self.run([rest_of(request, written)])
        return joined(written, rest)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def open(self, version: int) -> None:
        await self.here.update_weights(version, ())
        await self.here.resume()
        self._is_open = True
        await self._tell()

    async def close(self) -> None:
        """Aborts the local engine. Returns when it has stopped decoding."""
        self._is_open = False
        await self.here.abort()
        async with self._changed:
            await self._changed.wait_for(lambda: self._at_here == 0)
        await self.here.pause()

    @asynccontextmanager
    async def while_waiting(self, version: int) -> AsyncIterator[None]:
        """Wraps the trainer's wait for rows. The local engine opens after `decision.after` seconds and is
        closed at the end."""
        opening = asyncio.create_task(self._open_later(version)) if self.decision.lends else None
        try:
            yield
        finally:
            if opening is not None:
                opening.cancel()
                await asyncio.wait({opening})
                await self.close()

    async def _open_later(self, version: int) -> None:
        await asyncio.sleep(self.decision.after)
        await self.open(version)

    def take_counts(self) -> dict[str, float]:
        counts = {"perf/async/lent_calls": float(self.served), "perf/async/lent_cut": float(self.cut)}
        self.served = self.cut = 0
        return counts


def rest_of(request: GenerateRequest, written: Generation) -> GenerateRequest:
    """The request for the tokens still to be written. It has a new seed, because each engine starts a
    request's random numbers anew."""
    done = len(written.tokens)
    if not done:
        return request
    return replace(
        request,
        tokens=np.concatenate([request.tokens, written.tokens]).astype(np.int32),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - done),
        seed=hash63("rest", request.seed, done),
    )


def joined(first: Generation, rest: Generation) -> Generation:
    both: list[Any] = [first.candidate_ids, rest.candidate_ids]
    return Generation(
        tokens=np.concatenate([first.tokens, rest.tokens]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        weight_versions=np.concatenate([first.weight_versions, rest.weight_versions]),
        stop_reason=rest.stop_reason,
        candidate_ids=None if rest.candidate_ids is None else np.concatenate(both),
    )


def lender_of(system: System) -> Lender | None:
    """The `Lender` of a run with `trainer.lend_after`, its local engine paused; None without."""
    rollout, after = system.recipe.rollout, system.recipe.trainer.lend_after
    if after is None:
        return None
    model: Any = system.policy.model
    engine = HFEngine(
        sharing_copy(model),
        max_batch=rollout.max_batch,
        device=next(model.parameters()).device,
        pad_id=system.sampling.stop_ids[0],
        max_length=system.renderer.context,
        batching=Batching.CONTINUOUS,
        kept_as=KeptAs(rollout.kv_cache),
    )
    engines = rollout.processes or len(rollout.urls) or rollout.replicas
    return Lender(
        engine,
        system.engine_lane,
        places_there=engines * rollout.max_batch,
        places_here=rollout.max_batch,
        decision=LendingDecision(after),
    )
