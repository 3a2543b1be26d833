"""How a run stops on a signal: finish the step, save, exit; on a second signal, exit at once.

| event                                 | effect                                                       |
|---------------------------------------|--------------------------------------------------------------|
| first SIGINT, SIGTERM or SIGHUP       | finish the step, save the last finished step, exit           |
| the step still waits after STOP_WAIT_S | cancel the wait (rows, a publish, an evaluation), save, exit |
| still closing LEAVE_S after the save  | end child processes and this process                         |
| second SIGINT or SIGTERM              | end child processes and this process                         |
| signal not handled for BLOCKED_S      | the same: a coroutine blocks the event loop                  |

After the first signal a computation is always finished. A wait is bounded, because its end may never come (a reward that hangs, a
stopped teacher). No child process survives in any of these cases.

There are no signals on a thread other than the main one. If a `CALLER` waits for the run on another thread
(`run/own_thread.py`), the caller stops the run instead. Where the process would end, only the caller's wait
ends, because the process is not the run's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

EXIT_NOW = 130
STOP_WAIT_S = 8.0
"""How long a step may go on waiting after the first interrupt."""
LEAVE_S = 12.0
"""How long processes and connections may take to close after the save."""
BLOCKED_S = 25.0
"""How long the event loop may take to handle a signal."""
_CANCEL_S = 3.0
"""How long a wait that is cancelled may take to end."""
Result = TypeVar("Result")


@dataclass(slots=True)
class Caller:
    """A thread that waits for a run on another thread, and receives its interrupts."""

    leave: Callable[[], None]
    """Ends the caller's wait at once. May be called on any thread."""
    stop: Callable[[], None] | None = None
    """Interrupts the run as a SIGINT would. None while there is no run to stop."""


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)


class Abandoned(Exception):
    """A wait was cancelled because it had not ended `STOP_WAIT_S` after a stop request."""


class Interrupts:
    """Signal handlers of a run. `with Interrupts(on_first) as stop:` installs them.

    The trainer checks `stop.requested` between steps and wraps every wait within a step in `stop.waiting(…)`.
    Until `training` is set, the first interrupt cancels the task that starts the run, because there is
    nothing to save.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[], None] = lambda: None) -> None:
        """`on_first` shows a message after the first signal; `on_second` ends child processes after the second."""
        self.requested = False
        self.training = False
        self._abandoned = False
        self._stop_request = asyncio.Event()
        self._on_stop: list[Callable[[], None]] = []
        self._on_first = on_first
        self._on_second = on_second
        self._task: asyncio.Task[object] | None = None
        self._installed: list[signal.Signals] = []
        self._exit_timer: threading.Timer | None = None
        self._blocked_timer: threading.Timer | None = None
        self._caller: Caller | None = None
        self._caller_asked = False

    def starting(self, on_second: Callable[[], None]) -> None:
        """The run's parts are being started, for the first time or again. `on_second` ends them at once."""
        self.training = False
        self._on_second = on_second
        self._on_stop.clear()

    def on_stop(self, action: Callable[[], None]) -> None:
        """Calls `action` on the event loop at a stop request, or now if there was one. `starting` clears the
        list."""
        if self.requested:
            action()
        else:
            self._on_stop.append(action)

    async def waiting(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which waits for other tasks or processes. `Abandoned` if it is not done
        `STOP_WAIT_S` after a stop request. After one abandoned wait every later one is abandoned too: an
        evaluation must not use weights whose publish was abandoned.

        On `Abandoned` or a cancellation the caller next closes what `work` uses. So `work` gets `_CANCEL_S`
        to end first.
        """
        if self._abandoned:
            work.close()
            raise Abandoned
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop_request.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=STOP_WAIT_S)
            if task.done():
                return task.result()
        finally:
            stop.cancel()
            task.cancel()
            if not task.done():
                await asyncio.wait({task}, timeout=_CANCEL_S)
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    logger.warning("what was given up ended with %s: %s", type(error).__name__, error)
        self._abandoned = True
        # Hanging threads may fill the old executor, and saving needs free threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="leaving"))
        raise Abandoned

    def start_exit_timer(self, before_exit: Callable[[], None]) -> None:
        """Called after the save. If the process has not ended `LEAVE_S` later, calls `before_exit` and ends
        child processes and process."""

        def end() -> None:
            before_exit()
            self._end_now()

        self._exit_timer = _daemon(LEAVE_S, end)

    def __enter__(self) -> Interrupts:
        self._task = asyncio.current_task()
        self._loop = loop = asyncio.get_running_loop()
        self._caller = CALLER.get()
        if self._caller is not None:
            self._caller.stop = self._stop_by_caller
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and stays so
            numbers.append(signal.SIGHUP)
        for number in numbers:
            try:
                loop.add_signal_handler(number, self._interrupt, number)
            except (ValueError, RuntimeError):  # not the main thread: the caller's own handlers stay
                continue
            # The loop gets the signal through its own pipe. This handler is called even if the loop is
            # blocked.
            signal.signal(number, self._received)
            self._installed.append(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._caller.stop = None
        for timer in (self._exit_timer, self._blocked_timer):
            if timer is not None:
                timer.cancel()
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        """Python's signal handler, on the main thread. If the loop does not handle the signal (`_interrupt`) within
        `BLOCKED_S`, the process ends."""
        if self._blocked_timer is None:
            self._blocked_timer = _daemon(BLOCKED_S, self._end_now)

    def _stop_by_caller(self) -> None:
        """Called on the caller's thread."""
        if self._caller_asked:
            self._end_now()
            return
        self._caller_asked = True
        self._received(signal.SIGINT, None)
        self._loop.call_soon_threadsafe(self._interrupt, signal.SIGINT)

    def _end_now(self) -> None:
        """Called on the event loop, or on a timer's or the caller's thread."""
        self._on_second()
        if self._caller is not None:
            self._caller.leave()
            return
        # Not sys.exit: a blocked worker thread must not hold the process.
        os._exit(EXIT_NOW)

    def _interrupt(self, number: signal.Signals) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
        if self.requested and number is signal.SIGHUP:
            return  # shell and kernel both send it when a terminal closes: this is no second request
        if self.requested:
            self._end_now()
            return
        self.requested = True
        self._stop_request.set()
        for action in self._on_stop:
            action()
        if self.training:
            again = "SIGTERM leaves at once" if number is signal.SIGHUP else "once more to leave at once"
            self._on_first(
                f"{number.name}: finishing this step (or giving it up after {STOP_WAIT_S:.0f} s of waiting), then saving; {again}"
            )
        elif self._task is not None:
            self._task.cancel()


def _daemon(seconds: float, action: Callable[[], None]) -> threading.Timer:
    """A started timer that does not keep the process alive."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer
