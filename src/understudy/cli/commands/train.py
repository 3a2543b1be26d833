"""Train a student from a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from understudy.cli.outcome import finish
from understudy.cli.reading import checked_recipe
from understudy.run.entry import begun_early, run_to_its_end

EXAMPLE = "understudy train recipe.toml trainer.steps=20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=10"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(options: argparse.Namespace) -> int:
    recipe = checked_recipe(options.recipe, options.overrides, progress=not options.quiet)
    with begun_early(recipe):
        from understudy.run.launch import launch

        return finish(run_to_its_end(launch(recipe, progress=not options.quiet)))
