"""Eight-bit weights for a frozen model (`teachers.NAME.quantize`), and what they change in nats.

    loaded on the host ──fixed tokens──> log p ──────────────────────┐
            └──each matrix in eight bits, moved to its device──> log p ┴──> `QuantizationError`

Linear layers, the embedding of tokens and the head are quantized; norms and biases keep their dtype. torchao has such
layers too, but transformers imports it wherever it is installed: 0.9 s and two warnings for every process of a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.errors import TeacherError
from understudy.nn.vision import is_vision
from understudy.teacher.manifest import QuantizationError
from understudy.teacher.scoring.eight_bits import (
    GEMMA_FACTOR,
    Bits,
    Fp8Linear,
    Int8Embedding,
    Int8Head,
    Int8Linear,
    fits_fp8,
)
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.probe import probe_family


def quantized(
    frozen: FrozenModel, bits: Bits, device: str, most_kl: float
) -> tuple[FrozenModel, QuantizationError]:
    """The model with eight-bit matrices, on its device; changed in place. Raises `TeacherError` if this machine
    cannot, or if the fixed tokens are further apart than `most_kl`."""
    _check(frozen, bits, device)
    before = _logprobs(frozen)
    body = frozen.body
    for name, module in list(body.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if bits is Bits.FP8 and not fits_fp8(module.weight):
            continue
        parent, _, child = name.rpartition(".")
        small = Int8Linear(module) if bits is Bits.INT8 else Fp8Linear(module)
        setattr(body.get_submodule(parent), child, small.to(device))
    _vocabulary_in_int8(frozen.model, device)
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


def _vocabulary_in_int8(model: Any, device: str) -> None:
    """The embedding and the head, moved to the device; where they are tied, one tensor stays one."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    known = type(embedding) is nn.Embedding or hasattr(embedding, GEMMA_FACTOR)
    if known:
        small = Int8Embedding(embedding).to(device)
        model.set_input_embeddings(small)
    if type(head) is not nn.Linear or (tied and not known):
        return
    if tied:
        bias = None if head.bias is None else head.bias.detach()
        model.set_output_embeddings(Int8Head(small.weight, small.scale, bias))
    else:
        model.set_output_embeddings(Int8Head.of(head).to(device))


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
