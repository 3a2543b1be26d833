"""Adapts the number of slots to the slower of trainer and producers (`trainer.adapt_admission`).

The number of slots bounds staleness from above, and fewer slots make rows fresher. While the trainer never
waits and finished rows accumulate, the controller removes a few slots. When the trainer waits for rows, it
returns them, up to the bound.

Against oscillation the controller does nothing between the two thresholds, and needs the same finding at two
publishes in a row. It is off by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from understudy.planning.windows import Windows

_STARVED = 0.10
"""Share of a step the trainer may wait before producers get more slots."""
_SATED = 0.02
"""Share of a step below which the trainer counts as never waiting."""
_IN_A_ROW = 2
"""Publishes with the same finding before the ceiling changes."""


@dataclass(slots=True)
class AdmissionController:
    """Decides the ceiling of `StalenessBudget` from one observation per publish. Called by the trainer's task."""

    windows: Windows
    ceiling: int = field(init=False)
    _findings: int = 0
    """Counts up while the trainer starves, down while it is sated."""

    def __post_init__(self) -> None:
        self.ceiling = self.windows.slots

    def observe(self, trainer_idle: float, rows_ahead: float) -> str | None:
        """Called once per publish. Returns the decision as text if the ceiling changes.

        `trainer_idle`: the share of the time the trainer waited. `rows_ahead`: finished prompts beyond the
        window just trained, in windows.
        """
        if trainer_idle > _STARVED:
            self._findings = max(self._findings, 0) + 1
        elif trainer_idle < _SATED and rows_ahead > 0:
            self._findings = min(self._findings, 0) - 1
        else:
            self._findings = 0
        if abs(self._findings) < _IN_A_ROW:
            return None
        change = max(1, self.windows.size // 4) * (1 if self._findings > 0 else -1)
        moved = max(self.windows.size, min(self.ceiling + change, self.windows.slots))
        self._findings = 0
        if moved == self.ceiling:
            return None
        before, self.ceiling = self.ceiling, moved
        why = (
            f"the trainer waited {trainer_idle:.0%} of the time"
            if change > 0
            else f"{rows_ahead:.1f} windows of finished rows lay waiting"
        )
        return f"admission: {before} → {moved} of {self.windows.slots} slots, because {why}"
