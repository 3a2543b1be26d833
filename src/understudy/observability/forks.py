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

Thing = TypeVar("Thing")
_OURS: WeakKeyDictionary[object, Callable[[object], object]] = WeakKeyDictionary()


def only_here(thing: Thing, let_go: Callable[[Thing], object]) -> None:
    """Calls `let_go(thing)` in every fork of this process. Programs started with exec inherit none of our
    files anyway."""
    _OURS[thing] = let_go  # type: ignore[assignment]


def _let_go_of_all() -> None:
    for thing, let_go in list(_OURS.items()):
        let_go(thing)
    _OURS.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
