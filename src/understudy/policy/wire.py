"""A batch as bytes, for the ranks that train with the one that was handed it. Safetensors and JSON, never pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from safetensors.torch import load, save

from understudy.policy.state import storable
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

_HEADER = struct.Struct("<Q")
_PLAIN = ("keys", "rewards", "stop_reasons", "teachers")


def pack(head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """8 bytes of header length, a JSON header, a safetensors body."""
    header = json.dumps(head).encode()
    body = save(storable(tensors))
    return _HEADER.pack(len(header)) + header + body


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    (length,) = _HEADER.unpack_from(message)
    start = _HEADER.size + length
    return json.loads(message[_HEADER.size : start]), load(message[start:])


def batch_columns(batch: Batch) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A batch as a JSON header and named tensors."""
    head = {name: list(getattr(batch, name)) for name in _PLAIN}
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(batch):
        column = getattr(batch, field.name)
        if isinstance(column, Jagged):
            tensors |= jagged_columns(field.name, column)
    return head, tensors


def batch_from(head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Batch:
    columns = {
        field.name: jagged_from(field.name, tensors) for field in fields(Batch) if field.name not in _PLAIN
    }
    return Batch(**{name: tuple(head[name]) for name in _PLAIN}, **columns)  # type: ignore[arg-type]


def jagged_columns(name: str, column: Jagged | None) -> dict[str, torch.Tensor]:
    return {} if column is None else {f"{name}.values": column.values, f"{name}.offsets": column.offsets}


def jagged_from(name: str, tensors: Mapping[str, torch.Tensor]) -> Jagged | None:
    if f"{name}.values" not in tensors:
        return None
    return Jagged(tensors[f"{name}.values"], tensors[f"{name}.offsets"])
