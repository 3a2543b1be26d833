"""The GPUs of this machine, and the settings of a run directory on it."""

from __future__ import annotations

import torch

from understudy.cluster.devices import visible_gpus
from understudy.config import parse_recipe
from understudy.config.recipe import stored
from understudy.observability.rundir import RunDir
from understudy.planning.resolved import Resolved, resolve


def gpu_names() -> list[str]:
    """The name in CUDA_VISIBLE_DEVICES of each GPU that torch can use in this process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = visible_gpus()
    return names[:count] if len(names) >= count else [str(index) for index in range(count)]


def settings_of_run(run: RunDir) -> Resolved:
    """What the recipe in a run directory implies, for a process that has the directory only: a rank, the
    critic's process, a replay."""
    table = run.tables()
    run.check_restored(table, "student", "critic", "reference", "loss", "trainer")
    return resolve(parse_recipe(stored(table)), len(gpu_names()))
