"""Compares two mathematical expressions with the math-verify package. Imported by a jailed child only.

Parsing a model's text can hang, exhaust the memory or run code, so it happens in the jail.
"""

import importlib
from typing import Any

_math_verify: Any = importlib.import_module("math_verify")


def grade(answer: str, text: str) -> str:
    """Whether the last expression of `text` equals `answer`, as numbers, formulas or sets: "right" or "wrong",
    or "unreadable" if there is no expression."""
    gold = _math_verify.parse(answer, parsing_timeout=None) or _math_verify.parse(
        f"${answer}$", parsing_timeout=None
    )
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be read as mathematics")
    found = _math_verify.parse(text, parsing_timeout=None)
    if not found:
        return "unreadable"
    return "right" if _math_verify.verify(gold, found, timeout_seconds=None) else "wrong"
