"""The prompt cursor of a run that takes prompts ahead of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from understudy.trainers.windows import Windows
from understudy.types.prompt import Prompt


class Cursor(Protocol):
    def take(self, count: int) -> list[Prompt]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class WindowCursor:
    """Hands out prompts like the cursor it wraps, but `state` is where the oldest window not yet wholly trained begins.

    A resume starts there: prompts of that window which were trained already are known to the ledger and not made again.
    """

    def __init__(self, cursor: Cursor, windows: Windows, trained: int) -> None:
        self._cursor, self._windows = cursor, windows
        self._taken = trained * windows.size
        self._trained = trained
        self._starts: dict[int, dict[str, Any]] = {trained: cursor.state()}

    def take(self, count: int) -> list[Prompt]:
        """`count` prompts of one window."""
        prompts = self._cursor.take(count)
        self._taken += count
        if self._taken % self._windows.size == 0:
            self._starts[self._taken // self._windows.size] = self._cursor.state()
        return prompts

    def window_trained(self) -> None:
        self._starts.pop(self._trained)
        self._trained += 1

    def state(self) -> dict[str, Any]:
        return self._starts.get(self._trained) or self._cursor.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("a run is restored before its windows are cut")
