"""A pool of daemon threads for rewards that are plain functions.

A reward is user code and may hang. On the event loop's default executor it would block other work (a
checkpoint, a read from disk), and Python joins those threads at exit. These threads are separate and never
joined.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from understudy.rollout.user_code import as_ordinary

_MOST = min(32, (os.cpu_count() or 1) + 4)
"""The size of the event loop's default executor."""


_MOST_ABANDONED = 256
"""Threads that hang in a job whose caller has given up, beyond which no thread replaces one."""


class _Job(Future[Any]):
    """The future of a job. A caller that gives up cancels it, also while it runs."""

    def __init__(self, call: Callable[[], Any], abandoned: Callable[[], None]) -> None:
        super().__init__()
        self.call, self._abandoned, self.given_up = call, abandoned, False

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not cancelled and self.running() and not self.given_up:
            self.given_up = True
            self._abandoned()
        return cancelled


class DaemonThreads(Executor):
    """An executor whose threads end with the process, even in the middle of a job.

    A thread whose job was given up (a reward past its deadline) is replaced, so that hanging jobs leave the
    others their threads."""

    def __init__(self, most: int = _MOST, name: str = "reward") -> None:
        self._most, self._name = most, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._threads = self._abandoned = 0
        """How many there are, and how many of them run a job that was given up."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        context = contextvars.copy_context()
        future = _Job(partial(context.run, job, *args, **kwargs), self._abandon)
        self._jobs.put(future)
        if not self._idle.acquire(blocking=False):
            self._start()
        return future

    def _allowed(self) -> int:
        return self._most + min(self._abandoned, _MOST_ABANDONED)

    def _start(self) -> None:
        with self._lock:
            if self._threads >= self._allowed():
                return
            self._threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{next(self._numbers)}", daemon=True).start()

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned += 1
        if not self._jobs.empty():
            self._start()

    def _replaced(self) -> bool:
        """Called by a thread whose job was given up and is over. Whether another thread has taken its place."""
        with self._lock:
            self._abandoned -= 1
            surplus = self._threads > self._allowed()
            self._threads -= surplus
            return surplus

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(job.call())
                except BaseException as error:
                    job.set_exception(as_ordinary(error))
            if job.given_up and self._replaced():
                return
            del job

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Threads end after their current job; this does not wait for them."""
        for _ in range(self._threads):
            self._jobs.put(None)
