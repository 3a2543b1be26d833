"""How often Python looks for garbage while a run is on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from understudy.assembly.cpu_threads import NEW_OBJECTS, raised_gc_threshold


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_seldom_inside_and_as_before_afterwards() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ZeroDivisionError), raised_gc_threshold():
        assert gc.get_threshold() == (NEW_OBJECTS, 10, 10)
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 2 * NEW_OBJECTS])
def test_whoever_said_more_is_obeyed(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with raised_gc_threshold():
        assert gc.get_threshold() == (threshold, 10, 10)


def test_cycles_are_found_all_the_same() -> None:
    found: list[object] = []
    with raised_gc_threshold():
        # A callback, since asking the reference would hold the object when Python 3.12 and newer collect: after a call.
        watched = weakref.ref(Cycle(), found.append)
        kept: list[list[int]] = []
        while not found and len(kept) <= 2 * NEW_OBJECTS:
            kept.append([])
        assert found == [watched]
