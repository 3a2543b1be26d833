"""A reward with textual feedback, for tests of teachers whose prompt contains the feedback."""

from collections.abc import Mapping
from typing import Any


def hinting(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Answers of odd length score 1, so that sessions of one prompt differ."""
    return {"score": float(len(text) % 2), "feedback": f"{len(text)}"}
