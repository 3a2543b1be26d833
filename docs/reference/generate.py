"""Writes keys.md, cli.md and errors.md beside itself from the config models, the argument parser and errors.py.

python docs/reference/generate.py

It lies beside its pages, as docs/figures/losses.py does, because it is of use to nothing but them.
"""

from __future__ import annotations

import argparse
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
        return "needed"
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
        told = _one_line(action.help or "").replace("%(default)s", str(action.default))
        yield f"| {_cell(shown)} | {_cell(told)} |"


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
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
