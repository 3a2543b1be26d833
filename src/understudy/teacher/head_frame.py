"""The frame of a teacher's output head, for clients that score with hidden states (docs/teacher-protocol.md)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from understudy.teacher.protocol import FrameKind, FrameReader, ProtocolError, frame, unframe

WIRE_TYPES = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
"""numpy has no bfloat16: its bits are sent as uint16."""


class _HeadHeader(msgspec.Struct, forbid_unknown_fields=True):
    vocab: int
    hidden_size: int
    dtype: str
    bias: bool
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class WireHead:
    """logits = softcap(scale · (hidden · weightᵀ + bias)); softcap(x) = cap · tanh(x / cap), or x without a
    cap."""

    weight_VH: np.ndarray
    bias_V: np.ndarray | None
    dtype: str
    scale: float
    softcap: float | None


def encode_head(head: WireHead) -> bytes:
    vocab, hidden_size = head.weight_VH.shape
    header = _HeadHeader(vocab, hidden_size, head.dtype, head.bias_V is not None, head.scale, head.softcap)
    arrays = [head.weight_VH] if head.bias_V is None else [head.weight_VH, head.bias_V]
    return frame(
        FrameKind.HEAD, header, [array.astype(WIRE_TYPES[head.dtype], copy=False) for array in arrays]
    )


def decode_head(data: bytes) -> WireHead:
    header, view = unframe(data, FrameKind.HEAD, _HeadHeader)
    wire = WIRE_TYPES.get(header.dtype)
    if wire is None or header.vocab < 1 or header.hidden_size < 1:
        raise ProtocolError(
            f"a head of dtype {header.dtype!r} with shape [{header.vocab}, {header.hidden_size}]"
        )
    body = FrameReader(view)
    weight = body.take("weight", wire, header.vocab * header.hidden_size)
    bias = body.take("bias", wire, header.vocab) if header.bias else None
    body.end()
    return WireHead(
        weight.reshape(header.vocab, header.hidden_size), bias, header.dtype, header.scale, header.softcap
    )
