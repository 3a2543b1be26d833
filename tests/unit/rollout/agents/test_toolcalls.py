"""Parsers of tool calls in the formats that models write; no text makes them raise."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.rollout.agents.toolcalls import FORMATS, BadCall, ToolCall, parser_of

CALL = ToolCall("calculator", {"expression": "1+1"})
LONG = '{"name": "f", "arguments": {"x": %s}}' % ("1" * 4400)
"""Python reads no integer of more than 4,300 digits."""
AS_JSON = '{"name": "calculator", "arguments": {"expression": "1+1"}}'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{AS_JSON}\n</tool_call>"),
        (
            "hermes",
            f'<think>\n<tool_call>{{"name": "no"}}</tool_call>\n</think>\n\n<tool_call>{AS_JSON}</tool_call>',
        ),
        (
            "hermes",
            '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1+1\\"}"}</tool_call>',
        ),
        ("llama3", '{"name": "calculator", "parameters": {"expression": "1+1"}}'),
        ("llama3", f"<|python_tag|>{AS_JSON}"),
        ("json", f"I will calculate.\n```json\n{AS_JSON}\n```\nWait."),
        ("json", '```tool_call\n{"tool": "calculator", "input": {"expression": "1+1"}}\n```'),
    ],
)
def test_each_format_parses_a_single_tool_call(format: str, text: str) -> None:
    assert parser_of(format)(text) == [CALL]


def test_each_format_parses_several_calls_in_order() -> None:
    two = [ToolCall("a", {}), ToolCall("b", {"x": [1, {"y": "}"}]})]
    as_json = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in two]
    assert parser_of("hermes")("".join(f"<tool_call>{one}</tool_call>" for one in as_json)) == two
    assert parser_of("llama3")("; ".join(as_json)) == two
    assert parser_of("json")("".join(f"```json\n{one}\n```\n" for one in as_json)) == two


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "The answer is 2."),
        ("hermes", f"<think>\n<tool_call>{AS_JSON}</tool_call>"),
        ("llama3", 'The call would be {"name": "f"}'),
        ("json", '```json\n{"data": 3}\n```'),
        ("json", f"```python\n{AS_JSON}\n```"),
    ],
)
def test_text_without_a_tool_call_parses_to_no_calls(format: str, text: str) -> None:
    assert parser_of(format)(text) == []


@pytest.mark.parametrize(
    ("format", "text", "says"),
    [
        ("hermes", f"<tool_call>{AS_JSON}", "not closed"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "not list"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "tool call"),
        ("llama3", '{"name": "f", "parameters": {}', "not JSON"),
        ("hermes", f"<tool_call>{LONG}</tool_call>", "cannot be read: Exceeds the limit"),
        ("llama3", LONG, "cannot be read: Exceeds the limit"),
        ("json", f"```json\n{LONG}\n```", "cannot be read: Exceeds the limit"),
        (
            "hermes",
            f"<tool_call>{json.dumps({'name': 'f', 'arguments': LONG})}</tool_call>",
            "not a JSON object",
        ),
    ],
)
def test_a_malformed_tool_call_parses_to_a_bad_call_with_its_reason(
    format: str, text: str, says: str
) -> None:
    (call,) = parser_of(format)(text)
    assert isinstance(call, BadCall) and says in call.reason


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "```json\n",
        "```",
        "{",
        "}",
        '"name"',
        ":",
        '"f"',
        ",",
        ";",
        "[",
        " ",
        "\n",
        "é",
    ]
)


@pytest.mark.parametrize("format", FORMATS)
@given(text=st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join))
def test_no_text_makes_a_tool_call_parser_raise(format: str, text: str) -> None:
    assert all(isinstance(call, ToolCall | BadCall) for call in parser_of(format)(text))


def test_parser_of_accepts_format_names_and_import_paths() -> None:
    assert parser_of("understudy.rollout.agents.toolcalls:parse_json") is FORMATS["json"]
    with pytest.raises(ConfigError, match="hermes, llama3, json"):
        parser_of("xml")
