"""Show the resolved recipe, and the processes and memory a run would use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from understudy.cli.reading import checked_recipe
from understudy.observability.redact import redact
from understudy.trainers.plan import plan_processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example trainer.steps=10")


def run(options: argparse.Namespace) -> None:
    recipe = checked_recipe(options.recipe, options.overrides)
    console = Console()
    console.print_json(json.dumps(redact(recipe.model_dump())))
    table = Table(title="processes", title_justify="left")
    for column in ("name", "what it does", "device", "parameters", "memory"):
        table.add_column(column, justify="right" if column in ("parameters", "memory") else "left")
    for process in plan_processes(recipe):
        parameters = "unknown" if process.parameters is None else f"{process.parameters / 1e6:,.1f} M"
        memory = "unknown" if process.bytes is None else f"{process.bytes / 2**30:,.2f} GiB"
        table.add_row(process.name, process.job, process.device, parameters, memory)
    console.print(table)
    rows = recipe.trainer.batch_size * recipe.rollout.n
    console.print(
        f"{recipe.trainer.steps} steps × {rows} rollouts of at most {recipe.rollout.max_new_tokens} new tokens; "
        f"a checkpoint every {recipe.trainer.checkpoint_every} steps",
        highlight=False,
    )
