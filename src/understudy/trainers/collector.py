"""Python's collector of garbage, which a step on a CPU meets where nothing else can run.

A step makes some ten thousand small objects while it begins its samples and while it takes their answers, and for every 700 more
than were freed Python looks for cycles among the newest: with 128 rows a step some 12 ms of it, nearly all of it before the
engine has its rows or before teachers have theirs. Few of these objects are in cycles. Asked after many more of them, the
collector finds the same garbage in one go, and comes to old objects, which take it 0.2 s, as much less often.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""Made more than freed before the newest are looked through: some ten megabytes."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Leaves a collector alone that is switched off, or has been told to wait longer still."""
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
