"""Reads what the advisories need from a run directory; never writes to it."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from understudy.observability.advisories.facts import Advisory, RunFacts
from understudy.observability.advisories.history import History
from understudy.observability.advisories.rules import advise
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import RunDir, read_whole

_MOST_LETTERS = 16 << 20
"""Bytes of the dead-letter file that are read: enough for thousands, and a run stops long before more."""


def advisories_of(run: RunDir, history: History | None = None, live: bool = False) -> list[Advisory]:
    """The advisories of a run; `history`: its metrics, if they are read already."""
    return advise(facts_of(run, history, live))


def facts_of(run: RunDir, history: History | None = None, live: bool = False) -> RunFacts:
    """`live` asks for the free space too, which matters to a run that still writes."""
    return RunFacts(
        history if history is not None else History(read_metrics(run.metrics)),
        read_whole(run.recipe) if run.recipe.exists() else {},
        reasons(_lines(run.dead_letters)),
        shutil.disk_usage(run.path).free if live else None,
        _checkpoint_bytes(run),
    )


def reasons(letters: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Reason → rows, without what is particular to a row: keys, numbers, the message behind the colon."""
    counted = Counter(re.sub(r"\d+", "N", str(one.get("reason", "")).partition(":")[0]) for one in letters)
    return dict(counted)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open("rb") as handle:
        text = handle.read(_MOST_LETTERS).decode(errors="replace")
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [one for one in found if isinstance(one, dict)]


def _checkpoint_bytes(run: RunDir) -> int:
    newest = max(run.checkpoints.glob("step-*"), default=None)
    try:
        return sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
    except OSError:  # it was removed meanwhile
        return 0
