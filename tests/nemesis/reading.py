"""Reads what a run left in its directory, without the package's own accounting."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from checker import Event

WALL_CLOCK = ("time/", "perf/")
"""Prefixes of metrics that do not repeat."""


def count_steps(run: Path) -> int:
    """Steps whose metrics are written, also of a file that is being written."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return sum(b'"actor/loss"' in line for line in lines)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics, without clocks."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(WALL_CLOCK)}
        for line in lines
    ]


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
