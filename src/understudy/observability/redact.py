"""Hides secrets, and escapes control characters, before text reaches a log, a terminal or a run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET_NAME = re.compile(
    r"(token|secret|password|passwd|(api|access|private)[_-]?key|credential)s?$|^auth$", re.IGNORECASE
)
_URL_CREDENTIALS = re.compile(r"(\w+://)[^/\s@]+@")
_URL_QUERY = re.compile(r"([?&](?:\w*token|key|api[_-]?key|auth|password|secret|sig)=)[^&\s]+", re.IGNORECASE)
_SECRET_OPTION = r"--(?:[\w-]*-)?(?:token|secret|password|api[-_]?key)"
_OPTION = re.compile(_SECRET_OPTION, re.IGNORECASE)
_OPTION_VALUE = re.compile(rf"({_SECRET_OPTION}=)\S+", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline; with the marks that change the direction of text."""
_BEARER = re.compile(r"(Bearer\s+)\S+", re.IGNORECASE)
HIDDEN = "<redacted>"


def redact_text(text: str) -> str:
    text = _URL_CREDENTIALS.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    text = _OPTION_VALUE.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def printable(text: str) -> str:
    """Text that comes from data, for a person: a terminal obeys no escape sequence in it."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def redact(value: Any) -> Any:
    """A copy of nested plain data with secret-named entries and credentials in URLs hidden."""
    if isinstance(value, Mapping):
        return {
            key: _hidden(inner) if _SECRET_NAME.search(str(key)) else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            HIDDEN if _names_the_next(before, inner) else redact(inner)
            for before, inner in zip([None, *value], value, strict=False)
        ]
    return redact_text(value) if isinstance(value, str) else value


def _names_the_next(argument: Any, following: Any) -> bool:
    """Whether the argument after it is a secret: ["--api-key", "…"]."""
    if not isinstance(argument, str) or not isinstance(following, str) or following.startswith("-"):
        return False
    return _OPTION.fullmatch(argument) is not None


def _hidden(value: Any) -> Any:
    """The value of a secret-named entry: its texts are hidden, numbers (`max_new_tokens`) are not."""
    if isinstance(value, list | tuple):
        return [_hidden(inner) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value else value
    return redact(value)


def hidden_values(table: Any) -> list[dict[str, Any]]:
    """The texts that `redact` hides, whole or in part: `place` (keys and indices) and `value`."""
    found: list[dict[str, Any]] = []

    def look(value: Any, shown: Any, place: list[Any]) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                look(inner, shown[key], [*place, key])
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                look(inner, shown[index], [*place, index])
        elif isinstance(value, str) and HIDDEN in shown:
            found.append({"place": place, "value": value})

    look(table, redact(table), [])
    return found


def restore(table: Any, hidden: Sequence[Mapping[str, Any]]) -> None:
    """Puts hidden values back. One whose key has another value by now is left out."""
    for one in hidden:
        *within, last = one["place"]
        try:
            holder = table
            for key in within:
                holder = holder[key]
            if holder[last] in (HIDDEN, redact_text(one["value"])):
                holder[last] = one["value"]
        except (KeyError, IndexError, TypeError):
            continue
