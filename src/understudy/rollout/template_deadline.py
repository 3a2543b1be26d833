"""A deadline for programs that come with a model: a chat template may loop for ever.

The sandbox of Jinja bounds what a template can reach, not how long it runs. `within` raises `TemplateTimeout` in the
thread that renders, at its next step of Python; a single long call in C ends first. Memory is not bounded.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TEMPLATE_SECONDS = 10.0
"""For one prompt, or for the prompts of one batch. An honest template takes milliseconds."""


class TemplateTimeout(Exception):
    """The template did not end in time."""

    def __str__(self) -> str:
        return f"it did not end within {TEMPLATE_SECONDS:g} s"


class _Watch:
    """One thread that ends what is late. Started at the first use; the lock guards all fields."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: list[tuple[float, int, int]] = []
        """(deadline, number, thread), soonest first."""
        self._active: set[int] = set()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> int:
        number = next(self._numbers)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(target=self._run, name="template-deadline", daemon=True)
                self._thread.start()
            self._active.add(number)
            entry = (time.monotonic() + seconds, number, threading.get_ident())
            heapq.heappush(self._waiting, entry)
            if self._waiting[0] is entry:
                self._lock.notify()
        return number

    def end(self, number: int) -> None:
        with self._lock:
            if number in self._active:
                self._active.remove(number)
            else:  # told to end at the same moment: take that back
                _raise_in(threading.get_ident(), None)

    def _run(self) -> None:
        with self._lock:
            while True:
                if not self._waiting:
                    self._lock.wait()
                    continue
                deadline, number, thread = self._waiting[0]
                if number not in self._active:
                    heapq.heappop(self._waiting)
                elif (left := deadline - time.monotonic()) > 0:
                    self._lock.wait(left)
                else:
                    heapq.heappop(self._waiting)
                    self._active.remove(number)
                    _raise_in(thread, TemplateTimeout)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    told = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), told)


_watch = _Watch()


@contextmanager
def within(seconds: float | None = None) -> Iterator[None]:
    """Raises `TemplateTimeout` inside the block after this long."""
    number = _watch.begin(TEMPLATE_SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        _watch.end(number)
