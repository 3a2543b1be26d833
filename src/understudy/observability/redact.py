"""Hides secrets, and escapes control characters, before text reaches a log, a terminal or a run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET_NAME = re.compile(
    r"(token|secret|password|passwd|(api|access|private)[_-]?key|credential)s?$|^auth$", re.IGNORECASE
)
_URL_CREDENTIALS = re.compile(r"(\w+://)[^/\s@]+@")
_URL_QUERY = re.compile(r"([?&](?:\w*token|key|api[_-]?key|auth|password|secret|sig)=)[^&\s]+", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline; with the marks that change the direction of text."""
_BEARER = re.compile(r"(Bearer\s+)\S+", re.IGNORECASE)
HIDDEN = "<redacted>"


def redact_text(text: str) -> str:
    text = _URL_CREDENTIALS.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
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
        return [redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def _hidden(value: Any) -> Any:
    """The value of a secret-named entry: its texts are hidden, numbers (`max_new_tokens`) are not."""
    if isinstance(value, list | tuple):
        return [_hidden(inner) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value else value
    return redact(value)
