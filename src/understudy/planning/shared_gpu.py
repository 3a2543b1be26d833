"""Advice to start NVIDIA's multi-process service (MPS) when processes share a GPU.

Without MPS such processes run on the GPU in turns. No other sign shows it: every process looks busy, and a
fully async run on one H200 took 1.6 times as long (docs/async.md).
"""

from __future__ import annotations

import os
from pathlib import Path

from understudy.cluster.placement import Placement

_PIPES = ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
"""Where MPS listens: the variable that sets it, and the driver's default."""
_CONTROL_PIPE = "control"


def advice(placement: Placement) -> str | None:
    """A hint for the user; None if no processes share a GPU, or MPS is running."""
    shared = placement.shared()
    if not shared or (Path(os.environ.get(_PIPES[0]) or _PIPES[1]) / _CONTROL_PIPE).exists():
        return None
    sharing = " and ".join(dict.fromkeys(seat.role for seat in shared[0]))
    return (
        f"{sharing} share a GPU, on which processes take turns; NVIDIA's multi-process service lets them work side by side: "
        "`nvidia-cuda-mps-control -d` before a run (docs/async.md)"
    )
