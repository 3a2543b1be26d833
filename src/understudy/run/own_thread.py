"""A run whose caller is inside a running event loop, as every cell of a notebook is: a thread with a loop of its own.

    caller's thread (blocked, as by any long cell)          run's thread
    KeyboardInterrupt, the first   ──────────────────────>  `Interrupts`: finish the step, save, return
                       the second  ──────────────────────>  its processes are killed, its task is cancelled; the caller goes on

Signals reach the main thread alone, where they become KeyboardInterrupt. The process is the caller's and is never ended from here.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from understudy.trainers.stopping import CALLER, Caller

_UNWIND_SECONDS = 3.0
"""How long the caller waits for a run that was told to leave at once."""
Result = TypeVar("Result")


def inside_a_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class OwnThread(Generic[Result]):
    """`OwnThread(run).result(work)`: what `work` gives, where `run` (like `asyncio.run`) runs it on another thread. Used once."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Result]], Result]) -> None:
        self._run = run
        self._caller = Caller(self._leave)
        self._done = threading.Event()
        """The run is over, or it is left behind."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._outcome: Callable[[], Result] | None = None

    def result(self, work: Coroutine[Any, Any, Result]) -> Result:
        context = contextvars.copy_context()
        context.run(CALLER.set, self._caller)
        # A daemon: a run that hangs after it was told to leave must not hold up the end of the interpreter.
        thread = threading.Thread(
            target=context.run, args=(self._body, work), name="understudy-own-loop", daemon=True
        )
        thread.start()
        cancelled = False
        while not self._done.is_set():
            try:
                self._done.wait()
            except KeyboardInterrupt:
                if self._caller.stop is not None:
                    self._caller.stop()
                elif cancelled:
                    self._leave()
                else:  # nothing that could be saved: a start, an evaluation, the report
                    cancelled = True
                    self._cancel()
        if self._outcome is None:
            thread.join(_UNWIND_SECONDS)
            raise KeyboardInterrupt
        return self._outcome()

    def _body(self, work: Coroutine[Any, Any, Result]) -> None:
        try:
            result = self._run(self._known(work))
            self._outcome = lambda: result
        except BaseException as error:
            raised = KeyboardInterrupt() if isinstance(error, asyncio.CancelledError) else error

            def fail() -> Result:
                raise raised

            self._outcome = fail
        finally:
            self._done.set()

    async def _known(self, work: Coroutine[Any, Any, Result]) -> Result:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await work

    def _leave(self) -> None:
        """The caller does not wait any longer. Called on any thread."""
        self._cancel()
        self._done.set()

    def _cancel(self) -> None:
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
