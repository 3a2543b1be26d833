"""What belongs to this process alone: a fork of it lets go at once.

A reward, an agent loop or a tool may fork; a pool of processes does, by Python's own choice on Linux. The fork has every open file of
ours, for as long as it lives, and a pool whose owner was killed waits for work for ever. By the end of a pipe others know that we are
gone, and by a lock that nobody writes here: a fork that holds either would speak for a process that is no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

Thing = TypeVar("Thing")
_OURS: WeakKeyDictionary[object, Callable[[object], object]] = WeakKeyDictionary()


def only_here(thing: Thing, let_go: Callable[[Thing], object]) -> None:
    """`let_go(thing)` is called in every fork of this process; not in programs that are started, which inherit nothing of ours."""
    _OURS[thing] = let_go  # type: ignore[assignment]


def _let_go_of_all() -> None:
    for thing, let_go in list(_OURS.items()):
        let_go(thing)
    _OURS.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
