"""Turns pydantic's errors into our own messages: what came, what was expected, what to set."""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from understudy.config.base import nearest
from understudy.config.messages.keys import KeyType, described, kind_of, one_of, walk
from understudy.config.messages.synonyms import OFF, VALUES
from understudy.config.messages.unknown_keys import unknown_key

_TYPO = 0.6
"""How similar a value must be to a choice to count as a typo; choices are few and differ clearly."""
_SHOWN = 60
"""Characters of a wrong value that are shown."""
_OF_PYDANTIC = frozenset(typing.get_args(ErrorType)) - {"value_error", "assertion_error"}


@dataclass(frozen=True, slots=True)
class Finding:
    place: tuple[int | str, ...]
    """The key that is wrong or missing; empty where the finding is about the recipe as a whole."""
    missing: bool
    movable: bool
    """Whether the rest can be checked without this key."""
    lines: tuple[str, ...]


def explain(error: ValidationError, model: type[BaseModel]) -> list[Finding]:
    """One entry per wrong place. A union is one place, although pydantic reports each of its arms."""
    found: dict[tuple[int | str, ...], Finding] = {}
    for entry in error.errors(include_url=False):
        place, kind = walk(model, entry["loc"])
        one = Finding(
            tuple(place),
            missing=entry["type"] == "missing",
            movable=bool(place) and entry["type"] != "value_error",
            lines=tuple(_lines(dict(entry), [str(part) for part in place], kind, model)),
        )
        found.setdefault((*one.place, *([entry["msg"]] if kind is None or len(kind.arms) == 1 else [])), one)
    return list(found.values())


def _lines(
    entry: Mapping[str, Any], place: list[str], kind: KeyType | None, model: type[BaseModel]
) -> Iterator[str]:
    where = re.sub(r"\.(\d+)\b", r"[\1]", ".".join(place))
    error, came = entry["type"], entry.get("input")
    if error == "extra_forbidden":
        yield from unknown_key(model, place, came)
    elif error == "missing":
        yield f"`{where}` is missing; set it in the recipe"
    elif error not in _OF_PYDANTIC:
        # Raised by one of our own checks, with our own message. One about the whole recipe names its keys
        # itself.
        message = entry["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if not place:
            yield from message.split("\n")
        else:
            yield f"`{where}`{'' if isinstance(came, dict | list) else _came(came)}: {message}"
    elif "[key]" in entry["loc"]:
        yield f"unknown key `{where}`; {_key_choices(model, place)}"
    elif kind is None:  # pydantic checked something that no annotation of ours describes
        yield f"`{where}`{_came(came)}: not a value of this key"
    else:
        wanted = described(kind, where)
        if error == "finite_number":
            wanted = wanted.replace("a number", "a finite number")
        yield f"`{where}`{_came(came)}: expected {wanted}{_hint(kind, where, came)}"


def _came(value: Any) -> str:
    text = repr(value)
    return f" = {text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"


def _hint(kind: KeyType, where: str, came: Any) -> str:
    """The value that the user most likely meant, if it can be guessed."""
    if kind.items is not None and not isinstance(came, list | dict):
        item = kind_of(kind.items)
        value = right_value(where, came, item.choices) if item.choices else came
        fits = isinstance(came, str) if item.choices else type(came) in item.arms
        return f"; write {where} = [{_toml(value)}]" if fits and value is not None else ""
    if kind.choices:
        guess = right_value(where, came, kind.choices)
        return f"; did you mean {guess!r}?" if guess else ""
    if bool in kind.arms and str(came).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        return f"; write {'true' if str(came).lower() in ('true', 'yes', 'on', '1') else 'false'}"
    if came == -1 and where in OFF:
        return f"; {OFF[where]}"
    if {int, float} & set(kind.arms) and isinstance(came, str) and _is_number(came):
        return "; write it without quotes" if _is_toml(came) else f"; write {float(came):g}"
    if int in kind.arms and isinstance(came, float) and came.is_integer():
        return f"; write {int(came)}"
    if str in kind.arms and isinstance(came, int | float):
        text = _toml(str(_toml(came)))
        return f"; write it in quotes: {text}, on a command line '{text}'"
    return ""


def _is_toml(text: str) -> bool:
    """Whether the text without quotes is a TOML value; `.5` and `1e5.` are not."""
    try:
        return bool(tomllib.loads(f"value = {text}"))
    except tomllib.TOMLDecodeError:
        return False


def _toml(value: Any) -> str:
    return (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def right_value(where: str, came: Any, choices: Sequence[Any]) -> str | None:
    """The choice a user most likely meant: by its name in other projects, by one of its words, by its
    spelling."""
    word = str(came).lower()
    for end, synonyms in VALUES.items():
        if (where == end or where.endswith(f".{end}") or where.startswith(f"{end}.")) and word in synonyms:
            return synonyms[word]
    names = [choice for choice in choices if isinstance(choice, str)]
    plain = {_plain(name): name for name in names}
    if _plain(word) in plain:
        return plain[_plain(word)]
    having = [name for name in names if word in name.split("_")]
    return having[0] if len(having) == 1 else nearest(word, names, _TYPO)


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(" ", "")


def _key_choices(model: type[BaseModel], place: Sequence[str]) -> str:
    """The allowed names of a mapping with fixed names (`cluster.roles`)."""
    _, kind = walk(model, place[:-1])
    names = (
        next((typing.get_args(arm)[0] for arm in kind.arms if typing.get_args(arm)), None) if kind else None
    )
    return f"{'.'.join(place[:-1])} takes {one_of(typing.get_args(names))}"
