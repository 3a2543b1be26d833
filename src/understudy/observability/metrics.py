"""metrics.jsonl: one line per step, written whole or not at all, cut back on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from understudy.observability.rundir import cannot_be_written, write_atomically

WALL_CLOCK = ("time/", "perf/")
"""Keys under these prefixes depend on the clock or on the order of replies; all other keys repeat to the
bit."""


class MetricsWriter:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = path.open("a")

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line; non-finite numbers become null, since JSON has none."""
        line = _line(step, values)
        try:
            self._handle.write(json.dumps(line) + "\n")
            self._handle.flush()
        except OSError as error:
            raise cannot_be_written(self.path, error) from error
        return line

    def complete(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Adds values to the line of `step`, which is the last one. A kill leaves the line as it was or with all values."""
        *earlier, last = read_metrics(self.path)
        assert last["step"] == step
        line = _line(step, {**last, **values})
        write_atomically(self.path, "".join(json.dumps(one) + "\n" for one in (*earlier, line)))
        self._handle.close()
        self._handle = self.path.open("a")
        return line

    def sync(self) -> None:
        """Flushes to disk; called before a checkpoint that relies on these lines."""
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        with suppress(OSError):  # `write` has reported it; closing tries the same bytes again
            self._handle.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a torn last line (the process died while writing) is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def cut_back(path: Path, step: int | None) -> None:
    """Removes every line after `step` (all lines if None), so that resumed steps are written once."""
    kept = [] if step is None else [line for line in read_metrics(path) if line["step"] <= step]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def without_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that must repeat to the bit under `determinism = "full"`."""
    return {key: value for key, value in line.items() if not key.startswith(WALL_CLOCK)}


def _line(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": step, **{key: _plain(values[key]) for key in sorted(values)}}


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
