"""Switches this process to algorithms whose results repeat to the bit."""

from __future__ import annotations

import os

import torch

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS sums in a fixed order only with a workspace of fixed size."""


def keep_to_repeatable(wanted: bool, device: torch.device | str) -> None:
    """Turns torch's deterministic algorithms on or off: strict on a GPU, warnings only on a CPU.

    With warnings only, torch's attention on a GPU would sum gradients in the order in which blocks happen
    to end. On a CPU an operation without a deterministic version (in a custom loss, for example) only
    causes a warning.
    """
    on_gpu = torch.device(device).type == "cuda"
    if wanted and on_gpu:
        os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(wanted, warn_only=not on_gpu)
    # Filling memory that is overwritten anyway would cost 1 % of a small student's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
