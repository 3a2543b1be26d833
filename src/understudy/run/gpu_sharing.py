"""`run.mps`: NVIDIA's multi-process service for a run whose processes share a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from understudy.cluster import mps
from understudy.cluster.devices import visible_gpus
from understudy.config import ClusterConfig
from understudy.config.trainer import RunConfig
from understudy.errors import ClusterError
from understudy.planning.seating import Seating
from understudy.planning.shared_gpu import advice, sharing


def share_gpus(
    run: RunConfig, mode: str, cluster: ClusterConfig, seats: Callable[[list[str]], Seating]
) -> list[str]:
    """Starts the service where it helps; returns what to tell the user. `seats` gives the run's processes their
    places on these GPUs. Must be called before torch looks for GPUs: `torch.cuda.is_available` settles whether
    this process can use the service. `mode`: in a sync run the processes take turns anyway."""
    if run.mps == "off" or mode != "fully_async" or cluster.backend != "local" or torch.version.cuda is None:
        return []
    try:
        roles = sharing(seats(visible_gpus()).placement)
    except ClusterError:  # reported when the run seats its processes
        return []
    if roles is None or mps.is_running():
        return []
    if mps.uses_cuda():
        return [advice(roles, "this Python process used CUDA before the run, and it would not be part of it")]
    if problem := mps.start():
        return [advice(roles, problem)]
    return [
        f"{roles} share a GPU: NVIDIA's multi-process service was started and ends with this process (run.mps = 'auto')"
    ]
