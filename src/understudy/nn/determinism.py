"""Whether this process computes with nothing but algorithms that repeat to the bit."""

from __future__ import annotations

import os

import torch

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS adds up in the same order every time only where its memory is of fixed size."""


def keep_to_repeatable(wanted: bool, device: torch.device | str) -> None:
    """Strictly on a GPU: told only to warn, torch lets attention there add up its gradients in the order in which blocks happen to end.

    On a CPU an operation that torch does not vouch for (of somebody's own loss, say) is warned of and done.
    """
    on_gpu = torch.device(device).type == "cuda"
    if wanted and on_gpu:
        os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(wanted, warn_only=not on_gpu)
    # Filling what is overwritten anyway would cost a hundredth of a small student's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
