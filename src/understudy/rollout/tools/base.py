"""The tool protocol and the result of a tool call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class ToolOutcome(StrEnum):
    OK = "ok"
    ERROR = "error"
    """The tool failed or was called with wrong arguments; the model gets the message."""
    TIMEOUT = "timeout"
    """The deadline passed and everything the tool had started was killed."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model gets as the tool's answer."""

    outcome: ToolOutcome
    text: str
    seconds: float = 0.0
    images: tuple[bytes, ...] = ()
    """Pictures that go before the text, for a student that reads them; PNG, JPEG, WEBP, BMP or GIF."""


class Tool(Protocol):
    """Something a model may call by name with JSON arguments."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema, which goes into the chat template: {"type": "function", "function":
        {…}}."""
        ...

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """Never raises for what the model wrote; returns by the deadline, plus the time to kill the
        process."""
        ...
