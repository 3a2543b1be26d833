"""Write a recipe from a configuration of verl: a YAML file, a launch script, or a command with its overrides.

Every key is listed: carried over, implied by a default, not needed here, or not supported. Nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from understudy.errors import ConfigError
from understudy.porting.recipe_draft import Draft
from understudy.porting.sources import read_source
from understudy.porting.verl import from_verl

EXAMPLE = "understudy import-verl run_opd.sh -o recipe.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        metavar="CONFIG_OR_COMMAND",
        help="a YAML file, a shell script, or `-- python3 -m verl.trainer.main_ppo key=value …`",
    )
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, help="the recipe's file; printed when not given")


def run(options: argparse.Namespace) -> None:
    deliver(from_verl(read_source(options.source)), options.output)


def deliver(draft: Draft, output: Path | None) -> None:
    """Writes the recipe and the list of keys, which goes to stderr if the recipe is printed."""
    if output is None:
        sys.stdout.write(draft.toml())
        sys.stderr.write(f"\n{draft.report()}")
    else:
        try:
            output.write_text(draft.toml())
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error}") from None
        sys.stdout.write(f"{draft.report()}\nwritten to {output}; next: understudy check {output}\n")
    if problems := draft.problems():
        raise ConfigError(problems)
