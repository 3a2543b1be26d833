"""The base of every config section: strict models, and the walk over annotations along a key's path."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, values are never coerced across kinds, numbers
    are finite."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice spelt most like `word`, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return found[0] if found else None


def unwrap(annotation: Any) -> Any:
    """`Section | None` → Section; `dict[str, Section]` → an `_Open`, whose section the next part of the path
    resolves to."""
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
