"""The result of `launch` and `resume`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run that ended: its directory, its steps and its metrics."""

    dir: Path
    steps: int
    """Steps taken, including earlier launches of the same run."""
    metrics: list[dict[str, Any]] = field(repr=False)
    """Every line of metrics.jsonl; not in the `repr`, which a notebook shows."""
