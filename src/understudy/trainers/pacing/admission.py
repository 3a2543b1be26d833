"""How far ahead producers may run, adapted to the slower side (`trainer.adapt_admission`, off by default).

Slots bound staleness from above; fewer of them make rows fresher. So: while the trainer never waits and finished rows pile up,
a few slots are taken away; as soon as the trainer waits for rows they are given back, up to the bound. Two dead zones keep it
from swinging: nothing happens between them, and a change needs the same finding twice in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from understudy.planning.windows import Windows

_STARVED = 0.10
"""Share of a step the trainer may wait before producers get more slots."""
_SATED = 0.02
_TWICE = 2


@dataclass(slots=True)
class AdmissionController:
    windows: Windows
    ceiling: int = field(init=False)
    _findings: int = 0
    """Counts up while the trainer starves, down while it is sated."""

    def __post_init__(self) -> None:
        self.ceiling = self.windows.slots

    def observe(self, trainer_idle: float, rows_ahead: float) -> str | None:
        """Once per publish: how long the trainer waited, and finished prompts beyond the window just trained, in windows.

        Returns the decision in words when the ceiling moves.
        """
        if trainer_idle > _STARVED:
            self._findings = max(self._findings, 0) + 1
        elif trainer_idle < _SATED and rows_ahead > 0:
            self._findings = min(self._findings, 0) - 1
        else:
            self._findings = 0
        if abs(self._findings) < _TWICE:
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
