"""Records what a live run waits for, and reports it when nothing has progressed for long.

Everything a run does is a span, so a run waits for its open spans. `graph`, given by the caller, knows how
spans depend on each other and draws them as chains, from a task down to what blocks it:

    train waits for rows of produce window 3 (12 s)
      <- produce window 3 waits for 12 scores … <- teacher math: replica 0 …

A watchdog never ends a run: waiting for a lost teacher is intended. It only tells the user the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from understudy.errors import RunDirectoryError
from understudy.observability.rundir import read_whole, write_atomically
from understudy.observability.spans import OpenSpan, Spans

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 2.0
FRESH_SECONDS = 15.0
"""A live run writes waits.json every 2 s; one that was not written for this long is not live."""
Graph = Callable[[Sequence[OpenSpan], float], list[str]]
"""(open spans, time now) → one line per chain of waits."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The open spans of one name."""

    name: str
    count: int
    seconds: float
    """Age of the oldest."""
    about: dict[str, Any]
    """Attributes of the oldest."""

    def __str__(self) -> str:
        what = ", ".join(f"{key} {value}" for key, value in self.about.items())
        many = f"{self.count} × " if self.count > 1 else ""
        return (
            f"{many}{self.name}"
            + (f" ({'oldest: ' if many else ''}{what})" if what else "")
            + f", {self.seconds:.0f} s"
        )


def waiting_for(spans: Sequence[OpenSpan], now: float) -> list[Wait]:
    """One entry per name, the longest wait first."""
    by_name: dict[str, list[OpenSpan]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    waits = []
    for name, members in by_name.items():
        oldest = min(members, key=lambda span: span.start)
        waits.append(Wait(name, len(members), now - oldest.start, dict(oldest.about)))
    return sorted(waits, key=lambda wait: -wait.seconds)


@asynccontextmanager
async def watched(
    spans: Spans,
    path: Path,
    stall_seconds: float,
    tell: Callable[[str], None],
    facts: Callable[[], dict[str, Any]],
    graph: Graph = lambda spans, now: [],
) -> AsyncIterator[None]:
    """Keeps `path` up to date while the body runs; `facts` returns current figures to record beside the
    waits."""
    ended = asyncio.Event()
    dog = asyncio.create_task(_watch(spans, path, stall_seconds, tell, facts, graph, ended), name="watchdog")
    try:
        yield
    finally:
        # Not cancelled: a write in progress on its thread would continue, and leave "running" as the last
        # status.
        ended.set()
        await asyncio.gather(dog, return_exceptions=True)
        _write(path, "ended", [], 0.0, facts(), [])


async def _watch(
    spans: Spans,
    path: Path,
    stall_seconds: float,
    tell: Callable[[str], None],
    facts: Callable[[], dict[str, Any]],
    graph: Graph,
    ended: asyncio.Event,
) -> None:
    warned_at = 0.0
    while not ended.is_set():
        now, under_way = time.monotonic(), spans.under_way()
        still, waits, chains = now - spans.last_end, waiting_for(under_way, now), graph(under_way, now)
        await asyncio.to_thread(_write, path, "running", waits, still, facts(), chains)
        if still > stall_seconds and now - warned_at > stall_seconds:
            warned_at = now
            text = "; ".join(map(str, chains[:4] or waits[:4])) or "nothing that left a trace"
            tell(f"nothing has moved for {still:.0f} s; under way: {text}")
            lines = [*chains, *map(str, waits), *_task_lines()]
            logger.warning("stalled for %.0f s\n%s", still, "\n".join(lines))
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), min(_REFRESH_SECONDS, stall_seconds))


def _task_lines() -> list[str]:
    """Where every asyncio task is suspended: the last resort when no span explains a stall."""
    lines = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "not started"
        lines.append(f"task {task.get_name()}: {where}")
    return sorted(lines)


def _write(
    path: Path,
    status: str,
    waits: Sequence[Wait],
    still: float,
    facts: dict[str, Any],
    chains: Sequence[str],
) -> None:
    entry = {
        "status": status,
        "written": time.time(),
        "seconds_without_progress": round(still, 1),
        "waiting": [
            {"name": wait.name, "count": wait.count, "seconds": round(wait.seconds, 1), "about": wait.about}
            for wait in waits
        ],
        "chains": list(chains),
        "facts": facts,
    }
    with suppress(RunDirectoryError):  # on a full disk the entry is older, and the run goes on
        write_atomically(path, json.dumps(entry, indent=1) + "\n")


def read_waits(path: Path) -> tuple[dict[str, Any], list[Wait]]:
    """What `watched` wrote last."""
    entry = read_whole(path)
    return entry, [Wait(**wait) for wait in entry["waiting"]]


def run_status(state: dict[str, Any], waits: dict[str, Any]) -> str:
    """running, finished, stopped, failed; killed: state.json says running, but the process is gone.

    A run on another machine is alive if its waits.json is new: its process id means nothing here.
    """
    status = str(state.get("status", "unknown"))
    if status != "running":
        return status
    if state.get("host", socket.gethostname()) == socket.gethostname():
        alive = _process_lives(state)
    else:
        fresh = time.time() - float(waits.get("written", 0)) < FRESH_SECONDS
        alive = fresh and waits.get("status") == "running"
    return "running" if alive else "killed"


def _process_lives(state: dict[str, Any]) -> bool:
    try:
        return psutil.Process(int(state["pid"])).status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
