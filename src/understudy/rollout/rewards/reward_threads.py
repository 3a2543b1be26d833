"""A pool of daemon threads for rewards that are plain functions.

A reward is user code and may hang. On the event loop's default executor it would block other work (a
checkpoint, a read from disk), and Python joins those threads at exit. These threads are separate and never
joined.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

_MOST = min(32, (os.cpu_count() or 1) + 4)
"""The size of the event loop's default executor."""


class DaemonThreads(Executor):
    """An executor whose threads end with the process, even in the middle of a job."""

    def __init__(self, most: int = _MOST, name: str = "reward") -> None:
        self._most, self._name = most, name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        self._jobs.put((future, partial(context.run, job, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                entry = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                entry = self._jobs.get()
            if entry is None:
                return
            future, job = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)
            del entry, future, job

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Threads end after their current job; this does not wait for them."""
        for _ in range(self._started):
            self._jobs.put(None)
