"""The scheduler thread of the in-process engine: admits waiting rows and decodes one token per turn.

    generate ──> waiting rows ──admit──> RowBatch ──a row ends──> its call; a call's last row ──> the caller
                                  ▲  one token per turn │
                                  └─────────────────────┘      between turns: pause, abort, new weights, close

All changes of state happen between two turns, so a turn never sees half an update.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch

from understudy.engines.base import EngineClosed, GenerateRequest, Generation
from understudy.engines.local.rows import DecodingRow, RowBatch
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason


class Batching(StrEnum):
    """How calls form batches."""

    COMPOSED = "composed"
    """Each call is its own batch: results depend on it alone. `determinism = "full"` needs this."""
    CONTINUOUS = "continuous"
    """Calls are merged in order of arrival, and waiting rows join a batch that is being decoded."""


@dataclass(slots=True)
class CallRow(DecodingRow):
    """A row and the call it belongs to."""

    call: Call | None = None


class Call:
    """One `generate` in flight: answered on its own event loop when its last row has ended."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[list[Generation]] = self.loop.create_future()
        self.rows = [CallRow(request, call=self) for request in requests]
        self.cancelled = self.aborted = False
        self._running = len(self.rows)

    def row_ended(self) -> None:
        """Called once for each row."""
        self._running -= 1
        if self._running == 0:
            generations = [row.generation() for row in self.rows]
            self._tell(lambda: self.answer.set_result(generations))

    @property
    def over(self) -> bool:
        """Whether no more tokens are needed for it."""
        return self.cancelled or self.aborted

    def fail(self, error: Exception) -> None:
        self.cancelled = True  # its rows need no more tokens
        self._tell(lambda: self.answer.set_exception(error))

    def _tell(self, settle: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self.answer.done():
                settle()

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(unless_done)


class Scheduler:
    """The batch being decoded and the calls and rows that wait.

    Its thread runs turns from the first `submit` until `close`. The engine calls the public methods from
    other threads; `_changed` guards the state they share.
    """

    def __init__(
        self,
        build: Callable[[Sequence[DecodingRow]], RowBatch],
        *,
        max_batch: int,
        prefill_tokens: int,
        batching: Batching,
        recompute_kv: bool = True,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`recompute_kv`: after new weights, compute the keys and values of running rows again. `stream`: the CUDA
        stream of the thread's GPU work; None: the default stream."""
        self._stream, self._recompute_kv = stream, recompute_kv
        self._build, self._max_batch, self._prefill_tokens = build, max_batch, prefill_tokens
        self._batching = batching
        self._batch: RowBatch | None = None
        self._calls: deque[Call] = deque()
        """Calls with no row admitted yet."""
        self._waiting: deque[CallRow] = deque()
        """Rows of admitted calls that had no place in the batch yet."""
        self._entering: Sequence[DecodingRow] = ()
        """Rows on their way into the batch, from `_waiting` or from a batch whose weights changed. If computing
        their prompts fails, their calls fail."""
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._new_version: int | None = None
        """Set if the weights have changed since the last turn: their version."""
        self._resting = True
        """No token is being computed; `pause` waits for this."""
        self._thread: threading.Thread | None = None

    # --- called from outside

    def submit(self, call: Call) -> None:
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed; it takes no more requests")
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="understudy-hf-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, call: Call) -> None:
        with self._changed:
            call.cancelled = True
            self._changed.notify_all()

    def pause(self) -> bool:
        """Waits until no token is being computed; returns whether it was paused before."""
        with self._changed:
            before, self._paused = self._paused, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resting)
            return before

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def weights_changed(self, version: int) -> None:
        """Called while paused, with the version of the weights that the model holds now."""
        with self._changed:
            self._new_version = version

    def abort(self) -> None:
        """Ends every current call; later calls are not affected."""
        with self._changed:
            for call in self._all_calls():
                call.aborted = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """While paused: fails every current call."""
        with self._changed:
            calls = self._all_calls()
            self._drop_everything()
        for call in calls:
            call.fail(error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the worker thread

    @torch.inference_mode()
    def _run(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while self._wait_for_work():
                try:
                    self._turn()
                except Exception as error:
                    self._fail_running(error)
        self._fail_running(EngineClosed("the engine was closed while this generation was running"))

    def _wait_for_work(self) -> bool:
        """Waits until there is something to compute; False once closed."""
        with self._changed:
            while True:
                if self._closed:
                    return False
                self._sweep()
                if not self._paused and (self._batch or self._waiting or self._calls):
                    self._resting = False
                    return True
                self._resting = True
                self._changed.notify_all()
                self._changed.wait()

    def _turn(self) -> None:
        if self._batch is not None and self._new_version is not None:
            if self._recompute_kv:
                self._entering = self._batch.decoding.end()
                self._batch.release()
                self._batch = None
                self._enter()
            else:
                self._batch.continue_under(self._new_version)
        self._new_version = None
        self._admit()
        if self._batch is None:
            return
        for row in self._batch.draw():
            _call_of(row).row_ended()
        if self._batch.decoding.alive:
            self._batch.advance()
        else:
            self._leave()

    def _admit(self) -> None:
        """Admits waiting rows if the batch is empty, an eighth of the places is free, or all waiting rows
        fit.

        Each admission costs a prompt pass over the new rows and a copy of the cache, so rows enter in
        groups. The third condition admits the last few rows of a batch that arrived one by one: no more
        rows come to fill their group, so otherwise they would wait until running rows have ended.
        """
        while True:
            running = self._batch.decoding.alive if self._batch else 0
            free = self._max_batch - running
            if running and free < max(1, self._max_batch // 8) and self._ready_rows() > free:
                return
            self._entering = self._next_group(free, running)
            if not self._entering:
                return
            self._enter()

    def _enter(self) -> None:
        """Computes the prompts of the entering rows, as many at a time as fit the prefill budget.

        After new weights these are all rows of the batch, which may have entered in several groups. The parts
        depend on the rows alone, so results repeat.
        """
        while self._entering:
            if self._batch is not None:
                self._batch.release()
            part = self._fitting(self._entering)
            newcomers = self._build(part)
            if self._batch is None:
                self._batch = newcomers
            else:
                self._batch.join(newcomers)
            self._entering = self._entering[len(part) :]

    def _fitting(self, rows: Sequence[DecodingRow]) -> Sequence[DecodingRow]:
        """The first rows whose padded length fits the prefill budget; at least one."""
        longest = 0
        for count, row in enumerate(rows):
            longest = max(longest, len(row))
            if count and longest * (count + 1) > self._prefill_tokens:
                return rows[:count]
        return rows

    def _next_group(self, free: int, running: int) -> list[CallRow]:
        """Up to `free` waiting rows whose padded prompts fit the prefill budget; the first always enters."""
        group: list[CallRow] = []
        longest = 0
        while len(group) < free:
            if not self._waiting and not self._take_call(busy=bool(running or group)):
                break
            row = self._waiting[0]
            longest = max(longest, len(row.request.tokens))
            if group and longest * (len(group) + 1) > self._prefill_tokens:
                break
            group.append(self._waiting.popleft())
        return group

    def _ready_rows(self) -> int:
        """Rows that could join the running batch."""
        if self._batching is Batching.COMPOSED:
            return len(self._waiting)
        with self._changed:
            return len(self._waiting) + sum(len(call.rows) for call in self._calls)

    def _take_call(self, *, busy: bool) -> bool:
        """Moves the next call's rows to the waiting ones, unless it must wait for the running call to end."""
        if busy and self._batching is Batching.COMPOSED:
            return False
        with self._changed:
            if not self._calls:
                return False
            self._waiting.extend(self._calls.popleft().rows)
            return True

    def _sweep(self) -> None:
        """Removes the rows of calls that are over; rows of aborted calls keep their tokens."""
        over = [row for call in self._calls if call.over for row in call.rows]
        over += [row for row in self._waiting if _call_of(row).over]
        self._calls = deque(call for call in self._calls if not call.over)
        self._waiting = deque(row for row in self._waiting if not _call_of(row).over)
        if self._batch is not None:
            ended = self._batch.decoding.end(lambda row: _call_of(row).over)
            over += [row for row in ended if isinstance(row, CallRow)]
            if not self._batch.decoding.alive:
                self._leave()
        for row in over:
            row.stop_reason = StopReason.ABORTED
            _call_of(row).row_ended()

    def _all_calls(self) -> list[Call]:
        rows = [*(self._batch.decoding.rows if self._batch else ()), *self._entering, *self._waiting]
        found = {id(call): call for call in [*map(_call_of, rows), *self._calls]}
        return list(found.values())

    def _leave(self) -> None:
        """Ends all rows of the batch and drops it."""
        if self._batch is not None:
            self._batch.decoding.end()
            self._batch.release()
            self._batch = None

    def _drop_everything(self) -> None:
        self._leave()
        self._entering = ()
        self._waiting.clear()
        self._calls.clear()

    def _fail_running(self, error: Exception) -> None:
        """Fails every call that has admitted rows; once the engine is closed, every waiting call too."""
        with self._changed:
            untouched = () if self._closed else tuple(self._calls)
            calls = [call for call in self._all_calls() if call not in untouched]
            self._drop_everything()
            self._calls.extend(untouched)
            self._resting = True
            self._changed.notify_all()
        for call in calls:
            keys = ", ".join(row.request.key for row in call.rows[:3])
            ours = isinstance(error, EngineError)
            call.fail(error if ours else EngineError(f"generation failed ({keys} …): {error!r}"))


def _call_of(row: DecodingRow) -> Call:
    assert isinstance(row, CallRow) and row.call is not None
    return row.call
