"""Who gets the next request: the replica with the fewest outstanding tokens.

Tokens and not requests, because lengths vary by a hundred times. A replica that fails fast finishes everything at
once and would look idle; a failure therefore leaves its tokens behind as a debt that fades with time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

DEBT_HALF_LIFE = 2.0
"""Seconds in which half of a failure's weight is forgotten."""
MOST_DEBT = 1e9
"""Tokens; a replica that kept failing for an hour can still come back within a minute."""


@dataclass(slots=True)
class Load:
    """What one replica has on its hands."""

    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    sent_tokens: int = 0
    """Since start; settles ties so that idle replicas take turns."""
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
        """After `end`: the failed work still weighs, and a run of failures weighs ever more."""
        self._debt = min(2 * self.debt(now) + tokens, MOST_DEBT)
        self._debt_at = now

    def settled(self) -> None:
        """A success: the replica works."""
        self._debt = 0.0

    def debt(self, now: float) -> float:
        return self._debt * 0.5 ** ((now - self._debt_at) / DEBT_HALF_LIFE)

    def weight(self, now: float) -> tuple[int, int]:
        """Less than a token of debt is none, or a replica that failed once would never again win among idle ones."""
        return (self.outstanding_tokens + int(self.debt(now)), self.sent_tokens)


Name = TypeVar("Name")


def least_loaded(loads: Iterable[tuple[Name, Load]], now: float) -> Name | None:
    """The lightest of them, the first among equals; None of none."""
    best = min(loads, key=lambda pair: pair[1].weight(now), default=None)
    return None if best is None else best[0]
