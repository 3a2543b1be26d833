"""The threshold of Python's garbage collector while a run trains on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from understudy.assembly.cpu_threads import NEW_OBJECTS, raised_gc_threshold


@pytest.fixture(autouse=True)
def restored_gc_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_the_gc_threshold_is_raised_inside_the_context_and_restored_after_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ZeroDivisionError), raised_gc_threshold():
        assert gc.get_threshold() == (NEW_OBJECTS, 10, 10)
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 2 * NEW_OBJECTS])
def test_a_disabled_gc_or_a_higher_threshold_is_left_as_it_is(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with raised_gc_threshold():
        assert gc.get_threshold() == (threshold, 10, 10)


def test_reference_cycles_are_still_collected_with_the_raised_threshold() -> None:
    found: list[object] = []
    with raised_gc_threshold():
        # A callback: Python 3.12 and newer collect after a call, and calling the reference would keep the object alive.
        watched = weakref.ref(Cycle(), found.append)
        kept: list[list[int]] = []
        while not found and len(kept) <= 2 * NEW_OBJECTS:
            kept.append([])
        assert found == [watched]
