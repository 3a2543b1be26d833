"""Built-in rewards: plain functions from a dataset row and the student's text to a number.

A recipe names one as `"understudy.rollout.rewards.builtin:exact_match"`. A project's own function is named
the same way and needs no registration (`rewards.py` lists the signatures). `row` is the dataset row with all
its columns; `text` is what the student wrote, without special tokens.

No student text makes these functions raise: a wrong or unreadable answer is worth 0.0. An error means that
the dataset row cannot be graded. Rewards that look for a number also report `parsed`: 1.0 if they found one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    """1.0 if the text equals the `answer` column, both stripped of white space; else 0.0.

    Where the column is a list, as in all rewards that ship, any of its answers counts.
    """
    return float(text.strip() in [answer.strip() for answer in answers_of(row)])


def gsm8k(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score 1.0 if the last `#### number` of the text is the number of the `answer` column; else 0.0.

    The column may hold the number alone or GSM8K's worked solution, which ends in `#### number`. Numbers are
    compared as numbers: `1,000`, `$1000`, `1000.` and `1000.0` are equal.
    """
    return _compared(_marked_number(text), _expected_numbers(row, "gsm8k"))


def boxed_number(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score 1.0 if the number in the last `\\boxed{…}` of the text, or else its last, is that of `answer`.

    For chat models, which end with a boxed result or a sentence rather than with `#### number`. The column
    and the comparison are those of `gsm8k`.
    """
    expected = _expected_numbers(row, "boxed_number")
    boxed = _last_number(_boxed(text))
    return _compared(boxed if boxed is not None else _last_number(text), expected)


def _compared(found: Decimal | None, expected: Sequence[Decimal]) -> dict[str, float]:
    return {"score": float(found in expected), "parsed": float(found is not None)}


def _expected_numbers(row: Mapping[str, Any], reward: str) -> list[Decimal]:
    """The numbers of a row's answers; of several, those that are no numbers are left out."""
    answers = answers_of(row)
    expected = []
    for answer in answers:
        marked = _marked_number(answer)
        number = _read_number(answer.strip()) if marked is None else marked
        expected += [] if number is None else [number]
    if not expected:
        raise DataError(
            f"column {ANSWER_COLUMN!r} holds {', '.join(map(_shortened, answers))}; the {reward} reward expects a number "
            "or a worked solution that ends in '#### number'"
        )
    return expected


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """What the student's text is compared with: the column `answer`, or verl's `reward_model.ground_truth`. A list
    has several answers, each of which is right."""
    answer = ground_truth(row)
    answers = answer if isinstance(answer, list | tuple) else [answer]
    found = [text for one in answers for text in _as_texts(one)]
    if not found:
        raise DataError(
            f"the row has nothing in column {ANSWER_COLUMN!r} (or reward_model.ground_truth) to grade against; its columns are "
            f"{sorted(map(str, row))}. "
            f"Add {ANSWER_COLUMN!r} to the dataset, or set data.reward to a function that does not need it"
        )
    return found


def _as_texts(answer: Any) -> list[str]:
    """What a student may write for it. Tables have a NaN for a missing answer, and 42.0 for the 42 of a column in which one
    is missing."""
    if answer is None or answer != answer:
        return []
    whole = isinstance(answer, float) and answer.is_integer()
    return [str(answer), *([str(int(answer))] if whole else [])]


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
