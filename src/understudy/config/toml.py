"""Writes a recipe as TOML with every key, so that it can be saved and run again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from understudy.config.recipe import Recipe

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def recipe_as_toml(tables: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """TOML of a recipe's plain tables (`as_tables`), with comments by dotted key. Keys without a value are
    left out: TOML has no null."""
    return "\n".join(_table(tables, (), comments or {})).strip() + "\n"


def as_tables(recipe: Recipe, *, defaults: bool = True) -> dict[str, Any]:
    """Plain tables that make the same recipe again. `defaults`: with the keys that have their default value."""
    tables = recipe.model_dump(exclude_defaults=not defaults)
    if recipe.trainer.passes is not None:
        tables["trainer"].pop("steps", None)  # the length of a run is written in one way only
    return tables


def _table(table: Mapping[str, Any], place: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    values = {
        key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None
    }
    if place and (values or not table):
        yield f"\n[{'.'.join(map(_key, place))}]"
    for key, value in values.items():
        comment = comments.get(".".join((*place, key)))
        yield f"{_key(key)} = {_value(value)}" + (f"  # {comment}" if comment else "")
    for key, value in table.items():
        if isinstance(value, Mapping) and (value or len(place) > 1):
            yield from _table(value, (*place, key), comments)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None)
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # JSON strings are valid TOML strings, except for one control character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
