"""The one thread on which a rank computes.

Collectives must start in the same order on every rank, and CUDA's current device belongs to a thread. So
everything a rank does with its group runs here, in the order of submission. The thread is a daemon: if a
peer is lost and a collective never returns, the process can still end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class RankThread:
    """Runs submitted calls one at a time, in the order of submission, on one daemon thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="rank", daemon=True).start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Ends the thread after the submitted work. torch's thread-local state keeps the process group
        alive, and a process that forks while such a thread exists may hang in the child, where the thread is
        gone."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, future = asked
            del asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del job, future  # do not hold the tensors of a finished call until the next one
