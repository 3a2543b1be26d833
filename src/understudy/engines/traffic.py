"""Bytes of generations that passed this process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Bytes of batches and of what was written for them, to and from all engine processes or servers so far; HTTP's own words not counted."""

    sent: int = 0
    received: int = 0
