"""What every section shares: strictness, and problems told so that a user can mend them.

Pydantic says what is wrong; this module turns each finding into one line with what came, what was
expected, and the nearest right key or value.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, values are never coerced across kinds, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice a user most likely meant, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per finding of a validation error, deepest place first in words a user wrote."""
    return [_line(dict(finding), model) for finding in error.errors()]


def _line(finding: Mapping[str, Any], model: type[BaseModel]) -> str:
    place = [str(part) for part in finding["loc"]]
    where = ".".join(place) or "recipe"
    kind, came = finding["type"], finding.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(model, place[:-1])
        guess = nearest(place[-1], known)
        hint = (
            f"did you mean `{'.'.join([*place[:-1], guess])}`?"
            if guess
            else f"known keys here: {', '.join(sorted(known))}"
        )
        return f"unknown key `{where}`; {hint}"
    if kind == "missing":
        return f"`{where}` is missing; set it in the recipe"
    if kind == "literal_error":
        expected = finding["ctx"]["expected"]
        choices = [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
        guess = nearest(str(came), choices)
        return f"`{where}` = {came!r}: expected one of {expected}" + (
            f"; did you mean {guess!r}?" if guess else ""
        )
    message = finding["msg"]
    if kind in ("value_error", "assertion_error"):
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if not place:
            return message
    came_text = f" = {came!r}" if not isinstance(came, dict | list) else ""
    return f"`{where}`{came_text}: {message[0].lower()}{message[1:]}"


def _keys_at(model: type[BaseModel], place: list[str]) -> set[str]:
    """The keys a section knows, found by walking the annotations along `place`."""
    current: Any = model
    for part in place:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(part)
            current = unwrap(field.annotation) if field else None
        else:
            # Inside a `dict[str, Section]` the part is the user's own name (a teacher's): stay on the section.
            current = unwrap(current)
        if isinstance(current, tuple):
            current = current[0]
    if isinstance(current, type) and issubclass(current, BaseModel):
        return set(current.model_fields)
    return set()


def unwrap(annotation: Any) -> Any:
    """`Section | None` → Section; `dict[str, Section]` → a one-tuple that the next part of the path opens."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for arm in typing.get_args(annotation):
            if arm is not type(None):
                return unwrap(arm)
    if origin is dict:
        return _Open(typing.get_args(annotation)[1])
    if isinstance(annotation, _Open):
        return annotation.section
    return annotation


class _Open:
    """Marks a mapping in the walk: the next path part is a free name."""

    def __init__(self, section: Any) -> None:
        self.section = section
