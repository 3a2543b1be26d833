"""List the keys of a recipe with their defaults and what they mean: all of them, or those of one section."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from understudy.config.base import nearest
from understudy.config.messages.keys import described, fields, kind_of
from understudy.config.tables import RecipeTables
from understudy.errors import ConfigError

EXAMPLE = "understudy keys trainer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("section", nargs="?", help="for example trainer, student.lora or loss.topk")


def run(options: argparse.Namespace) -> None:
    console = Console()
    wanted = options.section or ""
    found = {
        path: field
        for path, field in fields(RecipeTables)
        if not wanted or path == wanted or path.startswith(f"{wanted}.")
    }
    if not found:
        guess = nearest(wanted, [*RecipeTables.model_fields, *dict(fields(RecipeTables))], 0.8)
        hint = f"did you mean {guess}?" if guess else f"sections are {', '.join(RecipeTables.model_fields)}"
        raise ConfigError(f"no section or key is called {wanted!r}; {hint}")
    for path, field in found.items():
        console.print(f"[bold]{path}[/] = {_default(field)}", highlight=False, soft_wrap=True)
        meaning = re.sub(r"\s+", " ", field.description or "")
        takes = described(kind_of(field), path)
        text = "; ".join(part for part in (takes, meaning) if part)
        console.print(Padding(Text(text), (0, 0, 0, 4)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value: Any = field.default
    return "(not set)" if value is None else json.dumps(value).replace("[", r"\[")
