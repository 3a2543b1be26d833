"""Processes that share a GPU take turns on it, unless NVIDIA's multi-process service is there: whoever starts a run is told.

Nothing else shows it: every process is as busy as it can be, and a fully async run on one H200 took 1.6 times as long
(docs/async.md).
"""

from __future__ import annotations

import os
from pathlib import Path

from understudy.cluster.placement import Placement

_PIPES = ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
"""Where the service listens: what a user says, or the driver's own choice."""
_DOOR = "control"


def advice(placement: Placement) -> str | None:
    """What to start before the next run; None where nobody shares a GPU, or the service is there."""
    shared = placement.shared()
    if not shared or (Path(os.environ.get(_PIPES[0]) or _PIPES[1]) / _DOOR).exists():
        return None
    sharing = " and ".join(dict.fromkeys(seat.role for seat in shared[0]))
    return (
        f"{sharing} share a GPU, on which processes take turns; NVIDIA's multi-process service lets them work side by side: "
        "`nvidia-cuda-mps-control -d` before a run (docs/async.md)"
    )
