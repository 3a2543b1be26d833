"""Hides secrets before they reach a log, a config dump or a run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET_NAME = re.compile(r"(token|secret|password|(api|access)[-_]?key|credential)s?$", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(r"(\w+://)[^/\s@]+@")
_URL_QUERY = re.compile(r"([?&](?:\w*token|key|api[-_]?key|auth|password|sig)=)[^&\s]+", re.IGNORECASE)
_BEARER = re.compile(r"(Bearer\s+)\S+", re.IGNORECASE)
HIDDEN = "<redacted>"


def redact_text(text: str) -> str:
    text = _URL_CREDENTIALS.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def redact(value: Any) -> Any:
    """A copy of nested plain data with secret-named entries and credentials in URLs hidden."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if _SECRET_NAME.search(str(key)) and isinstance(inner, str) and inner
            else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value
