"""Reads what a run left in its directory, without the package's own accounting."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from checker import Event

from understudy.observability.metrics import read_metrics, without_clock


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics, without clocks."""
    path = run / "metrics.jsonl"
    return [without_clock(line) for line in read_metrics(path)] if path.exists() else []


def read_journal(folder: Path) -> tuple[list[Event], frozenset[str]]:
    """The events of a data plane's folder, and the rows in flight."""
    file = folder / "journal.sqlite"
    if not file.exists():
        return [], frozenset()
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as journal:
        events = journal.execute("SELECT kind, key, sign, step FROM facts ORDER BY seq, place")
        rows = journal.execute("SELECT key FROM rows WHERE trained IS NULL")
        return [Event(*event) for event in events], frozenset(key for (key,) in rows)


def read_letters(folder: Path) -> dict[str, str]:
    file = folder / "dead_letters.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {letter["key"]: letter["reason"] for letter in map(json.loads, lines)}


def read_kept(run: Path) -> list[dict[str, Any]]:
    return [
        {"step": int(path.stem), **json.loads(line)}
        for path in sorted((run / "kept_rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
