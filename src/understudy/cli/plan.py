"""Show the resolved recipe, the processes and memory a run would use, and who sits where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from understudy.cli import plan_simulation
from understudy.cli.reading import checked_recipe
from understudy.cluster.devices import visible_gpus
from understudy.observability.redact import redact
from understudy.trainers.plan import plan_processes
from understudy.trainers.ray_seating import ray_layout
from understudy.trainers.seating import seat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example trainer.steps=10")
    plan_simulation.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    recipe = checked_recipe(options.recipe, options.overrides)
    console = Console()
    if options.simulate is not None:
        plan_simulation.show(recipe, options, console)
        return
    console.print_json(json.dumps(redact(recipe.model_dump())))
    table = Table(title="processes", title_justify="left")
    for column in ("name", "what it does", "device", "parameters", "memory"):
        table.add_column(column, justify="right" if column in ("parameters", "memory") else "left")
    gpus = len(visible_gpus())
    seating = seat(recipe, gpus if recipe.cluster.backend == "local" else None)
    for process in plan_processes(recipe, seating):
        parameters = "unknown" if process.parameters is None else f"{process.parameters / 1e6:,.1f} M"
        memory = "unknown" if process.bytes is None else f"{process.bytes / 2**30:,.2f} GiB"
        table.add_row(process.name, process.job, process.device, parameters, memory)
    console.print(table)
    if seating.placement.pools:
        console.print(seating.placement.drawing(), highlight=False, markup=False, soft_wrap=True)
    if recipe.cluster.backend == "ray":
        for wish in ray_layout(recipe, ()).groups.values():
            console.print(f"on Ray, {wish}", highlight=False, markup=False, soft_wrap=True)
        if recipe.dataplane.backend == "transfer_queue":
            units = recipe.dataplane.storage_units
            console.print(
                f"on Ray, TransferQueue: {1 + units} × (1 CPU), its controller and storage units, round the machines"
            )
    rows = recipe.trainer.batch_size * recipe.rollout.n
    console.print(
        f"{recipe.trainer.steps} steps × {rows} rollouts of at most {recipe.rollout.max_new_tokens} new tokens; "
        f"a checkpoint every {recipe.trainer.checkpoint_every} steps",
        highlight=False,
    )
