"""Settings with which a recipe fits a GPU that all its processes share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from understudy.config import Recipe
from understudy.planning.memory.working import engine_inside, longest_row
from understudy.planning.processes import PlannedProcess, plan_processes
from understudy.planning.seating import seat

USABLE = 0.92
"""The share of a GPU's memory that planned processes may fill: torch's allocator leaves gaps."""
_FEWEST_ROWS = 4


def gpu_loads(processes: list[PlannedProcess]) -> dict[str, int]:
    """Planned bytes by GPU; processes of unknown size count as 0."""
    loads: dict[str, int] = {}
    for process in processes:
        if process.device.startswith("cuda:"):
            used = (process.bytes or 0) + process.working_bytes
            loads[process.device] = loads.get(process.device, 0) + used
    return loads


def memory_lines(recipe: Recipe, processes: list[PlannedProcess], gpu_bytes: int, gpus: int) -> list[str]:
    """What each GPU has to hold, and settings that make it less where it is too much. 0 bytes: not known."""
    loads = gpu_loads(processes)
    there = f" of {gpu_bytes / 2**30:,.1f}" if gpu_bytes else ""
    lines = [f"{device}: {load / 2**30:,.1f} GiB at most{there}" for device, load in sorted(loads.items())]
    if gpu_bytes and any(load > USABLE * gpu_bytes for load in loads.values()):
        changed = settings_that_fit(recipe, gpu_bytes, gpus)
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in changed.items())
        lines.append(
            f"that is too much; set {settings}" if settings else "that is too much; use more or larger GPUs"
        )
    return lines


def settings_that_fit(recipe: Recipe, gpu_bytes: int, gpus: int = 1) -> dict[str, Any]:
    """Changed keys with which every GPU's processes fit; as many changes as there are if none of them suffices.

    In the order of what they cost: rows in the engine that no step has, smaller micro-batches, recomputed activations,
    fewer rows decoded together.
    """
    changed: dict[str, Any] = {}
    for key, value in _changes(recipe):
        if fits(recipe, gpu_bytes, gpus):
            break
        changed[key] = value
        section, _, field = key.partition(".")
        own = getattr(recipe, section).model_copy(update={field: value})
        recipe = recipe.model_copy(update={section: own})
    return changed


def fits(recipe: Recipe, gpu_bytes: int, gpus: int = 1) -> bool:
    loads = gpu_loads(plan_processes(recipe, seat(recipe, gpus)))
    return all(load <= USABLE * gpu_bytes for load in loads.values())


def _changes(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    rows, slots = recipe.trainer.batch_size * recipe.rollout.n, recipe.rollout.max_batch
    if recipe.trainer.mode == "sync" and rows < slots:
        slots = rows
        yield "rollout.max_batch", slots
    if recipe.trainer.micro_batch_tokens > longest_row(recipe) > 0:
        yield "trainer.micro_batch_tokens", longest_row(recipe)
    if not recipe.student.gradient_checkpointing:
        yield "student.gradient_checkpointing", True
    while engine_inside(recipe) and slots > _FEWEST_ROWS:
        slots = max(_FEWEST_ROWS, slots // 2)
        yield "rollout.max_batch", slots
