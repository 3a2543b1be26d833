"""The run's proxy of a worker that holds the tokens of a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from understudy.engines.remote_tokens import BearerGone, Brought, Grant, NotBrought
from understudy.rollout.workers import messages as wire


class WorkerHand:
    """One generation of one session (an `engines.remote_tokens.Bearer`). Called by the engine and by
    `Channel` on the run's event loop.

    say         sends a message to the worker
    too_slow    ends the session: its tokens did not arrive in time
    """

    def __init__(
        self, want: wire.Want, say: Callable[[wire.ToWorker], None], too_slow: Callable[[], None]
    ) -> None:
        self._session_id, self._question = want.session_id, want.question
        self._say, self._too_slow = say, too_slow
        self._bringing: tuple[int, asyncio.Future[Brought]] | None = None
        self._gone = False
        self._brought_to: int | None = None

    async def bring(self, grant: Grant) -> Brought:
        if self._gone:
            raise BearerGone(f"{grant.key}: its worker or its session is gone")
        told: asyncio.Future[Brought] = asyncio.get_running_loop().create_future()
        self._bringing = (grant.call, told)
        if grant.after is None:
            self._brought_to = None
        self._say(wire.Grant(self._session_id, self._question, grant))
        brought = await told
        self._brought_to = grant.call
        return brought

    def cut(self, call: int) -> None:
        if self._bringing is not None and self._bringing[0] == call and not self._bringing[1].done():
            self._say(wire.Cut(self._session_id, self._question, call))

    def give_up(self) -> None:
        self._too_slow()

    def told(self, message: wire.Have | wire.NotBrought) -> None:
        """Handles the worker's report; ignored unless it is about the last call."""
        if self._bringing is None or self._bringing[0] != message.call or self._bringing[1].done():
            return
        if isinstance(message, wire.Have):
            self._bringing[1].set_result(message.brought)
        else:
            self._bringing[1].set_exception(NotBrought(message.problem, message.trouble))

    def take(self, *, nothing: bool) -> None:
        """The batch is done: the worker's loop continues with what was written; with `nothing`, no token
        was."""
        self._say(wire.Take(self._session_id, self._question, None if nothing else self._brought_to))

    def left(self) -> None:
        """Called when the session is over or its worker is gone."""
        self._gone = True
        if self._bringing is not None and not self._bringing[1].done():
            self._bringing[1].set_exception(BearerGone("its worker or its session is gone"))
