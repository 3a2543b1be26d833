"""What a run's metrics and recipe say to readers: the table of held-out accuracies, and the recipe's note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.observability.rundir import RunDir, read_json


def note_of(run: RunDir) -> str:
    """The recipe's sentence for readers (`run.note`), or nothing."""
    recipe = read_json(run.recipe) if run.recipe.exists() else {}
    return (recipe.get("run") or {}).get("note") or ""


def teachers_measured(table: Sequence[dict[str, Any]]) -> bool:
    return any(entry["teacher"] is not None for entry in table)


def is_share(*values: float | None) -> bool:
    """Whether mean rewards can be read as shares of solved problems."""
    return all(value is None or 0 <= value <= 1 for value in values)


def many(count: int, noun: str) -> str:
    """A count with its noun: "1 row", "2 rows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def mean_reward(value: float, share: bool) -> str:
    """A held-out figure as text: a percentage, or a number if rewards go beyond 0 … 1."""
    return f"{value:.1%}" if share else f"{value:.4g}"


def accuracy_table(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per data source: the student before and after, the teacher, and the ratio of the two. A run
    that ended before its second evaluation has no figure for "after"."""
    evaluated = [line for line in metrics if any(key.startswith("val/accuracy/") for key in line)]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    table = []
    for key in sorted(key for key in last if key.startswith("val/accuracy/")):
        source = key.removeprefix("val/accuracy/")
        before = first.get(key) if first is not last or first["step"] == 0 else None
        after = last[key] if last["step"] > 0 else None
        teacher = first.get(f"val/teacher_accuracy/{source}")
        ratio = after / teacher if teacher and after is not None else None
        table.append(
            {"source": source, "before": before, "after": after, "teacher": teacher, "of_teacher": ratio}
        )
    return table
