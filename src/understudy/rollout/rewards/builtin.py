"""Built-in rewards: plain functions from a dataset row and the student's text to a number.

A recipe names one as `"understudy.rollout.rewards.builtin:exact_match"`. A project's own function is named
the same way and needs no registration (`rewards.py` lists the signatures). `row` is the dataset row with all
its columns; `text` is what the student wrote, without special tokens.

No student text makes these functions raise: a wrong or unreadable answer is worth 0.0. An error means that
the dataset row cannot be graded. Rewards that look for a number also report `parsed`: 1.0 if they found one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from understudy.errors import DataError
from understudy.rollout.rewards.trial import ground_truth

ANSWER_COLUMN = "answer"

_AFTER_MARKER = re.compile(r"####\s*([-+$.,0-9]+)")
_BOX = "\\boxed{"
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")
"""TeX's comma without the space after it, as in 1{,}000."""
_MINUS_SIGN = re.compile(r"(?<![\w)}\]])\u2212(?=[$.]*\d)")
"""Unicode's minus where it is a sign, not a difference."""


def exact_match(row: Mapping[str, Any], text: str) -> float:
    """1.0 if the text equals the `answer` column, both stripped of white space; else 0.0."""
    return float(text.strip() == answer_of(row).strip())


def gsm8k(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score 1.0 if the last `#### number` of the text is the number of the `answer` column; else 0.0.

    The column may hold the number alone or GSM8K's worked solution, which ends in `#### number`. Numbers are
    compared as numbers: `1,000`, `$1000`, `1000.` and `1000.0` are equal.
    """
    return _compared(_marked_number(text), _expected_number(row, "gsm8k"))


def boxed_number(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score 1.0 if the number in the last `\\boxed{…}` of the text, or else its last, is that of `answer`.

    For chat models, which end with a boxed result or a sentence rather than with `#### number`. The column
    and the comparison are those of `gsm8k`.
    """
    expected = _expected_number(row, "boxed_number")
    boxed = _last_number(_boxed(text))
    return _compared(boxed if boxed is not None else _last_number(text), expected)


def _compared(found: Decimal | None, expected: Decimal) -> dict[str, float]:
    return {"score": float(found == expected), "parsed": float(found is not None)}


def _expected_number(row: Mapping[str, Any], reward: str) -> Decimal:
    expected_text = answer_of(row)
    expected = _marked_number(expected_text)
    if expected is None:
        expected = _read_number(expected_text.strip())
    if expected is None:
        raise DataError(
            f"column {ANSWER_COLUMN!r} holds {_shortened(expected_text)}; the {reward} reward expects a number "
            "or a worked solution that ends in '#### number'"
        )
    return expected


def answer_of(row: Mapping[str, Any]) -> str:
    """What the student's text is compared with: the column `answer`, or verl's
    `reward_model.ground_truth`."""
    answer = ground_truth(row)
    if answer is None:
        raise DataError(
            f"the row has nothing in column {ANSWER_COLUMN!r} (or reward_model.ground_truth) to grade against; its columns are "
            f"{sorted(map(str, row))}. "
            f"Add {ANSWER_COLUMN!r} to the dataset, or set data.reward to a function that does not need it"
        )
    return str(answer)


def _marked_number(text: str) -> Decimal | None:
    """The last number that follows a `####` marker; a marker followed by anything else does not count."""
    for candidate in reversed(_AFTER_MARKER.findall(_plain(text))):
        number = _read_number(candidate)
        if number is not None:
            return number
    return None


def _boxed(text: str) -> str:
    """What the last `\\boxed{…}` holds, braces inside included; empty if there is none."""
    _, box, rest = text.rpartition(_BOX)
    depth = 1 if box else 0
    for end, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end] if box else ""
    return rest if box else ""


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(_plain(text))
    return _read_number(found[-1]) if found else None


def _plain(text: str) -> str:
    return _MINUS_SIGN.sub("-", _THOUSANDS.sub(",", text))


def _read_number(text: str) -> Decimal | None:
    try:
        number = Decimal(_plain(text).replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _shortened(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
