"""Who is being written, and who waits: the worker thread of the in-process engine.

    generate ──> waiting rows ──admit──> DecodeBatch ──a row ends──> its call; a call's last row ──> the caller
                                  ▲  one token per turn │
                                  └─────────────────────┘      between turns: pause, abort, new weights, close

Everything that changes what is computed happens between two turns, so a turn never sees half an update.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from understudy.engines.base import GenerateRequest, Generation
from understudy.engines.decode import DecodeBatch, Row
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason


class Batching(StrEnum):
    COMPOSED = "composed"
    """A call is a batch of its own: results depend on its composition alone. What `determinism = "full"` needs."""
    CONTINUOUS = "continuous"
    """Calls are merged in order of arrival, and waiting rows join while others are still being written."""


@dataclass(slots=True)
class CallRow(Row):
    """A row that knows which call it belongs to."""

    call: Call | None = None


class Call:
    """One `generate` under way: answered when its last row has ended."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[list[Generation]] = self.loop.create_future()
        self.rows = [CallRow(request, call=self) for request in requests]
        self.cancelled = False
        self._running = len(self.rows)

    def row_ended(self) -> None:
        """To be told once for each row."""
        self._running -= 1
        if self._running == 0:
            generations = [row.generation() for row in self.rows]
            self._tell(lambda: self.answer.set_result(generations))

    def fail(self, error: Exception) -> None:
        self.cancelled = True
        self._tell(lambda: self.answer.set_exception(error))

    def _tell(self, settle: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self.answer.done():
                settle()

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(unless_done)


class Scheduler:
    """Runs turns on a thread of its own, from the first `submit` until `close`."""

    def __init__(
        self,
        build: Callable[[Sequence[Row]], DecodeBatch],
        *,
        max_batch: int,
        prefill_tokens: int,
        batching: Batching,
    ) -> None:
        self._build, self._max_batch, self._prefill_tokens = build, max_batch, prefill_tokens
        self._batching = batching
        self._batch: DecodeBatch | None = None
        self._calls: deque[Call] = deque()
        """Calls none of whose rows have been admitted yet."""
        self._waiting: deque[CallRow] = deque()
        """Rows of admitted calls that found no room yet."""
        self._entering: Sequence[Row] = ()
        """Rows whose ids are being run through the model: neither waiting nor in the batch, should that fail."""
        self._changed = threading.Condition()
        self._paused = self._aborting = self._refresh = self._closed = False
        self._resting = True
        self._thread: threading.Thread | None = None

    # --- called from outside ---------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        with self._changed:
            if self._closed:
                raise EngineError("the engine is closed; it takes no more requests")
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="understudy-hf-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, call: Call) -> None:
        with self._changed:
            call.cancelled = True

    def pause(self) -> None:
        """Returns once no token is being computed."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resting)

    def resume(self, *, refresh: bool) -> None:
        """`refresh`: the weights changed, so keys and values of rows in flight are computed anew."""
        with self._changed:
            self._paused = False
            self._refresh |= refresh
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._aborting = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the worker thread ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._turn()
            except Exception as error:
                self._fail_running(error)
        self._fail_running(EngineError("the engine was closed while this generation was running"))

    def _wait_for_work(self) -> bool:
        """Rests until there is something to compute; False once closed."""
        with self._changed:
            while True:
                if self._closed:
                    return False
                if self._aborting:
                    self._abort_all()
                if not self._paused and (self._batch or self._waiting or self._calls):
                    self._resting = False
                    return True
                self._resting = True
                self._changed.notify_all()
                self._changed.wait()

    def _turn(self) -> None:
        batch = self._batch
        if batch is not None:
            batch.end(lambda row: isinstance(row, CallRow) and row.call is not None and row.call.cancelled)
            if self._refresh and batch.alive:
                self._batch = batch = self._enter(batch.end())
            if not batch.alive:
                self._batch = None
        self._refresh = False
        self._admit()
        if self._batch is None:
            return
        for row in self._batch.draw():
            assert isinstance(row, CallRow) and row.call is not None
            row.call.row_ended()
        if self._batch.alive:
            self._batch.advance()
        else:
            self._batch = None

    def _admit(self) -> None:
        """Lets waiting rows in: when none are being written, or when a fair share of the places is free.

        Each entry costs a prompt pass over the newcomers and a copy of the cache, so rows enter in groups.
        """
        while True:
            running = self._batch.alive if self._batch else 0
            free = self._max_batch - running
            if running and free < max(1, self._max_batch // 8):
                return
            group = self._next_group(free, running)
            if not group:
                return
            newcomers = self._enter(group)
            if self._batch is None:
                self._batch = newcomers
            else:
                self._batch.join(newcomers)

    def _enter(self, rows: Sequence[Row]) -> DecodeBatch:
        self._entering = rows
        batch = self._build(rows)
        self._entering = ()
        return batch

    def _next_group(self, free: int, running: int) -> list[CallRow]:
        """Up to `free` waiting rows whose padded prompts fit the prefill budget; at least one where any waits."""
        group: list[CallRow] = []
        longest = 0
        while len(group) < free:
            if not self._waiting and not self._take_call(busy=bool(running or group)):
                break
            row = self._waiting[0]
            if row.call is None or row.call.cancelled:
                self._waiting.popleft()
                continue
            longest = max(longest, len(row.request.tokens))
            if group and longest * (len(group) + 1) > self._prefill_tokens:
                break
            group.append(self._waiting.popleft())
        return group

    def _take_call(self, *, busy: bool) -> bool:
        """Moves the next call's rows to the waiting ones, unless it must wait for those before it to end."""
        if busy and self._batching is Batching.COMPOSED:
            return False
        with self._changed:
            if not self._calls:
                return False
            self._waiting.extend(self._calls.popleft().rows)
            return True

    def _abort_all(self) -> None:
        rows = [
            *(self._batch.end() if self._batch else ()),
            *self._waiting,
            *(r for call in self._calls for r in call.rows),
        ]
        self._aborting, self._batch = False, None
        self._waiting.clear()
        self._calls.clear()
        for row in rows:
            assert isinstance(row, CallRow) and row.call is not None
            row.stop_reason = StopReason.ABORTED
            row.call.row_ended()

    def _fail_running(self, error: Exception) -> None:
        """Fails every call that has rows in the batch, and everything that waits once the engine is closed."""
        rows = [*(self._batch.rows if self._batch else ()), *self._entering, *self._waiting]
        calls = {id(row.call): row.call for row in rows if isinstance(row, CallRow) and row.call is not None}
        with self._changed:
            if self._closed:
                calls |= {id(call): call for call in self._calls}
                self._calls.clear()
            self._resting = True
            self._changed.notify_all()
        self._batch, self._entering = None, ()
        self._waiting.clear()
        for call in calls.values():
            keys = ", ".join(row.request.key for row in call.rows[:3])
            problem = (
                error
                if isinstance(error, EngineError)
                else EngineError(f"generation failed ({keys} …): {error!r}")
            )
            call.fail(problem)
