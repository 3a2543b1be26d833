"""Sets up torch and Python's garbage collector in a process that trains: threads, seed, determinism, oneDNN."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from understudy.nn.determinism import keep_to_repeatable
from understudy.planning.resolved import Compute
from understudy.trainers.models import resolve_device

NEW_OBJECTS = 50_000
"""The gc threshold of the youngest generation: objects allocated minus freed, about ten megabytes."""


def set_up_torch(compute: Compute, share_of: int = 1) -> None:
    """Sets torch's thread count, seed and determinism.

    Sums depend on how they are split over threads, so a deterministic run fixes the thread count. A rank gets
    one `share_of`-th of the threads, because all ranks compute at the same time."""
    if compute.threads is not None:
        torch.set_num_threads(max(compute.threads // share_of, 1))
    torch.manual_seed(compute.seed)
    keep_to_repeatable(compute.deterministic, resolve_device(compute.device))


@contextmanager
def raised_gc_threshold() -> Iterator[None]:
    """Raises the gc threshold while a CPU run trains. A disabled collector or a higher threshold is left as
    it is."""
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def onednn_as_resolved(compute: Compute) -> Iterator[None]:
    """Disables oneDNN in the block if `compute.without_onednn` is set: for some students that train in lanes.

    On ARM torch passes a product with a transposed weight to oneDNN. Each call then takes a third of a
    millisecond more and uses OMP_NUM_THREADS threads, whatever torch's setting, so the threads of two lanes
    (`policy/cpu/lanes.py`) and of a teacher wait for each other. Without a bias the results are bit-identical. With a bias they are
    not, so such students keep oneDNN. So do students in half precision, which is fast only with oneDNN.
    """
    before = torch.backends.mkldnn.enabled
    if compute.without_onednn:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
