"""Writes keys.md, cli.md, errors.md and api.md beside itself from the config models, the argument parser, errors.py and
docstrings.

python docs/reference/generate.py

It lies beside its pages, as docs/figures/losses.py does, because it is of use to nothing but them.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from understudy import errors
from understudy.cli.main import _parser
from understudy.config.messages.keys import NAME, described, kind_of
from understudy.config.tables import RecipeTables

HERE = Path(__file__).parent


def keys() -> str:
    lines = [
        "# Recipe keys",
        "",
        "Every key of a recipe with its type, default and meaning. `understudy keys SECTION` prints the same in a",
        "terminal, and `understudy schema` gives it to an editor. Written by `docs/reference/generate.py`.",
        "",
        "Every key exists since 0.1.0, the first release.",
    ]
    for name, field in RecipeTables.model_fields.items():
        lines += _section(name, field, level=2)
    return _page(lines)


def _section(path: str, field: FieldInfo, level: int) -> list[str]:
    kind = kind_of(field)
    named = kind.values is not None
    inner = kind_of(kind.values) if named else kind
    path = f"{path}.{NAME}" if named else path
    section = inner.section
    assert section is not None
    about = re.sub(rf"^`\[{re.escape(path)}\]`: ", "", _one_line(section.__doc__ or ""))
    lines = ["", f"{'#' * level} [{path}]", "", about[:1].upper() + about[1:], ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    tables = []
    for name, one in section.model_fields.items():
        if _is_table(one):
            tables.append((f"{path}.{name}", one))
            continue
        takes = described(kind_of(one), f"{path}.{name}")
        cells = (f"`{name}`", takes, _default(one), one.description or "")
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    for place, one in tables:
        lines += _section(place, one, level + 1)
    return lines


def _is_table(field: FieldInfo) -> bool:
    kind = kind_of(field)
    inner = kind_of(kind.values) if kind.values is not None else kind
    return isinstance(inner.section, type) and issubclass(inner.section, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "not set" if field.default is None else f"`{json.dumps(field.default, ensure_ascii=False)}`"


def cli() -> str:
    lines = [
        "# Commands",
        "",
        "Every command of `understudy` with its arguments. `understudy COMMAND --help` prints the same. Written by",
        "`docs/reference/generate.py`.",
        "",
        "Every command takes `--debug`, which shows the stack trace of an error. [Exit codes](errors.md) are the same for all.",
    ]
    parser = _parser()
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        lines += ["", f"## {name}", "", (command.description or "").strip(), ""]
        lines += ["```bash", (command.epilog or "").removeprefix("example: "), "```"]
        rows = list(_arguments(command))
        if rows:
            lines += ["", "| argument | meaning |", "|---|---|", *rows]
    return _page(lines)


def _arguments(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        if action.option_strings:
            value = (
                "" if action.nargs == 0 else f" {action.metavar or _choices(action) or action.dest.upper()}"
            )
            shown = ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
        else:
            shown = f"`{action.metavar or _choices(action) or action.dest}`"
        meaning = _one_line(action.help or "").replace("%(default)s", str(action.default))
        yield f"| {_cell(shown)} | {_cell(meaning)} |"


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""


def exit_codes() -> str:
    lines = [
        "# Errors and exit codes",
        "",
        "What a command's exit code says, and the classes that Python code can catch. Written by",
        "`docs/reference/generate.py`.",
        "",
        "| exit code | means |",
        "|---|---|",
        "| 0 | the command did what it was asked |",
        "| 1 | an unexpected error: a bug of ours, or of a function that the recipe names; `--debug` shows the stack trace. "
        "`understudy audit`: rows are missing; `understudy replay`: a row makes the step fail |",
        f"| {errors.UnderstudyError.exit_code} | one of the errors below, or a wrong command line: one line says what came, what was "
        "expected and what to set |",
        f"| {errors.LOST_PEER} | a child process ended because another process of its group is gone; the run itself ends with 2 |",
        "| 130 | interrupted (Ctrl-C, SIGTERM); a run that stopped at a step can be resumed |",
        "",
        "Every error below is a class in `errors.py`. `understudy.errors.UnderstudyError` catches all of them.",
        "",
        "| class | kind of | exit code | meaning |",
        "|---|---|---|---|",
    ]
    for name, one in vars(errors).items():
        if inspect.isclass(one) and issubclass(one, errors.UnderstudyError):
            base = "" if one is errors.UnderstudyError else f"`{one.__bases__[0].__name__}`"
            lines.append(f"| `{name}` | {base} | {one.exit_code} | {_cell(_one_line(one.__doc__ or ''))} |")
    return _page(lines)


def api() -> str:
    lines = [
        "# Python API",
        "",
        "What Python code may import: functions and classes with their signatures and docstrings. Other modules may change without",
        "notice. Written by `docs/reference/generate.py`.",
    ]
    for title, about, named in API:
        lines += ["", f"## {title}", "", about]
        for name in named:
            module, _, attribute = name.rpartition(".")
            lines += _described(name, getattr(importlib.import_module(module), attribute))
    return _page(lines)


def _described(name: str, one: Any) -> list[str]:
    lines = [
        "",
        f"### {name.rpartition('.')[2]}",
        "",
        "```python",
        f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]}",
    ]
    if not inspect.isclass(one):
        return [*lines, "", _signature(name.rpartition(".")[2], one), "```", "", _text(one)]
    lines += ["```", "", _text(one)]
    members = [
        (key, value) for key, value in vars(one).items() if not key.startswith("_") or key == "__call__"
    ]
    fields = {key for key in getattr(one, "__dataclass_fields__", {}) if not key.startswith("_")}
    typed = [f"| `{key}` | `{_type(kind)}` |" for key, kind in _annotations(one).items() if key in fields]
    if typed:
        lines += ["", "| field | type |", "|---|---|", *typed]
    for key, value in members:
        raw = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            lines += ["", f"**`{key}`** (property). {_text(value.fget)}".rstrip()]
        elif inspect.isfunction(raw):
            lines += ["", "```python", _signature(key, raw), "```", "", _text(raw)]
    return lines


def _annotations(one: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(one.__mro__):
        found |= getattr(base, "__annotations__", {})
    return found


def _type(kind: Any) -> str:
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))).replace("|", "\\|")


def _signature(name: str, function: Any) -> str:
    """One parameter a line where the signature is long."""
    found = inspect.signature(function)
    parameters = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    short = f"{name}{found.replace(parameters=parameters)}"
    if len(short) <= 100:
        return short.replace("'", "")
    lines, keyword = [f"{name}("], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not keyword:
            lines.append("    *,")
            keyword = True
        lines.append(f"    {one},")
    shown = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return "\n".join([*lines, f"){shown}"]).replace("'", "")


def _text(one: Any) -> str:
    return inspect.getdoc(one) or ""


API = (
    (
        "Runs",
        "Start, resume and read runs.",
        ("understudy.distill", "understudy.train", "understudy.resume", "understudy.Run", "understudy.Step",
         "understudy.Evaluation", "understudy.SavedCheckpoint"),
    ),
    (
        "Agent loops",
        "What a loop of your own is given and returns ([agent loops](../agent-loops.md)).",
        ("understudy.rollout.agents.agent.AgentLoop", "understudy.rollout.agents.agent.LoopContext",
         "understudy.rollout.agents.transcript.Transcript", "understudy.types.prompt.Prompt",
         "understudy.types.trajectory.Trajectory"),
    ),
    (
        "Rewards",
        "Rewards that ship; a reward of your own is a function with such parameters ([running](../running.md)).",
        ("understudy.rollout.rewards.builtin.exact_match", "understudy.rollout.rewards.builtin.gsm8k", "understudy.rollout.rewards.builtin.boxed_number"),
    ),
)  # fmt: skip
"""(title, sentence, names) of each section of api.md."""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: Any) -> str:
    return _one_line(str(text)).replace("|", "\\|")


def _page(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    HERE / "keys.md": keys,
    HERE / "cli.md": cli,
    HERE / "errors.md": exit_codes,
    HERE / "api.md": api,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
