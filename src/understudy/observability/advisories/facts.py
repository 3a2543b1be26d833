"""What a rule reads and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from understudy.observability.advisories.history import History

WINDOW = 10
"""Steps at each end of a run that a trend compares."""


@dataclass(frozen=True, slots=True)
class Advisory:
    """One finding."""

    name: str
    """The rule."""
    level: Literal["warning", "note"]
    sentence: str
    """What was seen, for a person."""
    evidence: str
    """The figures and steps it rests on."""
    turn: str
    """What to set or look at."""
    metrics: tuple[str, ...] = ()
    """Keys of metrics.jsonl that show it."""

    def __str__(self) -> str:
        return f"{self.sentence} ({self.evidence}). {self.turn}"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the rules read."""

    history: History
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The tables of recipe.json."""
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """Reason → rows."""
    free_bytes: int | None = None
    """Free space where the run directory is; None: not asked (the run is over)."""
    checkpoint_bytes: int = 0
    """Size of the newest checkpoint."""

    def key(self, dotted: str, default: Any = None) -> Any:
        table: Any = self.recipe
        for part in dotted.split("."):
            if not isinstance(table, Mapping) or part not in table:
                return default
            table = table[part]
        return default if table is None else table


Rule = Callable[[RunFacts], Iterator[Advisory]]


def steps_of(facts: RunFacts, key: str) -> str:
    """The first and the last step that a metric has, in words."""
    seen = facts.history.get(key).steps
    return f"steps {seen[0]} to {seen[-1]}"
