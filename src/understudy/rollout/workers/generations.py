"""The worker's side of its loops' generations.

local     worker ── Generate: tokens ──────────────────────> run
          worker <── Generated: what was written ─────────── run

remote    worker ── Want: number of tokens ────────────────> run
          worker <── Grant: engine to send the tokens to ─── run
          worker ── tokens ──> engine ── what was written ──> worker
          worker ── Have: number of tokens written ────────> run
          worker <── Take: the call whose result counts ──── run

A server whose weights change answers a remote generation in pieces: after `Have` (aborted) the run sends
another `Grant` that continues from it, then `Have`, and in the end `Take`.

The worker keeps the tokens of a remote generation until `Take`. Until then the run may grant it again, at another
engine; only the result of the last grant and of the calls that it continues counts
(docs/decisions/0016-tokens-past-the-trainer.md, 0017-tokens-to-servers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.engines.remote_tokens import CallGivenUp, Grant, NotBrought
from understudy.engines.servers.worker_client import Leg
from understudy.rollout.workers import messages as wire
from understudy.types.trajectory import StopReason

Bring = Callable[[Grant, np.ndarray, Sampling, Leg], Awaitable[Generation]]
"""Sends tokens to the granted engine; returns what was written there, appended to what earlier calls wrote."""
_LONGEST_PROBLEM = 1000


@dataclass(slots=True)
class _Question:
    tokens: np.ndarray
    sampling: Sampling
    answer: asyncio.Future[Generation]
    bringing: tuple[int, Leg, asyncio.Task[None]] | None = None
    """The last call."""
    held: dict[int, Generation] = field(default_factory=dict)
    """By call: what it and the calls it continues wrote. Holds the last call reported to the run and its
    successor."""

    def end(self) -> None:
        if self.bringing is not None:
            self.bringing[2].cancel()


class Questions:
    """The open generations of a worker, by session and number. Used on the worker's event loop."""

    def __init__(self, say: Callable[[wire.ToRun], None], bring: Bring | None) -> None:
        self._say, self._bring = say, bring
        self._open: dict[tuple[int, int], _Question] = {}
        self._asked = 0

    async def ask(
        self, session_id: int, tokens: np.ndarray, sampling: Sampling, turn: int, *, far: bool
    ) -> Generation:
        self._asked += 1
        number, ids = self._asked, np.asarray(tokens, dtype=np.int32)
        question = _Question(ids, sampling, asyncio.get_running_loop().create_future())
        self._open[session_id, number] = question
        if far and self._bring is not None:
            self._say(wire.Want(session_id, number, len(ids), sampling.max_new_tokens, turn))
        else:
            body = ids.astype("<i4").tobytes()
            self._say(wire.Generate(session_id, number, body, wire.pack_sampling(sampling), turn))
        try:
            return await question.answer
        except asyncio.CancelledError:
            if far:  # the batch that waits for these tokens must not wait any longer
                self._say(wire.Withdraw(session_id, number))
            raise
        finally:
            question.end()
            self._open.pop((session_id, number), None)

    def told(self, message: wire.Generated | wire.Grant | wire.Cut | wire.Take) -> None:
        """Handles a message of the run about a generation; ignored if no loop waits for it."""
        question = self._open.get((message.session_id, message.question))
        if question is None or question.answer.done():
            return
        if isinstance(message, wire.Generated):
            question.answer.set_result(wire.unpack_generation(message))
        elif isinstance(message, wire.Grant):
            question.end()
            grant = message.grant
            question.held = {call: one for call, one in question.held.items() if call == grant.after}
            leg = Leg(question.held[grant.after] if grant.after is not None else None)
            task = asyncio.create_task(self._brought(question, message, leg))
            question.bringing = (grant.call, leg, task)
        elif isinstance(message, wire.Cut):
            if question.bringing is not None and question.bringing[0] == message.call:
                question.bringing[1].cut.set()
        elif message.call is None:
            question.answer.set_result(_nothing_written())
        elif message.call in question.held:
            question.answer.set_result(question.held[message.call])

    async def _brought(self, question: _Question, message: wire.Grant, leg: Leg) -> None:
        assert self._bring is not None
        session_id, number, grant = message.session_id, message.question, message.grant
        try:
            written = await self._bring(grant, question.tokens, question.sampling, leg)
        except CallGivenUp:
            return  # the run cancelled the call and will send another `Grant` or `Take`
        except NotBrought as error:
            problem = str(error)[:_LONGEST_PROBLEM]
            self._say(wire.NotBrought(session_id, number, grant.call, problem, error.trouble))
            return
        question.held[grant.call] = written
        self._say(wire.Have(session_id, number, grant.call, wire.brought_of(written)))


def _nothing_written() -> Generation:
    ids = np.empty(0, dtype=np.int32)
    return Generation(ids, np.empty(0, dtype=np.float32), ids, StopReason.ABORTED)
