"""Parsers for tool calls in a model's output, one per format that models are trained on.

    hermes    <tool_call>{"name": "f", "arguments": {…}}</tool_call>, any number of them    (Hermes, Qwen)
    llama3    the whole answer is {"name": "f", "parameters": {…}}, several joined by ";"   (Llama 3.1 and later)
    json      ```json blocks with {"name": "f", "arguments": {…}}                           (models without a format)

Calls inside a thinking block are ignored. Text that looks like a call but cannot be parsed is a `BadCall`:
the model gets its reason as the tool's answer, and the episode continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.errors import ConfigError
from understudy.rollout.loading import load_object


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    reason: str


Parse = Callable[[str], list[ToolCall | BadCall]]

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json|tool_call)\s*\n(.*?)```", re.DOTALL)
_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool", "function"), ("arguments", "parameters", "input")


def parse_hermes(text: str) -> list[ToolCall | BadCall]:
    calls: list[ToolCall | BadCall] = []
    for body, closing in _HERMES.findall(spoken(text)):
        calls.append(_read(body) if closing else BadCall("the <tool_call> was not closed with </tool_call>"))
    return calls


def parse_llama3(text: str) -> list[ToolCall | BadCall]:
    body = spoken(text).strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    return [_read(part) for part in _split_objects(body)]


def parse_json(text: str) -> list[ToolCall | BadCall]:
    blocks = [block.strip() for block in _FENCE.findall(spoken(text))]
    # A block without a name is displayed data, not a call.
    return [_read(block) for block in blocks if any(f'"{key}"' in block for key in _NAME_KEYS)]


FORMATS: dict[str, Parse] = {"hermes": parse_hermes, "llama3": parse_llama3, "json": parse_json}


def parser_of(name: str) -> Parse:
    """The parser of a shipped format, or a user's `"module:function"` from text to calls."""
    if name in FORMATS:
        return FORMATS[name]
    if ":" not in name:
        raise ConfigError(f'tool format "{name}" is not one of {", ".join(FORMATS)} or "module:function"')
    parse: Parse = load_object(name, "tool format")
    return parse


def spoken(text: str) -> str:
    """The text without its thinking block; only what precedes it if the block is not closed."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _read(body: str) -> ToolCall | BadCall:
    try:
        call = json.loads(body)
    except json.JSONDecodeError as error:
        return BadCall(f"the tool call is not JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        return BadCall("the tool call is nested too deeply")
    except ValueError as error:  # an integer with thousands of digits
        return BadCall(f"the tool call cannot be read: {str(error).partition(';')[0]}")
    if not isinstance(call, dict):
        return BadCall(f"a tool call must be a JSON object, not {type(call).__name__}")
    name = next((call[key] for key in _NAME_KEYS if isinstance(call.get(key), str)), None)
    arguments: Any = next((call[key] for key in _ARGUMENT_KEYS if key in call), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return BadCall("the arguments are not a JSON object")
    if name is None:
        return BadCall('the tool call has no "name"')
    if not isinstance(arguments, dict):
        return BadCall("the arguments are not a JSON object")
    return ToolCall(name, arguments)


def _split_objects(body: str) -> Iterable[str]:
    """Splits consecutive JSON objects, separated by semicolons or space; an unreadable rest is the last
    piece."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            yield body[at:]
            return
        yield body[at:end]
        at = end
        while at < len(body) and body[at] in "; \n\t\r":
            at += 1


def text_beside(text: str, calls: Sequence[ToolCall | BadCall]) -> str:
    """The content of the student's message: the text before its tool calls, which have their own field, or
    all of it."""
    if not any(isinstance(call, ToolCall) for call in calls):
        return text
    before = spoken(text).partition("<tool_call>")[0].partition("```")[0].strip()
    return "" if before.startswith(("{", "<|python_tag|>")) else before
