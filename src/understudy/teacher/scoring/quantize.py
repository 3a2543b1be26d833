"""Eight-bit weights for a frozen model (`teachers.NAME.quantize`), by torchao, and what they change in nats.

    loaded on the host ──fixed tokens──> log p ─────────────────────────────┐
            └──each linear layer in eight bits, moved to its device──> log p ┴──> `QuantizationError`

Only the linear layers of the decoder are quantized. Embeddings, norms and the head keep their dtype.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from understudy.errors import TeacherError
from understudy.nn.vision import is_vision
from understudy.teacher.manifest import QuantizationError
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.probe import probe_family


class Bits(StrEnum):
    INT8 = "int8"
    """Weights in int8 with one scale per output; products in the model's dtype."""
    FP8 = "fp8"
    """Weights and activations in float8, products by the GPU's fp8 units."""


def quantized(
    frozen: FrozenModel, bits: Bits, device: str, most_kl: float
) -> tuple[FrozenModel, QuantizationError]:
    """The model with eight-bit linear layers, on its device; changed in place. Raises `TeacherError` if this
    machine cannot, or if the fixed tokens are further apart than `most_kl`."""
    if is_vision(frozen.model):
        raise TeacherError(
            f"{frozen.path} reads pictures, and quantize = {str(bits)!r} is for text models; leave it out"
        )
    config = _config(bits, device)
    from torchao.quantization import quantize_  # noqa: PLC0415 - an extra

    before = _logprobs(frozen)
    body = frozen.model.base_model
    quantize_(body, config, lambda module, name: isinstance(module, torch.nn.Linear), device=device)
    frozen.model.to(device)
    after = replace(frozen, device=torch.device(device), bits=str(bits))
    error = _apart(frozen, before, _logprobs(after))
    if not error.kl <= most_kl:
        raise TeacherError(
            f"quantize = {str(bits)!r} changes {frozen.path} by more than quantize_tolerance = {most_kl:g}: {error}; leave "
            "quantize out, or raise the tolerance"
        )
    return after, error


def _config(bits: Bits, device: str) -> Any:
    if importlib.util.find_spec("torchao") is None:
        raise TeacherError(
            f'quantize = {str(bits)!r} needs the quantize extra: pip install "understudy[quantize]"'
        )
    from torchao.quantization import (  # noqa: PLC0415 - an extra
        Float8DynamicActivationFloat8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if bits is Bits.INT8:
        return Int8WeightOnlyConfig()
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise TeacherError(
            f"quantize = 'fp8' needs a GPU with fp8 products (compute capability 8.9 or newer), and the device is {device}; "
            "use 'int8'"
        )
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


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
