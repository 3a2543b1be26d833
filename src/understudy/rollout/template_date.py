"""The day that a chat template sees as today's: that on which the run began.

Templates ask for it by `strftime_now`, which transformers answers by the clock. It hands a template plain values only,
so the function cannot be given with a prompt: `BoundedEnvironment` puts the one below in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime

NOW = "strftime_now"
"""The function's name in templates, and the day's among the options that a `Renderer` takes."""
_day: ContextVar[date | None] = ContextVar("day", default=None)


@contextmanager
def on_day(day: str | None) -> Iterator[None]:
    """Templates that are rendered inside see this day (`2026-11-19`); None: the clock's."""
    token = _day.set(date.fromisoformat(day) if day else None)
    try:
        yield
    finally:
        _day.reset(token)


def strftime_now(form: str) -> str:
    return (_day.get() or datetime.now()).strftime(form)
