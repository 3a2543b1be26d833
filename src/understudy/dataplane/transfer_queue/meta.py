"""Conversion between TransferQueue's batch metas and ours. Does not import TransferQueue.

    KVBatchMeta(keys, tags, partition_id, fields, extra_info)     ⟷  BatchMeta(partition, keys, fields, tags, extra)
    BatchMeta(global_indexes, partition_ids, field_schema, …)      ─>  the queue maps the indexes to keys

Code written for TransferQueue passes such metas to `@bridged` functions and gets a meta of the same class
back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from understudy.dataplane.transfer_queue.write_ids import row_of
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta


@runtime_checkable
class QueueNames(Protocol):
    """A plane whose rows are also in TransferQueue."""

    def partition_of(self, partition_id: str) -> str:
        """Our name for one of the queue's partitions."""
        ...

    async def keys_of(self, global_indexes: Sequence[int], partition_id: str) -> tuple[str, ...]: ...

    async def columnar(self, meta: BatchMeta) -> Any:
        """The queue's own columnar meta of these rows."""
        ...


def is_keyed(batch: Any) -> bool:
    """A `transfer_queue.KVBatchMeta`."""
    return _is_theirs(batch) and hasattr(batch, "partition_id") and hasattr(batch, "keys")


def is_columnar(batch: Any) -> bool:
    """A `transfer_queue.BatchMeta`."""
    return _is_theirs(batch) and hasattr(batch, "global_indexes")


def _is_theirs(batch: Any) -> bool:
    return type(batch).__module__.partition(".")[0] == "transfer_queue"


async def named_by(plane: Any, batch: Any) -> BatchMeta:
    """Our meta of the rows that either kind of TransferQueue meta names."""
    names = plane if isinstance(plane, QueueNames) else None
    if not len(batch):
        fields = batch.fields if is_keyed(batch) else batch.field_names
        return BatchMeta("", (), tuple(fields or ()), (), dict(batch.extra_info or {}))
    if is_keyed(batch):
        if batch.partition_id is None:
            raise DataPlaneError("a KVBatchMeta without partition_id names no rows; set it")
        partition = names.partition_of(batch.partition_id) if names else batch.partition_id
        keys = tuple(row_of(name) for name in batch.keys)
        fields, tags, extra = batch.fields or (), batch.tags, batch.extra_info or {}
    else:
        if names is None:
            raise DataPlaneError(
                "a columnar BatchMeta names rows by TransferQueue's numbers, and this data plane is not on TransferQueue; "
                "name them by key (KVBatchMeta), or set dataplane.backend = 'transfer_queue'"
            )
        ids = set(batch.partition_ids)
        if len(ids) != 1:
            raise DataPlaneError(f"rows of {len(ids)} partitions in one batch; call once for each")
        partition_id = ids.pop()
        partition = names.partition_of(partition_id)
        keys = await names.keys_of(batch.global_indexes, partition_id)
        fields, tags, extra = batch.field_names, batch.custom_meta, batch.extra_info
    row_tags = tuple(tags) if len(tags) == len(keys) and any(tags) else ()
    return BatchMeta(partition, keys, tuple(fields), row_tags, dict(extra))


async def in_kind(plane: Any, batch: Any, meta: BatchMeta) -> Any:
    """A meta of the same class as `batch`, with the columns that `meta` has now."""
    if is_keyed(batch):
        return dataclasses.replace(batch, fields=list(meta.fields))
    if not len(meta):
        return batch
    answer = await plane.columnar(meta)
    answer.update_extra_info(dict(meta.extra))
    return answer
