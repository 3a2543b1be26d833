"""Closes this process's pipes and locks in every fork of it.

A reward, an agent loop or a tool may fork; `multiprocessing` pools do by default on Linux. The child
inherits every open file of this process for as long as it lives, and a pool whose owner was killed waits for
work for ever. Peers detect our death by EOF on a pipe or by a released lock, so a forked child that kept
either open would hide it. Forked children must close both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

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
