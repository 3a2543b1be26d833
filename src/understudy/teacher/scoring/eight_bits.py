"""Layers, an embedding and a head with eight-bit weights: one scale per row of a weight.

| `quantize` | layers | head and embedding |
|---|---|---|
| int8 | int8; a layer's weights are widened for its product | int8; a part of the vocabulary, or the rows looked up, are widened |
| fp8  | float8, products by the GPU's fp8 units | int8: float8 rounds logits twenty times as much (docs/experiments.md) |

Shape legend: R rows of activations, I inputs, O outputs of a layer, V vocabulary, H hidden size, C rows of a chunk.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INT8_MOST = 127
_FP8 = torch.float8_e4m3fn
_FP8_MOST = torch.finfo(_FP8).max
_FP8_MULTIPLE = 16
"""The GPU's fp8 products need sides that are multiples of this."""
_WIDENED_BYTES = 64 << 20
"""Of the head's weights that are widened at a time."""
GEMMA_FACTOR = "scalar_embed_scale"
"""The attribute of Gemma's embeddings by which they multiply the rows that they look up."""
_ALIGNED = 64
"""Columns of logits are written in multiples of this."""
WIDE_PRODUCT = torch.__version__ >= torch.torch_version.TorchVersion("2.8")
"""Whether torch can keep a half-precision product in fp32."""


class Bits(StrEnum):
    INT8 = "int8"
    """Weights in int8 with one scale per output; products in the model's dtype."""
    FP8 = "fp8"
    """Weights and activations in float8, products by the GPU's fp8 units."""


def to_int8(values_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers to the nearest of 255 steps [R, I], and float32 scales [R, 1]."""
    scale_R1 = values_RI.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / _INT8_MOST
    return (values_RI.float() / scale_R1).round().to(torch.int8), scale_R1


def to_fp8(values_RI: Tensor) -> tuple[Tensor, Tensor]:
    """float8 [R, I] and float32 scales [R, 1]."""
    scale_R1 = values_RI.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / _FP8_MOST
    return (values_RI.float() / scale_R1).to(_FP8), scale_R1


def fits_fp8(weight_OI: Tensor) -> bool:
    return not any(side % _FP8_MULTIPLE for side in weight_OI.shape)


class Int8Linear(nn.Module):
    """weight ≈ scale_O · int8_OI."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI, scale_O1 = to_int8(linear.weight.detach())
        self.register_buffer("weight", weight_OI)
        dtype = torch.float32 if linear.weight.dtype == torch.float16 else linear.weight.dtype
        self.register_buffer("scale", scale_O1[:, 0].to(dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        # One layer's weights are widened at a time, so they take no lasting memory.
        if states.dtype == torch.float16:  # a product with weights up to 127 would overflow
            return F.linear(states, widened_rows(self.weight, self.scale, states.dtype), self.bias)
        product = F.linear(states, self.weight.to(states.dtype)) * self.scale
        return product if self.bias is None else product + self.bias


class Fp8Linear(nn.Module):
    """Both sides in float8, one scale per output and per row of activations."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI, scale_O1 = to_fp8(linear.weight.detach())
        self.register_buffer("weight", weight_OI)
        self.register_buffer("scale", scale_O1.t().contiguous())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        states_RI, scale_R1 = to_fp8(states.flatten(0, -2))
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


class Int8Embedding(nn.Module):
    """weight ≈ scale_V · int8_VH; rows are widened when they are looked up."""

    weight: Tensor
    scale: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        weight_VH, scale_V1 = to_int8(embedding.weight.detach())
        self.register_buffer("weight", weight_VH)
        self.register_buffer("scale", scale_V1[:, 0])
        self.dtype = embedding.weight.dtype
        # Gemma rounds its factor to the dtype of the weights.
        factor = torch.tensor(float(getattr(embedding, GEMMA_FACTOR, 1.0)))
        self.factor = factor.to(self.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        rows = (self.weight[ids] * self.scale[ids][..., None]).to(self.dtype)
        return rows if self.factor == 1.0 else rows * self.factor


class Int8Head(nn.Module):
    """The output projection. `Head` reads its tensors; `forward` is for the model's own forward pass."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight_VH: Tensor, scale_V: Tensor, bias_V: Tensor | None) -> None:
        """Of tensors that an embedding may share."""
        super().__init__()
        self.register_buffer("weight", weight_VH)
        self.register_buffer("scale", scale_V)
        self.register_buffer("bias", bias_V)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Head:
        weight_VH, scale_V1 = to_int8(linear.weight.detach())
        return cls(weight_VH, scale_V1[:, 0], None if linear.bias is None else linear.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        logits_RV = int8_logits(states.flatten(0, -2), self.weight, self.scale)
        if self.bias is not None:
            logits_RV += self.bias
        return logits_RV.unflatten(0, states.shape[:-1]).to(states.dtype)


def int8_logits(hidden_CH: Tensor, weight_VH: Tensor, scale_V: Tensor) -> Tensor:
    """float32 [C, V]. A part of the vocabulary is widened at a time."""
    vocab, width = weight_VH.shape
    logits_CV = torch.empty(len(hidden_CH), vocab, dtype=torch.float32, device=hidden_CH.device)
    rows = max(1, _WIDENED_BYTES // (hidden_CH.element_size() * width) // _ALIGNED) * _ALIGNED
    for start in range(0, vocab, rows):
        part = slice(start, min(start + rows, vocab))
        widened = widened_rows(weight_VH[part], scale_V[part], hidden_CH.dtype)
        wide_product(hidden_CH, widened, logits_CV[:, part])
    return logits_CV


def widened_rows(weight_VH: Tensor, scale_V: Tensor, dtype: torch.dtype) -> Tensor:
    widened_VH = torch.empty(weight_VH.shape, dtype=dtype, device=weight_VH.device)
    return torch.mul(weight_VH, scale_V[:, None], out=widened_VH)


def wide_product(hidden_CH: Tensor, weight_VH: Tensor, logits_CV: Tensor) -> None:
    """Writes the product into float32 logits. On a GPU it stays in the accumulator's fp32: rounding logits to
    bf16 costs up to 0.06 nats."""
    if hidden_CH.dtype == torch.float32:
        torch.mm(hidden_CH, weight_VH.T, out=logits_CV)
    elif hidden_CH.is_cuda and WIDE_PRODUCT:
        torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32, out=logits_CV)
    else:
        logits_CV.copy_(F.linear(hidden_CH, weight_VH))
