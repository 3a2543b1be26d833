"""The reward of feedback.toml: whether an answer is right, and for a wrong one the right answer as `feedback`."""

from collections.abc import Mapping
from typing import Any


def marked(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    right = text.strip() == row["answer"]
    return {"score": float(right), "feedback": "" if right else row["answer"]}
