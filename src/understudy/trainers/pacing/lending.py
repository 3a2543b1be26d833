"""The trainer's device, lent to rollouts while it waits for rows (`trainer.lend_after`, off by default).

    calls ──> places of the engines elsewhere ──free──> generate there
                     │ all taken                           ▲
                     ▼                                     │ cut off: the rest, behind what was written
              places here, while the trainer waits ──> generate here, with the very tensors that are trained

The engines elsewhere (`rollout.processes`, servers) are filled first. What finds no place there may be written here, by an engine in the
trainer's process that shares the student's tensors; so it may run only while nobody trains. Before the update begins it is
cut off: each generation keeps what it has and goes on elsewhere, with per-token versions and a seed of its own for the rest.

Lending begins after the trainer has waited `lend_after` seconds in a step, and only once it has waited so long in two steps
running; it ends when rows were there in time twice running. So one slow batch decides nothing.
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
    """Whether to lend at all, from how long the trainer waited in each step."""

    after: float
    lends: bool = False
    _findings: int = 0
    """Steps in a row that speak for a change."""

    def observe(self, waited: float) -> str | None:
        """Once per step; the decision in words when it changes."""
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
    """Two engines behind one lane; the one here is open between `open` and `close`."""

    here: Engine
    lane: Lane
    """Of the engines elsewhere."""
    places_there: int
    """Calls they write at once."""
    places_here: int
    decision: LendingDecision
    served: int = 0
    """Calls written here, at least in part, since `take_counts`."""
    cut: int = 0
    """Of them, cut off and gone on elsewhere."""
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
                # From the seat to the engine's queue nobody else runs, so `close` cannot come between.
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
        """Waits for places; whether they are here."""
        async with self._changed:
            while True:
                # A call bigger than all the places goes when nobody else is there.
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
        """Returns when nothing is written here any more."""
        self._is_open = False
        await self.here.abort()
        async with self._changed:
            await self._changed.wait_for(lambda: self._at_here == 0)
        await self.here.pause()

    @asynccontextmanager
    async def while_waiting(self, version: int) -> AsyncIterator[None]:
        """Around the trainer's wait for rows: lends after a while, and has the device back at the end."""
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
    """What is left to write. Its randomness is its own: a request's begins anew with each engine."""
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
    """The spare engine of a run that lends, paused."""
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
