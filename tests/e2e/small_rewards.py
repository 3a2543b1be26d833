"""Rewards for runs whose students are too small to solve problems: they depend on the characters of the answer."""

import itertools
import os
import sys
import time
from collections.abc import Mapping
from typing import Any


def varied(row: Mapping[str, Any], text: str) -> float:
    """0 … 1, different for nearly every answer."""
    return sum(map(ord, text)) % 11 / 10


def coarse(row: Mapping[str, Any], text: str) -> float:
    """0 or 1, so that many groups have equal rewards."""
    return float(sum(map(ord, text)) % 5 == 0)


def broken_for_some(row: Mapping[str, Any], text: str) -> float:
    """NaN for about every third answer."""
    total = sum(map(ord, text))
    return float("nan") if total % 3 == 0 else total % 11 / 10


def immense(row: Mapping[str, Any], text: str) -> float:
    """Sometimes 1e38: finite, but too large for a gradient."""
    return 1e38 if sum(map(ord, text)) % 3 == 0 else 0.0


def hostile(row: Mapping[str, Any], text: str) -> float:
    """For some prompts, faults that may fail only their own rows: it ends the process, raises KeyboardInterrupt or
    StopIteration, raises with control characters and a long text, or gives NaN."""
    case = sum(map(ord, row["answer"])) % 31
    if case == 1:
        sys.exit(1)
    if case == 2:
        raise KeyboardInterrupt
    if case == 3:
        return float(next(iter(())))
    if case == 4:
        raise RuntimeError(chr(27) + "[2J" + chr(0x202E) + "x" * 10_000)
    return float("nan") if case == 5 else varied(row, text)


_scored = itertools.count(1)


def hangs_later(row: Mapping[str, Any], text: str) -> float:
    """Returns for the first HANGS_AFTER calls and hangs afterwards; never hangs if the variable is unset."""
    if next(_scored) > int(os.environ.get("HANGS_AFTER", sys.maxsize)):
        time.sleep(3600)
    return varied(row, text)


def broken_held_out(row: Mapping[str, Any], text: str) -> float:
    """Behaves as the row's `trouble` says: 1 gives NaN, 2 raises, 3 hangs, 0 or none is scored."""
    if row.get("trouble") == 3:
        time.sleep(3600)
    if row.get("trouble") == 2:
        raise ValueError("no reward for this one")
    return float("nan") if row.get("trouble") == 1 else varied(row, text)


def immense_unless_calm(row: Mapping[str, Any], text: str) -> float:
    """`varied` for rows with a true `calm`, `immense` for the rest."""
    return varied(row, text) if row["calm"] else immense(row, text)
