"""The live view of a run: a table in a terminal or in a notebook cell, plain lines anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from understudy.observability.notebook import NotebookCell, in_notebook
from understudy.observability.redact import printable
from understudy.observability.report import is_share

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SECONDS = 5.0
_CELL_SECONDS = 0.25


class LiveView:
    """`with LiveView(steps) as view: view.step(line)`; `enabled=False` shows nothing at all; 0 steps shows
    `work` alone."""

    def __init__(self, steps: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._enabled = enabled
        self._fancy = enabled and self.console.is_terminal
        self._cell = NotebookCell() if enabled and console is None and in_notebook() else None
        self._plain = enabled and not self._fancy and self._cell is None
        self._shown = 0.0
        self._steps = steps
        self._line: dict[str, Any] = {}
        self._phase = ""
        self._losses: deque[float] = deque(maxlen=48)
        self._last_plain = 0.0
        self.on_note: Callable[[str], None] = lambda text: None
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._others = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="italic", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("steps", total=steps)
        self._live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveView:
        if self._fancy:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fancy:
            self._live.stop()
        self._phase = ""
        self._show(at_once=True)

    def _show(self, *, at_once: bool = False) -> None:
        """Replaces the notebook's cell, otherwise at most a few times a second."""
        now = time.monotonic()
        if self._cell is not None and (at_once or now - self._shown > _CELL_SECONDS):
            self._shown = now
            self._cell.show(self._render())

    def phase(self, text: str) -> None:
        """Shows the current activity, for work that is not a step (starting teachers, evaluating)."""
        self._phase = text
        self._show(at_once=True)
        if self._plain and text:
            self._say(text)

    @contextmanager
    def work(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A progress bar for long work (`total` pieces, None if unknown); yields a function that adds
        pieces.

        Outside a terminal it prints a line at the start and one every few seconds.
        """
        bar = self._others.add_task(text, total=total, visible=not self._plain)
        done, last = 0, time.monotonic()
        self._show(at_once=True)
        if self._plain:
            self._say(text)

        def advance(pieces: int) -> None:
            nonlocal done, last
            done += pieces
            self._others.update(bar, completed=done)
            self._show()
            now = time.monotonic()
            if self._plain and now - last > _PLAIN_SECONDS:
                last = now
                self._say(f"{text}: {done}" + (f"/{total}" if total else ""))

        try:
            yield advance
        finally:
            self._others.remove_task(bar)
            self._show(at_once=True)

    def _say(self, text: str) -> None:
        """Prints a plain line; paths and names in it may contain what rich would read as markup."""
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a lasting message: a pause, a restarted replica, a dead letter. `on_note` gets it too."""
        self.on_note(text)
        if self._enabled:
            self.console.print(Text(f"! {printable(text)}", style="yellow"), soft_wrap=not self._fancy)

    def step(self, line: Mapping[str, Any]) -> None:
        self._line.update(line)
        step = int(line.get("step", 0))
        self._bar.update(self._task, completed=step)
        loss = line.get("actor/loss")
        if loss is not None:
            self._losses.append(float(loss))
        self._show()
        if self._plain:
            now = time.monotonic()
            if step in (0, self._steps) or now - self._last_plain > _PLAIN_SECONDS:
                self._last_plain = now
                self._say(f"step {step}/{self._steps}  " + "  ".join(f"{a} {b}" for a, b in self._figures()))

    def _figures(self) -> list[tuple[str, str]]:
        get = self._line.get
        figures = []
        held_out = is_share(get("val/accuracy"))
        for label, key, form in (
            ("loss", "actor/loss", "{:.4f}"),
            ("KL", "actor/distillation/loss", "{:.4f}"),
            (
                "accuracy" if held_out else "held-out reward",
                "val/accuracy",
                "{:.1%}" if held_out else "{:.4g}",
            ),
            ("reward", "critic/score/mean", "{:.3f}"),
            ("tokens/s", "perf/tokens_per_second", "{:,.0f}"),
            ("queue", "perf/queue_depth", "{:.0f}"),
        ):
            value = get(key)
            if value is not None:
                figures.append((label, form.format(value)))
        return figures

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for label, value in self._figures():
            table.add_row(Text(label, style="dim"), value)
        shares = {
            key: value
            for key, value in self._line.items()
            if key.startswith("perf/teacher/") and key.endswith("/share")
        }
        for key, share in sorted(shares.items()):
            name = key.removeprefix("perf/teacher/").removesuffix("/share")
            table.add_row(Text(name, style="dim"), f"{'█' * round(20 * share):<20} {share:.0%}")
        parts: list[RenderableType] = [self._bar, table] if self._steps else []
        if self._losses:
            parts.append(Text(_sparkline(list(self._losses)), style="cyan"))
        if self._others.task_ids:
            parts.append(self._others)
        if self._phase:
            parts.append(Text(self._phase, style="italic"))
        return Group(*parts)


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(
        _SPARKS[min(int((value - low) / span * len(_SPARKS)), len(_SPARKS) - 1)] for value in values
    )
