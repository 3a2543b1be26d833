"""A batch as bytes, from rank 0 to its followers: plain data and named tensors in one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import torch

from understudy.serving.frames import Decoder, encode
from understudy.types.batch import Batch, BatchMeta
from understudy.types.batch_ref import BatchRef, RemoteBatch, RowSource
from understudy.types.jagged import Jagged

_PLAIN = ("keys", "rewards", "stop_reasons", "teachers", "media", "origins")
_OTHERS = ("weights", "old_logprobs")
"""Columns of an update beside its batch."""


_SAME_SIZE = {1: torch.uint8, 2: torch.int16}
"""By bytes per element: the type as which tensors are sent that numpy has no type for."""


class _Packed(msgspec.Struct, array_like=True):
    head: dict[str, Any]
    arrays: dict[str, np.ndarray]
    types: dict[str, str]
    """The torch type of arrays that were sent as another one: numpy has no bfloat16."""


_packed: Decoder[_Packed] = Decoder(_Packed)


def pack(head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    arrays: dict[str, np.ndarray] = {}
    types: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        try:
            arrays[name] = plain.numpy()
        except TypeError:
            types[name] = str(plain.dtype).removeprefix("torch.")
            arrays[name] = plain.view(_SAME_SIZE[plain.element_size()]).numpy()
    return encode(_Packed(dict(head), arrays, types))


def unpack(message: bytes | memoryview) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What was packed. The tensors are views of a writable message; of `bytes` they are copies."""
    packed = _packed.decode(bytearray(message) if isinstance(message, bytes) else message)
    tensors = {name: torch.from_numpy(array) for name, array in packed.arrays.items()}
    return packed.head, tensors | {
        name: tensors[name].view(getattr(torch, kind)) for name, kind in packed.types.items()
    }


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
    plain = {name: tuple(head[name]) for name in _PLAIN}
    plain["media"] = tuple(tuple(names) for names in plain["media"])
    return Batch(**plain, **columns)  # type: ignore[arg-type]


def jagged_columns(name: str, column: Jagged | None) -> dict[str, torch.Tensor]:
    return {} if column is None else {f"{name}.values": column.values, f"{name}.offsets": column.offsets}


def jagged_from(name: str, tensors: Mapping[str, torch.Tensor]) -> Jagged | None:
    if f"{name}.values" not in tensors:
        return None
    return Jagged(tensors[f"{name}.values"], tensors[f"{name}.offsets"])


def name_columns(
    batch: BatchRef, meta: BatchMeta, **others: Jagged | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The names of a batch's rows (`meta`), and the per-token columns that the trainer computed: `others`, and
    those in the batch."""
    head = {
        "partition": meta.partition,
        "keys": list(batch.keys),
        "fields": list(meta.fields),
        "extra": dict(meta.extra),
        "marks": _grouped(meta.marks),
        "token_lengths": list(batch.token_lengths),
        "loss_lengths": list(batch.loss_lengths),
        "teachers": list(batch.teachers),
        "origins": list(batch.origins),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, column in {**batch.made, **others}.items():
        if column is not None:
            tensors |= _by_row(name, column)
    return head, tensors


def batch_by_names(
    head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], source: RowSource
) -> tuple[RemoteBatch, dict[str, Jagged]]:
    """The batch of remote rows, and separately the columns that the trainer computed, by name."""
    lengths = torch.tensor(head["loss_lengths"], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    columns: dict[str, Jagged] = {}
    for key, tensor in tensors.items():
        name, _, form = key.rpartition(".")
        columns[name] = Jagged(tensor.repeat_interleave(lengths) if form == "rows" else tensor, offsets)
    marks = {name: tuple(own) for names, own in head["marks"] for name in names}
    keys, columns_wanted = tuple(head["keys"]), tuple(head["fields"])
    meta = BatchMeta(head["partition"], keys, columns_wanted, extra=head["extra"], marks=marks)
    batch = RemoteBatch(
        meta,
        tuple(head["token_lengths"]),
        tuple(head["loss_lengths"]),
        source,
        teachers=tuple(head["teachers"]),
        origins=tuple(head["origins"]),
    )
    return batch, columns


def batch_of_command(
    head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], source: RowSource | None
) -> tuple[BatchRef, dict[str, Jagged]]:
    """The batch of a command, and the columns sent with it."""
    if "names" not in head:
        given = {name: jagged_from(name, tensors) for name in _OTHERS}
        others = {name: column for name, column in given.items() if column is not None}
        return batch_from(head["batch"], tensors), others
    assert source is not None
    batch, columns = batch_by_names(head["names"], tensors, source)
    others = {name: columns.pop(name) for name in _OTHERS if name in columns}
    return batch.with_columns(**columns), others


def _grouped(marks: Mapping[str, tuple[str, ...]]) -> list[tuple[list[str], tuple[str, ...]]]:
    """Columns that were written together share their marks; grouped, the marks are sent once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, own in marks.items():
        groups.setdefault(own, []).append(name)
    return [(names, own) for own, names in groups.items()]


def _by_row(name: str, column: Jagged) -> dict[str, torch.Tensor]:
    """One number per row if all its tokens have the same, as reduction weights and group advantages do."""
    lengths = column.lengths
    filled = lengths > 0
    rows = column.values.new_zeros(len(lengths))
    rows[filled] = column.values[column.offsets[:-1][filled]]
    if torch.equal(rows.repeat_interleave(lengths), column.values):
        return {f"{name}.rows": rows}
    return {f"{name}.values": column.values}
