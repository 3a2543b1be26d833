"""Which processes of a run share a GPU, and what NVIDIA's multi-process service (MPS) would gain them.

Without MPS such processes run on the GPU in turns. No other sign shows it: every process looks busy, and a
fully async run on one H200 took 1.6 times as long (docs/async.md).
"""

from __future__ import annotations

from understudy.cluster.placement import Placement


def sharing(placement: Placement) -> str | None:
    """The roles on the first GPU that has several processes; None if none has."""
    shared = placement.shared()
    return " and ".join(dict.fromkeys(seat.role for seat in shared[0])) if shared else None


def advice(roles: str, problem: str) -> str:
    """The note of a run that shares a GPU without the service."""
    return (
        f"{roles} share a GPU and take turns on it; under NVIDIA's multi-process service a fully async run on one H200 was 1.6 times "
        f"as fast, and it was not started: {problem} (docs/async.md; run.mps = 'off' silences this)"
    )
