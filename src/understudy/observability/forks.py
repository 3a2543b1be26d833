"""Closes this process's pipes and locks in every fork of it, and says how our modules are started as programs.

A reward, an agent loop or a tool may fork; `multiprocessing` pools do by default on Linux. The child
inherits every open file of this process for as long as it lives, and a pool whose owner was killed waits for
work for ever. Peers detect our death by EOF on a pipe or by a released lock, so a forked child that kept
either open would hide it. Forked children must close both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

PYTHON = (sys.executable, "-P")
"""Starts a module of the package as a program. Without `-P`, `-m` and `-c` put the working directory in front of Python's
path, so a user's `random.py` there would replace the standard module."""

Owner = TypeVar("Owner")
_CLOSERS: WeakKeyDictionary[object, Callable[[object], object]] = WeakKeyDictionary()


def close_in_forks(owner: Owner, close: Callable[[Owner], object]) -> None:
    """Calls `close(owner)` in every fork of this process. Programs started with exec inherit none of our
    files anyway."""
    _CLOSERS[owner] = close  # type: ignore[assignment]


def _close_all() -> None:
    for owner, close in list(_CLOSERS.items()):
        close(owner)
    _CLOSERS.clear()


os.register_at_fork(after_in_child=_close_all)
