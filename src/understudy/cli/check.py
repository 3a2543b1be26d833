"""Check a recipe in seconds: every problem at once, and the objective it trains."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.config.recipe import examine, read_tables
from understudy.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example trainer.steps=10")


def run(options: argparse.Namespace) -> None:
    from understudy.trainers.preflight import describe, preflight

    recipe, problems = examine(read_tables(options.recipe, options.overrides))
    if recipe is not None:
        # A key that was wrong was taken out, so a later finding about its default would mislead; both are still shown,
        # because most findings have nothing to do with one another.
        problems += [problem for problem in preflight(recipe) if problem not in problems]
    if problems or recipe is None:
        raise ConfigError(problems)
    console = Console()
    objective = describe(recipe)
    console.print(f"objective  {objective.name}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"formula    {objective.formula}", highlight=False, markup=False, soft_wrap=True)
    for note in objective.notes:
        console.print(f"note       {note}", highlight=False, markup=False, soft_wrap=True)
    console.print("the recipe is sound; `understudy plan` shows what it would start", highlight=False)
