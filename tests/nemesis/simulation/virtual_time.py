"""An event loop whose time passes only when no task can continue: waiting takes no time, and a seed fixes the order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_LAST_TURNS = 30


class Stalled(Exception):
    """No task can go on, and no timer is set: the program would wait for ever."""


class _NoFiles(selectors.SelectSelector):
    """Files never become ready; waiting for them moves the clock to the next timer."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stalled(f"at {self.loop.now:.2f} s")
        self.loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        files = _NoFiles()
        files.loop = self
        super().__init__(files)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *arguments: Any) -> Any:
        """Runs the function at once on this thread: another thread would make the order depend on the machine."""
        future = self.create_future()
        try:
            future.set_result(func(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def abandon(self) -> None:
        """Cancels every task, again and again if needed, and closes the loop."""
        for _ in range(_LAST_TURNS):
            for task in (tasks := asyncio.all_tasks(self)):
                task.cancel()
            if not tasks:
                break
            self.call_soon(self.stop)
            self.run_forever()
        self.close()


class SystemClocks:
    """A replacement of the module `time`: the monotonic clock is the running loop's, the time of day can be changed."""

    def __init__(self) -> None:
        self.set_by = 0.0
        """Seconds by which the time of day is wrong."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return 1.8e9 + self.monotonic() + self.set_by


def run(work: Coroutine[Any, Any, Result], start: float = 0.0) -> Result:
    loop = VirtualLoop(start)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.abandon()
