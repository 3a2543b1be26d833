"""Show what a run would do: the keys that the recipe sets, the processes, their memory and their devices."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from understudy.cli.commands.recipes import plan_simulation
from understudy.cli.reading import checked_recipe
from understudy.cluster.devices import gpu_memory, visible_gpus
from understudy.config.toml import as_tables, recipe_as_toml
from understudy.errors import ConfigError
from understudy.observability.redact import redact
from understudy.observability.report import many
from understudy.planning.memory.advice import memory_lines
from understudy.planning.preflight import Findings
from understudy.planning.processes import plan_processes
from understudy.planning.ray_seating import ray_layout
from understudy.planning.simulation.phase_times import batching_of, windows_of
from understudy.planning.this_machine import plan_seats

EXAMPLE = "understudy plan recipe.toml --gpus 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=10"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="plan for a machine with this many GPUs, and CPUs enough, instead of this one",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of each GPU, instead of the memory of this machine's GPUs",
    )
    parser.add_argument(
        "--toml",
        action="store_true",
        help="only print the recipe with every key, as TOML to save and run",
    )
    plan_simulation.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    if "=" in (options.simulate or "") and not Path(options.simulate).exists():
        # `--simulate key=value`: argparse took an override for the run to simulate.
        options.overrides = [*options.overrides, options.simulate]
        options.simulate = ""
    plan_simulation.check_flags(options)
    if options.gpu_memory is not None and not 0 < options.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g}: expected GiB of one GPU, above 0")
    findings = Findings()
    recipe = checked_recipe(options.recipe, options.overrides, findings=findings, new_run=False)
    if options.toml:
        sys.stdout.write(recipe_as_toml(redact(as_tables(recipe))))
        return
    recipe = recipe.with_steps(findings.train_rows or 1)
    console = Console(markup=False)
    if options.simulate is not None:
        plan_simulation.show(
            windows_of(recipe),
            recipe.rollout,
            batching_of(recipe),
            options,
            console,
            partial=recipe.trainer.partial_rollouts,
        )
        return
    _print_changed_keys(as_tables(recipe, defaults=False), console)
    table = Table(title="processes", title_justify="left")
    for column in ("name", "what it does", "device", "parameters", "memory", "at work"):
        right = column in ("parameters", "memory", "at work")
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "name")
    seating = plan_seats(recipe, options.gpus)
    processes = plan_processes(recipe, seating)
    for process in processes:
        parameters = "unknown" if process.parameters is None else f"{process.parameters / 1e6:,.1f} M"
        memory = "unknown" if process.bytes is None else f"{process.bytes / 2**30:,.2f} GiB"
        if process.host_bytes:
            memory += f" + {process.host_bytes / 2**30:,.2f} GiB of the host"
        work = f"+ {process.working_bytes / 2**30:,.2f} GiB" if process.working_bytes else ""
        table.add_row(process.name, process.job, process.device, parameters, memory, work)
    console.print(table)
    there = round(options.gpu_memory * 2**30) if options.gpu_memory else min(gpu_memory(), default=0)
    gpus = options.gpus if options.gpus is not None else len(visible_gpus())
    for line in memory_lines(recipe, processes, there, gpus):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if seating.placement.pools:
        console.print(seating.placement.drawing(), highlight=False, markup=False, soft_wrap=True)
    if shared := seating.shared():
        console.print(shared, highlight=False, markup=False, soft_wrap=True)
    if recipe.cluster.backend == "ray":
        for request in ray_layout(recipe, ()).groups.values():
            console.print(f"on Ray, {request}", highlight=False, markup=False, soft_wrap=True)
        if recipe.dataplane.backend == "transfer_queue":
            units = recipe.dataplane.storage_units
            console.print(
                f"on Ray, TransferQueue: {1 + units} × (1 CPU), its controller and storage units, round the machines"
            )
    rows = recipe.trainer.batch_size * recipe.rollout.n
    console.print(
        f"{many(recipe.trainer.steps, 'step')} × {many(rows, 'rollout')} of at most {recipe.rollout.max_new_tokens} new tokens; "
        f"a checkpoint every {recipe.trainer.checkpoint_every} steps",
        highlight=False,
    )


def _print_changed_keys(changed: Mapping[str, Any], console: Console) -> None:
    """The keys with another value than their default, as TOML. They are few; all keys would fill several screens."""
    console.print(recipe_as_toml(redact(changed)), highlight=False, markup=False, soft_wrap=True)
    console.print("All other keys have their defaults; --toml prints every key.\n", highlight=False)
