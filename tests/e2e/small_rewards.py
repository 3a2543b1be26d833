"""Rewards for small runs: what a student of a few thousand parameters can be told apart by."""

from collections.abc import Mapping
from typing import Any


def varied(row: Mapping[str, Any], text: str) -> float:
    """0 … 1, different for nearly every answer."""
    return sum(map(ord, text)) % 11 / 10


def coarse(row: Mapping[str, Any], text: str) -> float:
    """0 or 1, so that many groups agree."""
    return float(sum(map(ord, text)) % 5 == 0)


def broken_for_some(row: Mapping[str, Any], text: str) -> float:
    """NaN for about every third answer."""
    total = sum(map(ord, text))
    return float("nan") if total % 3 == 0 else total % 11 / 10


def immense(row: Mapping[str, Any], text: str) -> float:
    """Finite, and more than a gradient can hold."""
    return 1e38 if sum(map(ord, text)) % 3 == 0 else 0.0
