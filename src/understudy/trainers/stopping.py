"""Ctrl-C, SIGTERM or a closed terminal once: finish the step, save, leave. Ctrl-C or SIGTERM after that: leave now. No orphan either way.

    signal ──> the step ends by itself within PATIENCE_S ───────────────────────┐
          └──> it still waits (rows, a publish, answers to an evaluation): given up ┴──> save the last finished step ──> leave

What computes is let finish; what waits is waited for only so long, because what it waits for may never come (a reward that hangs,
a teacher that is stopped). Leaving has its own limit, LEAVE_S, counted from the save: then whatever has not ended is ended. And where
the event loop itself does not hear the signal for DEAF_S (somebody's coroutine blocks it), the process leaves as by a kill.

On a thread that is not the main one there are no signals. Where a `CALLER` waits for the run (`own_thread.py`), it stops the run
instead, and is let go wherever the process would end: the process is not the run's own.
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
PATIENCE_S = 8.0
"""How long a step may go on waiting after the first interrupt."""
LEAVE_S = 12.0
"""How long processes and connections may take to close once everything is saved."""
DEAF_S = 25.0
"""How long the event loop may take to hear a signal at all."""
_CANCEL_S = 3.0
Result = TypeVar("Result")


@dataclass(slots=True)
class Caller:
    """Waits for a run on another thread, and gets the interrupts that are meant for it."""

    leave: Callable[[], None]
    """Ends the waiting at once; may be called on any thread."""
    stop: Callable[[], None] | None = None
    """Interrupts the run, as a SIGINT would; None while there is nothing that could be stopped orderly."""


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)


class Abandoned(Exception):
    """Somebody asked to stop, and this was still waiting `PATIENCE_S` later."""


class Interrupts:
    """`with Interrupts(on_first) as stop:` … `stop.requested` is looked at between steps, `stop.waiting(…)` within them.

    Until `training` is set, the first interrupt cancels the task that is starting things up: there is nothing to save.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self.training = False
        self._gave_up = False
        self._told = asyncio.Event()
        self._when_told: list[Callable[[], None]] = []
        self._on_first = on_first
        self._on_second = on_second
        self._task: asyncio.Task[object] | None = None
        self._installed: list[signal.Signals] = []
        self._last_resort: threading.Timer | None = None
        self._unheard: threading.Timer | None = None
        self._caller: Caller | None = None
        self._asked = False

    def starting(self, on_second: Callable[[], None]) -> None:
        """Things are being started up (again); `on_second` ends them at once."""
        self.training = False
        self._on_second = on_second
        self._when_told.clear()

    def when_told(self, action: Callable[[], None]) -> None:
        """Called on the event loop when somebody asks to stop what was started up last; at once where that has happened already."""
        if self.requested:
            action()
        else:
            self._when_told.append(action)

    async def waiting(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` gives, which waits for others; `Abandoned` where it waits too long after somebody asked to stop. Once
        something was given up, nothing more is waited for: an evaluation must not see weights whose publish was given up.

        Whoever is told that it was given up, or is cancelled, closes next what the work uses: so it is over by then, if it can be.
        """
        if self._gave_up:
            work.close()
            raise Abandoned
        task, told = asyncio.create_task(work), asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=PATIENCE_S)
            if task.done():
                return task.result()
        finally:
            told.cancel()
            task.cancel()
            if not task.done():
                await asyncio.wait({task}, timeout=_CANCEL_S)
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    logger.warning("what was given up ended with %s: %s", type(error).__name__, error)
        self._gave_up = True
        # Threads that hang may hold all places of the old one, and saving needs some.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="leaving"))
        raise Abandoned

    def leaving(self, last_words: Callable[[], None]) -> None:
        """All is saved. What has not closed `LEAVE_S` from now is ended, the process included, after these `last_words`."""

        def end() -> None:
            last_words()
            self._leave_now()

        self._last_resort = _daemon(LEAVE_S, end)

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
            # The loop hears of the signal by its own pipe; this one is called even where the loop is blocked.
            signal.signal(number, self._received)
            self._installed.append(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._caller.stop = None
        for timer in (self._last_resort, self._unheard):
            if timer is not None:
                timer.cancel()
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._unheard is None:
            self._unheard = _daemon(DEAF_S, self._leave_now)

    def _stop_by_caller(self) -> None:
        """Called on the caller's thread."""
        if self._asked:
            self._leave_now()
            return
        self._asked = True
        self._received(signal.SIGINT, None)
        self._loop.call_soon_threadsafe(self._interrupt, signal.SIGINT)

    def _leave_now(self) -> None:
        self._on_second()
        if self._caller is not None:
            self._caller.leave()
            return
        # Not sys.exit: a blocked worker thread must not hold the process.
        os._exit(EXIT_NOW)

    def _interrupt(self, number: signal.Signals) -> None:
        if self._unheard is not None:
            self._unheard.cancel()
        if self.requested and number is signal.SIGHUP:
            return  # a closed terminal sends it by the shell and by the kernel: no second wish to stop
        if self.requested:
            self._leave_now()
            return
        self.requested = True
        self._told.set()
        for action in self._when_told:
            action()
        if self.training:
            self._on_first(
                f"{number.name}: finishing this step (or giving it up after {PATIENCE_S:.0f} s of waiting), then saving; "
                "once more to leave at once"
            )
        elif self._task is not None:
            self._task.cancel()


def _daemon(seconds: float, action: Callable[[], None]) -> threading.Timer:
    """Acts after so many seconds, unless it is cancelled or the process ends first."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer
