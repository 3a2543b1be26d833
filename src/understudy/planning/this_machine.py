"""Seats a recipe's processes on this machine, or on the machine that `understudy plan` describes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence

from understudy.cluster.devices import visible_gpus
from understudy.config import Recipe
from understudy.errors import ClusterError, ConfigError
from understudy.planning.ray_seating import beside_the_trainer, gpus_outside_ray
from understudy.planning.seating import Seating, seat


def seat_here(recipe: Recipe, usable: Sequence[str]) -> Seating:
    """Assigns this machine's devices to the run's processes. `ClusterError` if it is too small.

    `usable`: the name in CUDA_VISIBLE_DEVICES of each GPU that torch can use in this process."""
    here, seen = recipe, visible_gpus()
    if recipe.cluster.backend == "ray":
        here, usable = beside_the_trainer(recipe), usable[: gpus_outside_ray(recipe)]
    try:
        return seat(here, len(usable), os.cpu_count(), usable)
    except ClusterError as error:
        if usable or not seen:
            raise
        version = importlib.metadata.version("torch")
        raise ClusterError(
            f"{error}\n(there are {len(seen)} GPUs, and torch {version} can use none of them: install one that is built for "
            "CUDA and fits the driver)"
        ) from None


def plan_seats(recipe: Recipe, gpus: int | None) -> Seating:
    """The seats on this machine, or on one with `gpus` GPUs; a Ray cluster's machines are only known to
    Ray."""
    if recipe.cluster.backend != "local":
        if gpus is not None:
            raise ConfigError(
                "--gpus describes one machine (cluster.backend = 'local'); on Ray pools say what there is"
            )
        return seat(recipe, None)
    if gpus is not None:
        if gpus < 0:
            raise ConfigError(f"--gpus {gpus}: expected 0 or more")
        return seat(recipe, gpus)
    gpus_here = visible_gpus()
    try:
        return seat(recipe, len(gpus_here), os.cpu_count(), gpus_here)
    except ClusterError as error:
        raise ClusterError(
            f"{error}\n(for another machine, say what it has: understudy plan … --gpus N)"
        ) from None
