"""Progress of slow work: silent for the first seconds, then a bar or a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

QUIET_SECONDS = 2.0
"""How long nothing is shown."""
SHORT_SECONDS = 0.5
"""After that, pieces of work shorter than this are still not shown."""
_PLAIN_SECONDS = 5.0
_REFRESH_SECONDS = 0.2


class SlowWork:
    """`with slow.work("reading data.train", total=rows) as advance: …`; all work of one `SlowWork`
    shares the quiet time.

    A thread of its own prints, so work that never calls `advance` is shown too. In a terminal it is a bar
    that disappears, otherwise a line after 5, 10, 20, … seconds.
    """

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self._enabled = enabled
        self._console = console or Console(stderr=True)
        self._until = time.monotonic() + QUIET_SECONDS

    @contextmanager
    def work(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        done, ended, began = 0, threading.Event(), time.monotonic()

        def advance(pieces: int) -> None:
            nonlocal done
            done += pieces

        def talk() -> None:
            if ended.wait(max(SHORT_SECONDS, self._until - time.monotonic())):
                return
            if self._console.is_terminal:
                self._bar(text, total, ended, lambda: done)
                return
            pause = _PLAIN_SECONDS
            while True:
                seconds = time.monotonic() - began
                so_far = (
                    f": {done:,} of {total:,}" if total else f", for {seconds:.0f} s" if seconds >= 1 else ""
                )
                self._console.print(f"{text}{so_far}", highlight=False, markup=False, soft_wrap=True)
                if ended.wait(pause):
                    return
                pause *= 2

        talker = threading.Thread(target=talk, name="slow-work", daemon=True)
        if self._enabled:
            talker.start()
        try:
            yield advance
        finally:
            ended.set()
            if self._enabled:
                talker.join()

    def _bar(self, text: str, total: int | None, ended: threading.Event, done: Callable[[], int]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
        counted = (MofNCompleteColumn(),) if total else ()
        with Progress(
            *columns, *counted, TimeElapsedColumn(), console=self._console, transient=True
        ) as progress:
            task = progress.add_task(text, total=total)
            while not ended.wait(_REFRESH_SECONDS):
                progress.update(task, completed=done())
