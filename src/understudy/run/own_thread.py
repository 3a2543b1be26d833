"""Runs a run on its own thread and event loop, for a caller inside a running loop (a notebook cell).

| on the caller's thread   | effect on the run's thread                                                     |
|--------------------------|--------------------------------------------------------------------------------|
| (blocked in `result`)    | trains                                                                         |
| first KeyboardInterrupt  | `Interrupts`: finish the step, save, return                                    |
| second KeyboardInterrupt | child processes are killed, the task is cancelled; the caller waits no longer  |

Signals reach only the main thread, where they become KeyboardInterrupt. The process is the caller's, so this
module never ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from understudy.trainers.stopping import CALLER, Caller

_UNWIND_SECONDS = 3.0
"""How long the caller waits for the thread of a run that was asked to stop at once."""
Result = TypeVar("Result")


def inside_a_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in the block, also under `asyncio.run`.

    Its handler cancels the caller's task on the first SIGINT, which has no effect while the caller is blocked here.
    """
    handler = signal.getsignal(signal.SIGINT)
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    if threading.current_thread() is not threading.main_thread() or not isinstance(runner, asyncio.Runner):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class OwnThread(Generic[Result]):
    """`OwnThread(run).result(work)`: the result of `work`, which `run` (like `asyncio.run`) runs on another
    thread. Used once."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Result]], Result]) -> None:
        self._run = run
        self._caller = Caller(self._leave)
        self._done = threading.Event()
        """Set when the run is over, or when the caller stops waiting for it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._outcome: Callable[[], Result] | None = None

    def result(self, work: Coroutine[Any, Any, Result]) -> Result:
        context = contextvars.copy_context()
        context.run(CALLER.set, self._caller)
        # A daemon thread: a run that hangs after a stop request must not block the interpreter's exit.
        thread = threading.Thread(
            target=context.run, args=(self._body, work), name="understudy-own-loop", daemon=True
        )
        thread.start()
        with _interrupts_raised():
            self._wait()
        if self._outcome is None:
            thread.join(_UNWIND_SECONDS)
            raise KeyboardInterrupt
        return self._outcome()

    def _wait(self) -> None:
        cancelled = False
        while not self._done.is_set():
            try:
                self._done.wait()
            except KeyboardInterrupt:
                if self._caller.stop is not None:
                    self._caller.stop()
                elif cancelled:
                    self._leave()
                else:  # nothing to save: the run starts, evaluates or writes its report
                    cancelled = True
                    self._cancel()

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
        """Ends the caller's wait. Called on any thread."""
        self._cancel()
        self._done.set()

    def _cancel(self) -> None:
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
