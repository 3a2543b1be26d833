"""Ctrl-C once: finish the step, save, leave. Twice: leave now. No orphan either way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType

EXIT_NOW = 130


class Interrupts:
    """`with Interrupts(on_first) as stop:` … `stop.requested` is looked at between steps.

    Until `training` is set, the first interrupt cancels the task that is starting things up: there is nothing to save.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self.training = False
        self._on_first = on_first
        self._on_second = on_second
        self._task: asyncio.Task[object] | None = None
        self._installed: list[signal.Signals] = []

    def starting(self, on_second: Callable[[], None]) -> None:
        """Things are being started up (again); `on_second` ends them at once."""
        self.training = False
        self._on_second = on_second

    def __enter__(self) -> Interrupts:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self._interrupt, number)
            except (ValueError, RuntimeError):  # not the main thread: the caller's own handlers stay
                continue
            self._installed.append(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        if self.requested:
            self._on_second()
            # Not sys.exit: a blocked worker thread must not hold the process.
            os._exit(EXIT_NOW)
        self.requested = True
        if self.training:
            self._on_first(f"{number.name}: finishing this step, then saving; once more to leave at once")
        elif self._task is not None:
            self._task.cancel()
