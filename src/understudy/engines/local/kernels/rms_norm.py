"""RMS normalisation as one kernel instead of eight, because launches dominate a decode step on a GPU.

Legend: R rows (all axes but the last), F features.

The arithmetic is the same as in transformers: normalise in fp32, round to the model's dtype, then multiply
by the weight in that dtype. Only the order of the sum differs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from understudy.errors import EngineError

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
"""transformers classes that compute exactly this."""

if triton is not None:

    @triton.jit
    def _kernel(x, weight, out, row_stride, features, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < features
        values = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
        variance = tl.sum(values * values, 0) / features
        scaled = (values * tl.rsqrt(variance + epsilon)).to(out.dtype.element_ty)
        factors = tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + row * features + column, scaled * factors, mask=inside)

    @triton.jit
    def _add_kernel(  # type: ignore[no-untyped-def]
        x, before, weight, after, out, features, epsilon, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < features
        at = row * features + column
        added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        added += tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        rounded = added.to(after.dtype.element_ty)
        tl.store(after + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
        variance = tl.sum(values * values, 0) / features
        scaled = (values * tl.rsqrt(variance + epsilon)).to(out.dtype.element_ty)
        factors = tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + at, scaled * factors, mask=inside)


def rms_norm(x_RF: Tensor, weight_F: Tensor, epsilon: float) -> Tensor:
    """The same as `Qwen3RMSNorm.forward` and the other `NORMS`; rows may have any constant stride."""
    features = x_RF.shape[-1]
    flat_RF = x_RF.reshape(-1, features)
    if flat_RF.stride(1) != 1:
        flat_RF = flat_RF.contiguous()
    out_RF = torch.empty((len(flat_RF), features), dtype=x_RF.dtype, device=x_RF.device)
    block = 1 << (features - 1).bit_length()
    warps = 1 if block <= 256 else 4 if block <= 2048 else 8
    _kernel[(len(flat_RF),)](
        flat_RF, weight_F, out_RF, flat_RF.stride(0), features, epsilon, BLOCK=block, num_warps=warps
    )
    return out_RF.view(x_RF.shape)


def add_norm(x_RF: Tensor, before_RF: Tensor, weight_F: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + before, its norm): the end of one block and the start of the next. Inputs must be contiguous."""
    rows, features = x_RF.shape
    after_RF, out_RF = torch.empty_like(x_RF), torch.empty_like(x_RF)
    block = 1 << (features - 1).bit_length()
    warps = 1 if block <= 256 else 4 if block <= 2048 else 8
    _add_kernel[(rows,)](
        x_RF, before_RF, weight_F, after_RF, out_RF, features, epsilon, BLOCK=block, num_warps=warps
    )
    return after_RF, out_RF


def generates_only(model: Any) -> None:
    """Refuses a model in training mode: these kernels have no backward pass.

    Without this check training would run, and the layers below would silently get no gradient.
    """
    if any(module.training for module in model.modules()):
        raise EngineError(
            f"{type(model).__name__} is in training mode, and the decode kernels cannot be differentiated: give the engine modules of "
            "its own (`sharing_copy`), in eval mode"
        )


def refuse_gradients(module: Any) -> None:
    """A second check, at every forward outside a recorded graph, in case the modules are trained later."""
    if torch.is_grad_enabled():
        raise EngineError(
            f"this {type(module).__name__} generates only: its kernel cannot be differentiated, so whatever lies below it would get "
            "no gradient. Train the model it was copied from, or call it under torch.no_grad()"
        )


def fuse_norms(model: Any) -> int:
    """Makes the norms of the engine's own model use the kernel; returns how many. Needs eval mode."""
    generates_only(model)
    norms = [module for module in model.modules() if type(module).__name__ in NORMS]
    for module in norms:
        # Bound methods, not closures: in a copy of the model they are bound to the copy's own modules.
        module.forward = MethodType(_norm, module)
    return len(norms)


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    refuse_gradients(module)
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)
