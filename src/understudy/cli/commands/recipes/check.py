"""Check a recipe in seconds: every problem at once, and the objective it trains."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.cli.reading import checked_recipe
from understudy.config.checks.capacity import capacity_notes
from understudy.observability.redact import printable
from understudy.planning.objective import describe
from understudy.planning.preflight import Findings

EXAMPLE = "understudy check recipe.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=10"
    )


def run(options: argparse.Namespace) -> None:
    console = Console()
    findings = Findings()
    recipe = checked_recipe(options.recipe, options.overrides, findings=findings)
    objective = describe(recipe.loss)
    console.print(f"objective  {objective.name}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"formula    {objective.formula}", highlight=False, markup=False, soft_wrap=True)
    if findings.train_rows is not None and (length := recipe.trainer.length_note(findings.train_rows)):
        findings.notes.append(length)
    capacity = capacity_notes(recipe.trainer, recipe.rollout, recipe.dataplane)
    for note in (*objective.notes, *capacity, *findings.notes):
        console.print(f"note       {printable(note)}", highlight=False, markup=False, soft_wrap=True)
    but = " as far as it could be checked (see the notes)" if findings.unreached else ""
    console.print(f"the recipe is sound{but}; `understudy plan` shows what it would start", highlight=False)
