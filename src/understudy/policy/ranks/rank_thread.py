"""The one thread on which a rank computes.

Collectives must start in the same order on every rank, and CUDA's current device belongs to a thread. So
everything a rank does with its group runs here, in the order of submission. The thread is a daemon: if a
peer is lost and a collective never returns, the process can still end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode

Result = TypeVar("Result")


class RankThread:
    """Runs submitted calls one at a time, in the order of submission, on one daemon thread."""

    def __init__(self) -> None:
        _keep_device_guard()
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


@functools.cache
def _keep_device_guard() -> None:
    """Enters torch's fake tensor mode, as FSDP does, first on a thread that never ends.

    A torch built for CUDA that sees no GPU then replaces CUDA's device guard, for the whole process, by an
    object of the calling thread. After that thread has ended, the next thread that shards a model reads freed
    memory and the process ends by SIGSEGV (torch 2.11). A restart of the run starts such a thread.
    """
    entered = threading.Event()

    def enter() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:
            entered.set()
        threading.Event().wait()

    threading.Thread(target=enter, name="device-guard", daemon=True).start()
    entered.wait()
