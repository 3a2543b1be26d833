"""How a run ended, as `launch` and `resume` tell it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run that ended: where it left its files, and how it went."""

    dir: Path
    steps: int
    """Steps taken in all, earlier launches of the same run included."""
    metrics: list[dict[str, Any]]
    """Every line of metrics.jsonl."""
