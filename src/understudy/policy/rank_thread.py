"""The one thread a rank computes on.

Collectives must start in the same order on every rank, and CUDA's current device belongs to a thread; so everything a
rank does with its group happens here, in the order it was asked for. The thread is a daemon: where a peer is lost and a
collective never returns, the process can still end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class RankThread:
    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="rank", daemon=True).start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while True:
            job, future = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del job, future  # tensors of a finished call are not held until the next one
