"""Train a student from a recipe."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from understudy.cli.outcome import finish
from understudy.cli.reading import recipe_to_run
from understudy.observability.rundir import RunDir
from understudy.run.entry import importing, run_to_its_end

EXAMPLE = "understudy train recipe.toml trainer.steps=20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=10"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    parser.add_argument(
        "--profile",
        type=steps,
        metavar="STEPS",
        help="write a trace of these steps (run.profile_steps): 3, 3-5 or 3,8",
    )
    parser.add_argument("--view", action="store_true", help="a page on the run while it trains")


def steps(text: str) -> list[int]:
    """The steps that `3`, `3-5` or `3,8` name."""
    try:
        ends = [[int(end) for end in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected steps such as 3, 3-5 or 3,8") from None
    if backward := next((pair for pair in ends if pair[0] > pair[-1]), None):
        raise argparse.ArgumentTypeError(
            f"{text!r}: {backward[0]} comes after {backward[-1]}; expected steps such as 3-5"
        )
    return [step for first, *last in ends for step in range(first, (last[0] if last else first) + 1)]


def run(options: argparse.Namespace) -> int:
    overrides = [*options.overrides, *([f"run.profile_steps={options.profile}"] if options.profile else [])]
    with ExitStack() as stack:
        recipe = stack.enter_context(recipe_to_run(options.recipe, overrides, progress=not options.quiet))
        if options.view and recipe.run.dir is None:
            folder = RunDir.fresh_path(recipe.run.name)
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": str(folder)})})
        with importing():
            from understudy.run.launch import launch

        if options.view:
            from understudy.viewer.serve import served_beside

            stack.enter_context(served_beside(Path(str(recipe.run.dir))))
        return finish(run_to_its_end(launch(recipe, progress=not options.quiet)))
