"""Recipe keys whose values differ between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flat({"loss": {"kind": "k2", "correction": {}}})
    {'loss.kind': 'k2', 'loss.correction': {}}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per key that is not the same in all recipes: the key and its value in each (None: not set)."""
    tables = [flat(recipe) for recipe in recipes]
    keys = sorted({key for table in tables for key in table})
    found = []
    for key in keys:
        values = [table.get(key) for table in tables]
        if any(value != values[0] for value in values[1:]) and key != "run.dir":
            found.append({"key": key, "values": values})
    return found
