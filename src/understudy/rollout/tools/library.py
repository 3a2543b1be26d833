"""The tools that ship, and user functions as tools."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from understudy.errors import ConfigError
from understudy.rollout.loading import load_object
from understudy.rollout.tools.base import Tool, ToolOutcome, ToolResult
from understudy.rollout.tools.calculator import calculator
from understudy.rollout.tools.sandbox import Sandbox
from understudy.rollout.tools.workers import FunctionWorkers

_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


class PythonTool:
    """Runs code the model wrote. `packages` lets it import what is installed beside understudy (numpy, sympy,
    …)."""

    def __init__(self, sandbox: Sandbox, *, packages: bool = False) -> None:
        self._sandbox = sandbox
        self._paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] if packages else []

    @property
    def name(self) -> str:
        return "python"

    @property
    def schema(self) -> dict[str, Any]:
        description = "Runs Python code and returns what it prints and the value of its last expression."
        return _schema(self.name, description, {"code": {"type": "string"}}, ["code"])

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        if problem := misfit(self.schema, arguments):
            return ToolResult(ToolOutcome.ERROR, problem)
        return await self._sandbox.run_code(arguments["code"], deadline_s=deadline_s, paths=self._paths)

    async def close(self) -> None:
        """Nothing to close: every call has its own process."""


class FunctionTool:
    """A Python function as a tool; its schema comes from its name, docstring and annotations."""

    def __init__(
        self, function: Callable[..., Any], where: str, sandbox: Sandbox, paths: Sequence[str]
    ) -> None:
        self._schema = schema_of(function)
        self._workers = FunctionWorkers(sandbox, where, paths, count=max(2, os.cpu_count() or 2))

    @property
    def name(self) -> str:
        return str(self._schema["function"]["name"])

    @property
    def schema(self) -> dict[str, Any]:
        return self._schema

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        if problem := misfit(self._schema, arguments):
            return ToolResult(ToolOutcome.ERROR, problem)
        return await self._workers.call(arguments, deadline_s=deadline_s)

    async def close(self) -> None:
        await self._workers.close()


def _calculator(sandbox: Sandbox) -> Tool:
    # By its module name, not through the package: the jail sees only this folder.
    return FunctionTool(calculator, "calculator:calculator", sandbox, [str(Path(__file__).parent)])


def _python_with_packages(sandbox: Sandbox) -> Tool:
    return PythonTool(sandbox, packages=True)


TOOLS: dict[str, Callable[[Sandbox], Tool]] = {
    "calculator": _calculator,
    "python": PythonTool,
    "python_packages": _python_with_packages,
}


def build_tool(name: str, sandbox: Sandbox) -> Tool:
    """A shipped tool, or a function by `"module:function"`; the child imports its module from our
    `sys.path`."""
    if name in TOOLS:
        return TOOLS[name](sandbox)
    if ":" not in name:
        raise ConfigError(f'tool "{name}" is not one of {", ".join(TOOLS)} or "module:function"')
    function = load_object(name, "tool")
    if not inspect.isfunction(function):
        raise ConfigError(f'tool "{name}" is a {type(function).__name__}; expected a function')
    folders = [os.path.abspath(folder) for folder in sys.path]
    return FunctionTool(function, name, sandbox, [folder for folder in folders if os.path.isdir(folder)])


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI function schema of a plain function."""
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"tool {function.__name__}: parameter {name} cannot be given by name, as models must"
            )
        properties[name] = _json_type(hints.get(name, str))
        if parameter.default is parameter.empty:
            required.append(name)
    return _schema(function.__name__, inspect.getdoc(function) or "", properties, required)


def _json_type(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_json_type(one) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is list and inner:
        return {"type": "array", "items": _json_type(inner[0])}
    return {"type": _JSON_TYPES.get(origin or hint, "string")}


def _schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def misfit(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Why the arguments do not match the schema, as a message for the model; empty if they match."""
    parameters = schema["function"]["parameters"]
    known, name = parameters["properties"], schema["function"]["name"]
    if unknown := [key for key in arguments if key not in known]:
        return f"{name} has no argument {unknown[0]!r}; it takes {', '.join(known) or 'none'}"
    if missing := [key for key in parameters["required"] if key not in arguments]:
        return f"{name} needs the argument {missing[0]!r}"
    python_types: dict[str, Any] = {kind: python for python, kind in _JSON_TYPES.items()} | {
        "number": (int, float)
    }
    for key, value in arguments.items():
        kind = known[key].get("type")
        wrong_bool = isinstance(value, bool) and kind in ("integer", "number")
        if wrong_bool or not isinstance(value, python_types.get(kind, object)):
            return f"{name}: the argument {key!r} must be of type {kind}, not {type(value).__name__}"
    return ""
