"""Continue a run that was stopped or killed, from its last checkpoint; `key=value` changes what may change."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from rich.console import Console

from understudy.cli.outcome import finish
from understudy.observability.rundir import RunDir
from understudy.run.entry import early_fork_server, importing, run_to_its_end

EXAMPLE = "understudy resume runs/RUN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="for example trainer.steps=400 trainer.ranks=2",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(options: argparse.Namespace) -> int:
    from understudy.run.changed_recipe import changed_recipe

    recipe, changes = changed_recipe(RunDir.open(options.run), options.overrides)
    console = Console(stderr=True)
    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if options.overrides and not changes:
        tell("nothing changes: the run has these values already")
    with early_fork_server(recipe.cluster, recipe.teachers):
        with importing():
            from understudy.run.launch import resume

        resumed = resume(options.run, options.overrides, progress=not options.quiet, tell=tell)
        return finish(run_to_its_end(resumed))
