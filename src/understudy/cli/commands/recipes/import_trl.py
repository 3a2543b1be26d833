"""Write a recipe from TRL's DistillationConfig, GKDConfig or GOLDConfig: Python, YAML, JSON, or a command's flags.

Every key is listed: carried over, implied by a default, not needed here, or not supported. Nothing is run.
"""

from __future__ import annotations

import argparse

from understudy.cli.commands.recipes.import_verl import add_output, deliver
from understudy.porting.trl import from_trl
from understudy.porting.trl_sources import read_trl

EXAMPLE = "understudy import-trl train_gkd.py -o recipe.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        metavar="CONFIG_OR_COMMAND",
        help="a .py, .yaml, .json or .sh file, 'GKDConfig(beta=0.5, …)', or `-- python distillation.py --beta 0.5 …`",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> None:
    deliver(from_trl(read_trl(options.source)), options.output)
