"""A prompt instance: one dataset row met in one epoch; and the keys of the rows that its sessions give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem to be attempted.

    >>> Prompt(key="00000-0000017", ordinal=17, epoch=0, data_source="add",
    ...        messages=({"role": "user", "content": "12+34="},), columns={"answer": "64"}).key
    '00000-0000017'
    """

    key: str
    """Unique per (epoch, dataset row); sorts in issue order as text: `{epoch:05d}-{place:07d}`."""
    ordinal: int
    """The row's place among those the run uses, counted from 0."""
    epoch: int
    data_source: str
    """Chooses the row's teacher by default."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages; empty when `text` is set. The content of one with pictures is a list of parts, each
    `{"type": "text", "text": …}` or `{"type": "image", "image": "sha256:…"}` (`media/pictures.py`)."""
    text: str | None = None
    """A plain prompt that is tokenized unchanged, without a chat template."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the dataset row (`answer`, `tools`, …), unchanged."""
    max_tokens: int | None = None
    """Of a prompt that is cut to what its teacher holds: the tokens that are left; None: the run's limit."""


def teacher_key_of(value: Any) -> str | None:
    """A row's routing value as teachers' keys are written, which are texts.

    >>> [teacher_key_of(value) for value in ("math", 7, 7.0, None)]
    ['math', '7', '7', None]
    """
    if value is None or isinstance(value, str):
        return value
    # A column of whole numbers of which one is missing is one of floats in pandas.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def row_key(prompt_key: str, session: int, index: int = 0) -> str:
    """The key of one trained row: prompt instance, session number, output number within the session."""
    return f"{prompt_key}_{session}_{index}"


def split_key(key: str) -> tuple[str, int, int]:
    """The reverse of `row_key`: (prompt, session, index). A key of another form is its own prompt.

    >>> split_key("00000-0000017_3_0")
    ('00000-0000017', 3, 0)
    """
    head, _, index = key.rpartition("_")
    prompt, found, session = head.rpartition("_")
    if not (found and session.isdecimal() and index.isdecimal()):
        return key, -1, -1
    return prompt, int(session), int(index)
