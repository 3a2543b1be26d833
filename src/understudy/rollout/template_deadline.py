"""Bounds for programs that come with a model: a chat template may loop for ever, or fill the memory.

The sandbox of Jinja bounds what a template can reach, not how long it runs. `within` raises `TemplateTimeout` in the
thread that renders, at its next step of Python; a single long call in C ends first. Seconds are those of the thread's
own CPU time, so a process that was frozen, or shares a busy machine, loses no prompt.

`TemplateTooLarge` is raised if the process grows by `TEMPLATE_BYTES` while a block computes. It grows for other reasons
too, so only a block counts that used `_LONG_SECONDS` of CPU time meanwhile: an ordinary prompt takes milliseconds. What a
single operation may make is bounded by `template_bounds.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

TEMPLATE_SECONDS = 10.0
"""For one prompt, or for the prompts of one batch. An ordinary template takes milliseconds."""
TEMPLATE_BYTES = 1 << 30
_LONG_SECONDS = 0.1
_LOOK_SECONDS = 0.25
_DELIVERY_SECONDS = 0.5


class TemplateStopped(Exception):
    """The template went beyond a bound."""


class TemplateTimeout(TemplateStopped):
    def __str__(self) -> str:
        return f"it did not end within {TEMPLATE_SECONDS:g} s"


class TemplateTooLarge(TemplateStopped):
    def __str__(self) -> str:
        return f"it took more than {TEMPLATE_BYTES >> 20} MB of memory"


class _Watch:
    """A thread that looks for late blocks, started at the first use.

    There is no lock: an exception from outside may arrive at any step of the rendering thread, also just after it took
    a lock, which it would then keep. The thread that takes a block out of `_active` decides what becomes of it.
    """

    def __init__(self) -> None:
        self._active: dict[int, tuple[float, int, int]] = {}
        """Deadline, clock and thread of each block under way."""
        self._seen: dict[int, tuple[float, int]] = {}
        """CPU time and bytes of the process when the thread first saw a block. Only the thread uses it."""
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> int:
        if self._thread is None or not self._thread.is_alive():  # also after a fork
            self._thread = threading.Thread(target=self._run, name="template-deadline", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        thread = threading.get_ident()
        clock = _clock_of(thread)
        self._active[number] = (time.clock_gettime(clock) + seconds, clock, thread)
        return number

    def end(self, number: int) -> None:
        """Called in the block's thread. If the block was late by a moment, its exception is raised in here."""
        if self._active.pop(number, None) is not None:
            return
        until = time.monotonic() + _DELIVERY_SECONDS
        while time.monotonic() < until:
            time.sleep(0.001)
        _raise_in(threading.get_ident(), None)

    def forget(self, number: int) -> None:
        """Its exception has arrived."""
        self._active.pop(number, None)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            active = list(self._active.items())
            self._seen = {number: self._seen[number] for number, _ in active if number in self._seen}
            for number, (deadline, clock, thread) in active:
                try:
                    now = time.clock_gettime(clock)
                except OSError:  # the thread has ended
                    self._active.pop(number, None)
                    continue
                error = TemplateTimeout if now >= deadline else self._too_large(number, now)
                if error is not None and self._active.pop(number, None) is not None:
                    _raise_in(thread, error)

    def _too_large(self, number: int, now: float) -> type[TemplateStopped] | None:
        size = psutil.Process().memory_info().rss
        first, before = self._seen.setdefault(number, (now, size))
        grown = size - before > TEMPLATE_BYTES and now - first > _LONG_SECONDS
        return TemplateTooLarge if grown else None


def _clock_of(thread: int) -> int:
    """The thread's CPU time, where the system has such a clock."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(thread)
    return time.CLOCK_MONOTONIC


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    exception = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


_watch = _Watch()


@contextmanager
def within(seconds: float | None = None) -> Iterator[None]:
    """Raises `TemplateStopped` inside the block, or at its end, once it is beyond a bound."""
    number = _watch.begin(TEMPLATE_SECONDS if seconds is None else seconds)
    try:
        yield
    except TemplateStopped:
        _watch.forget(number)
        raise
    except BaseException:
        _watch.end(number)
        raise
    else:
        _watch.end(number)
