"""The prompt cursor of the fully async trainer, which takes prompts ahead of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from understudy.planning.windows import Windows
from understudy.types.prompt import Prompt


class Cursor(Protocol):
    """A prompt cursor that `WindowCursor` wraps."""

    def take(self, count: int) -> list[Prompt]: ...
    def prompt(self, key: str) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Passed:
    """A prompt that belongs to another window than the one prompts were being taken for."""

    prompt: Prompt
    before: dict[str, Any]
    """The cursor's state just before it."""


class WindowCursor:
    """Hands out prompts like the cursor it wraps, but its `state` is the start of the oldest window not fully
    trained.

    A resume starts there. Prompts of that window that were trained already are in the ledger and are not made
    again.

    If filtered prompts are replaced (`refill`), the prompts of a window depend on timing: a replacement is
    taken after prompts of later windows. A resume therefore follows the journal. `assigned` names the window
    of every prompt with rows in flight. A prompt that the cursor meets while it fills another window is kept
    for its own window. Every prompt of a window was taken after the window's first prompt, so a cursor that
    starts there meets all of them.
    """

    def __init__(
        self, cursor: Cursor, windows: Windows, trained: int, assigned: Mapping[str, int] | None = None
    ) -> None:
        self._cursor, self._windows = cursor, windows
        self._taken = trained * windows.size
        self._trained = trained
        self._assigned = dict(assigned or {})
        """Windows of prompts that the cursor has not reached yet."""
        self._passed: dict[int, list[_Passed]] = {}
        self._starts: dict[int, dict[str, Any]] = {trained: cursor.state()}

    def take(self, count: int) -> list[Prompt]:
        """Prompts for the next `count` places, which belong to one window."""
        window = self._taken // self._windows.size
        self._starts.setdefault(window, self._place())
        self._taken += count
        return self._next(window, count)

    def prompt(self, key: str) -> Prompt:
        return self._cursor.prompt(key)

    def refill(self, window: int, count: int) -> list[Prompt]:
        """Other prompts for places of a window whose prompts were filtered."""
        return self._next(window, count)

    def has_unfilled(self, window: int) -> bool:
        """Whether prompts that the journal holds for this window have not been handed out again yet."""
        return window in self._passed or window in self._assigned.values()

    def window_trained(self) -> None:
        self._starts.pop(self._trained)
        self._trained += 1

    def state(self) -> dict[str, Any]:
        return self._starts.get(self._trained) or self._place()

    def restore(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("a run is restored before its windows are cut")

    def _next(self, window: int, count: int) -> list[Prompt]:
        kept = self._passed.pop(window, [])
        prompts = [one.prompt for one in kept[:count]]
        if kept[count:]:
            self._passed[window] = kept[count:]
        while len(prompts) < count and self._assigned:
            before = self._cursor.state()
            (prompt,) = self._cursor.take(1)
            own_window = self._assigned.pop(prompt.key, window)
            if own_window == window:
                prompts.append(prompt)
            else:
                self._passed.setdefault(own_window, []).append(_Passed(prompt, before))
        return prompts + self._cursor.take(count - len(prompts))

    def _place(self) -> dict[str, Any]:
        """The earliest cursor state from which every prompt not handed out yet comes."""
        places = [kept[0].before for kept in self._passed.values()]
        return min([*places, self._cursor.state()], key=lambda place: (place["epoch"], place["place"]))
