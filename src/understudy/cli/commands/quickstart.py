"""Train a tiny student under two resident teachers on this machine: minutes, no GPU, no download."""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path

EXAMPLE = "understudy quickstart trainer.steps=20"
_NEXT = "loss.signal=hidden  # KL over the whole vocabulary instead of the teachers' 8 best tokens"
"""A next experiment that works as well as the quickstart itself (100 % and 100 % after its 200 steps)."""
_BEGINNING = """quickstart: a tiny student learns sums and sorting from two teachers
the recipe's 200 steps take about 2 minutes on 2 cores; loading …"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=20"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(options: argparse.Namespace) -> int:
    if not options.quiet:  # before seconds of imports, so that the user sees something at once
        print(_BEGINNING, file=sys.stderr, flush=True)
    from rich.console import Console

    from understudy.cli.outcome import finish
    from understudy.cli.reading import recipe_to_run
    from understudy.run.entry import importing, run_to_its_end

    path = Path(str(resources.files("understudy.assets") / "quickstart" / "recipe.toml"))
    next_command = f"understudy train {path} {_NEXT}"
    with recipe_to_run(path, options.overrides) as recipe:
        with importing():
            from understudy.run.launch import launch

        code = finish(run_to_its_end(launch(recipe, progress=not options.quiet, next_command=next_command)))
    if code == 0:  # a stopped run has already printed how to continue
        Console().print(f"next    {next_command}", highlight=False, markup=False, soft_wrap=True)
    return code
