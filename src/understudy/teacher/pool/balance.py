"""Load balancing: the next request goes to the replica with the fewest outstanding tokens.

Tokens rather than requests, because lengths vary by a factor of a hundred. A replica that fails fast finishes
everything at once and would look idle. So a failed request's tokens stay on the replica as a debt that decays
with time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

DEBT_HALF_LIFE = 2.0
"""Seconds in which a debt halves."""
MOST_DEBT = 1e9
"""Tokens; with this limit a replica that failed for an hour can come back within about a minute."""


@dataclass(slots=True)
class Load:
    """One replica's outstanding work and debt; updated by the pool on its event loop."""

    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    sent_tokens: int = 0
    """Since start; breaks ties, so that idle replicas take turns."""
    _debt: float = 0.0
    _debt_at: float = 0.0

    def begin(self, tokens: int) -> None:
        self.outstanding_tokens += tokens
        self.outstanding_requests += 1
        self.sent_tokens += tokens

    def end(self, tokens: int) -> None:
        self.outstanding_tokens -= tokens
        self.outstanding_requests -= 1

    def failed(self, tokens: int, now: float) -> None:
        """Called after `end`: adds the failed tokens to twice the current debt, so repeated failures weigh
        more and more."""
        self._debt = min(2 * self.debt(now) + tokens, MOST_DEBT)
        self._debt_at = now

    def clear_debt(self) -> None:
        """Called on a success."""
        self._debt = 0.0

    def debt(self, now: float) -> float:
        return self._debt * 0.5 ** ((now - self._debt_at) / DEBT_HALF_LIFE)

    def weight(self, now: float) -> tuple[int, int]:
        """Sort key. Debt below one token counts as 0; otherwise a replica that failed once would lose to idle
        ones for ever."""
        return (self.outstanding_tokens + int(self.debt(now)), self.sent_tokens)


Name = TypeVar("Name")


def least_loaded(loads: Iterable[tuple[Name, Load]], now: float) -> Name | None:
    """The name with the lowest weight, the first among equals; None if there are no loads."""
    best = min(loads, key=lambda pair: pair[1].weight(now), default=None)
    return None if best is None else best[0]
