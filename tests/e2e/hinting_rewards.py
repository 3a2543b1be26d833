"""A reward that says what is wrong, for tests of teachers that read it."""

from collections.abc import Mapping
from typing import Any


def hinting(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Odd lengths solve a problem, so that sessions of one prompt differ."""
    return {"score": float(len(text) % 2), "feedback": f"{len(text)}"}
