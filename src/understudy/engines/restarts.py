"""How often a process that writes rollouts is started again before it is given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restarts:
    """So often in a row without having done anything useful: an engine process by having served for `steady_s`, a vLLM server, whose
    start alone may take minutes, by having answered a request."""

    most: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    steady_s: float = 60.0

    def wait_before(self, restart: int) -> float:
        """Seconds to wait before the `restart`-th in a row, counted from 1."""
        return float(min(self.first_wait_s * 2 ** (restart - 1), self.longest_wait_s))
