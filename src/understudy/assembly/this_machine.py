"""The GPUs of this machine, and the seating of a recipe's processes on it."""

from __future__ import annotations

import os

import torch

from understudy.cluster.devices import visible_gpus
from understudy.config import Recipe
from understudy.errors import ClusterError
from understudy.planning.ray_seating import beside_the_trainer, gpus_outside_ray
from understudy.planning.seating import Seating, seat


def gpu_names() -> list[str]:
    """The name in CUDA_VISIBLE_DEVICES of each GPU that torch can use in this process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = visible_gpus()
    return names[:count] if len(names) >= count else [str(index) for index in range(count)]


def seat_here(recipe: Recipe) -> Seating:
    """Assigns this machine's devices to the run's processes. `ClusterError` if it is too small."""
    here, usable, seen = recipe, gpu_names(), visible_gpus()
    if recipe.cluster.backend == "ray":
        here, usable = beside_the_trainer(recipe), usable[: gpus_outside_ray(recipe)]
    try:
        return seat(here, len(usable), os.cpu_count(), usable)
    except ClusterError as error:
        if usable or not seen:
            raise
        raise ClusterError(
            f"{error}\n(there are {len(seen)} GPUs, and torch {torch.__version__} can use none of them: install one that is built for "
            "CUDA and fits the driver)"
        ) from None
