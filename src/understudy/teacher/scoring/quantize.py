"""Eight-bit weights for a frozen model (`teachers.NAME.quantize`), and what they change in nats.

    loaded on the host ──fixed tokens──> log p ─────────────────────────────┐
            └──each linear layer in eight bits, moved to its device──> log p ┴──> `QuantizationError`

Only the linear layers of the decoder are quantized. Embeddings, norms and the head keep their dtype. torchao has such
layers too, but transformers imports it wherever it is installed: 0.9 s and two warnings for every process of a run.

Shape legend: R rows of activations, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from understudy.errors import TeacherError
from understudy.nn.vision import is_vision
from understudy.teacher.manifest import QuantizationError
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.probe import probe_family

_INT8_MOST = 127
_FP8 = torch.float8_e4m3fn
_FP8_MOST = torch.finfo(_FP8).max
_FP8_MULTIPLE = 16
"""The GPU's fp8 products need sides that are multiples of this; other layers stay as they are."""


class Bits(StrEnum):
    INT8 = "int8"
    """Weights in int8 with one scale per output; products in the model's dtype."""
    FP8 = "fp8"
    """Weights and activations in float8, products by the GPU's fp8 units."""


class Int8Linear(nn.Module):
    """weight ≈ scale_O · int8_OI, to the nearest step."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI = linear.weight.detach().float()
        scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp_min(1e-12) / _INT8_MOST
        self.register_buffer("weight", (weight_OI / scale_O1).round().to(torch.int8))
        self.register_buffer("scale", scale_O1[:, 0].to(linear.weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        # One layer's weights are widened at a time, so they take no lasting memory.
        product = F.linear(states, self.weight.to(states.dtype)) * self.scale
        return product if self.bias is None else product + self.bias


class Fp8Linear(nn.Module):
    """Both sides in float8, one scale per output and per row of activations."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI, scale_O1 = _to_fp8(linear.weight.detach())
        self.register_buffer("weight", weight_OI)
        self.register_buffer("scale", scale_O1.t().contiguous())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        states_RI, scale_R1 = _to_fp8(states.flatten(0, -2))
        product_RO = torch._scaled_mm(
            states_RI,
            self.weight.t(),
            scale_a=scale_R1,
            scale_b=self.scale,
            out_dtype=states.dtype,
            use_fast_accum=True,  # 5 to 17 % less time; float8 operands round far more than it loses
        )
        product = product_RO.unflatten(0, states.shape[:-1])
        return product if self.bias is None else product + self.bias


def _to_fp8(values_RI: Tensor) -> tuple[Tensor, Tensor]:
    """float8 [R, I] and float32 scales [R, 1]."""
    scale_R1 = values_RI.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / _FP8_MOST
    return (values_RI.float() / scale_R1).to(_FP8), scale_R1


def quantized(
    frozen: FrozenModel, bits: Bits, device: str, most_kl: float
) -> tuple[FrozenModel, QuantizationError]:
    """The model with eight-bit linear layers, on its device; changed in place. Raises `TeacherError` if this
    machine cannot, or if the fixed tokens are further apart than `most_kl`."""
    _check(frozen, bits, device)
    before = _logprobs(frozen)
    body = frozen.model.base_model
    for name, module in list(body.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if bits is Bits.FP8 and any(side % _FP8_MULTIPLE for side in module.weight.shape):
            continue
        parent, _, child = name.rpartition(".")
        small = Int8Linear(module) if bits is Bits.INT8 else Fp8Linear(module)
        setattr(body.get_submodule(parent), child, small.to(device))
    frozen.model.to(device)
    after = replace(frozen, device=torch.device(device), bits=str(bits))
    error = _apart(frozen, before, _logprobs(after))
    if bits is Bits.FP8:
        after = replace(after, rounding=2 * error.worst)
    if not error.kl <= most_kl:
        raise TeacherError(
            f"quantize = {str(bits)!r} changes {frozen.path} by more than quantize_tolerance = {most_kl:g}: {error}; leave "
            "quantize out, or raise the tolerance"
        )
    return after, error


def _check(frozen: FrozenModel, bits: Bits, device: str) -> None:
    if is_vision(frozen.model):
        raise TeacherError(
            f"{frozen.path} reads pictures, and quantize = {str(bits)!r} is for text models; leave it out"
        )
    if bits is Bits.INT8:
        return
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise TeacherError(
            f"quantize = 'fp8' needs a GPU with fp8 products (compute capability 8.9 or newer), and the device is {device}; "
            "use 'int8'"
        )
    if frozen.dtype != "bfloat16":
        raise TeacherError(
            f"quantize = 'fp8' gives products in bfloat16, and dtype = {frozen.dtype!r}; set dtype"
        )


def _sequences(frozen: FrozenModel) -> list[np.ndarray]:
    vocab = frozen.model.get_input_embeddings().weight.shape[0]
    return [item.tokens for item in probe_family(vocab, frozen.max_length)]


@torch.no_grad()
def _logprobs(frozen: FrozenModel) -> list[torch.Tensor]:
    """log p over the vocabulary after every token but the last, float32 [P, V] on the host, per sequence."""
    found = []
    for tokens in _sequences(frozen):
        ids_1T = torch.from_numpy(tokens.astype(np.int64))[None].to(frozen.device)
        logits_1TV = frozen.model(input_ids=ids_1T, use_cache=False).logits
        found.append(torch.log_softmax(logits_1TV[0, :-1].float(), -1).cpu())
    return found


def _apart(frozen: FrozenModel, before: list[torch.Tensor], after: list[torch.Tensor]) -> QuantizationError:
    ids_P = torch.cat([torch.from_numpy(one[1:].astype(np.int64)) for one in _sequences(frozen)])
    was_PV, is_PV = torch.cat(before), torch.cat(after)
    apart_P = (was_PV - is_PV).gather(1, ids_P[:, None]).abs()
    kl_P = (was_PV.exp() * (was_PV - is_PV)).sum(-1)
    return QuantizationError(apart_P.mean().item(), apart_P.max().item(), kl_P.mean().item())
