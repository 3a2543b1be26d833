"""Whether two pieces of mathematics are equal, by the math-verify package. Imported by a jailed child only.

Parsing what a model wrote can take for ever, fill the memory or run code, which is why it happens there.
"""

import importlib
from typing import Any

_math_verify: Any = importlib.import_module("math_verify")


def grade(answer: str, text: str) -> bool:
    """True where the last expression of `text` equals `answer`, as numbers, formulas or sets."""
    gold = _math_verify.parse(answer, parsing_timeout=None) or _math_verify.parse(
        f"${answer}$", parsing_timeout=None
    )
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be read as mathematics")
    found = _math_verify.parse(text, parsing_timeout=None)
    return bool(found) and bool(_math_verify.verify(gold, found, timeout_seconds=None))
