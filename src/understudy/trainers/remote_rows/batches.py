"""Batches whose columns each rank fetches from TransferQueue itself.

    trainer's process                                rank r (rank 0 runs in the trainer's process)
    ledger: keys, lengths ──FarBatch──command──>     QueueRows.fetch(its own rows) <──columns── TransferQueue

The trainer's process reads only the columns of rank 0's rows. If the queue is lost, it reads the whole batch
from the run directory and sends it to the other ranks, as it does on one machine.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy.dataplane.base import DataPlane
from understudy.errors import RowsUnreachable
from understudy.trainers.row_columns import (
    assemble,
)
from understudy.types.batch import Batch, BatchMeta

if TYPE_CHECKING:
    from understudy.policy.ranks.follow import LeadingPolicy


_HIDDEN_DTYPE = "hidden_dtype"


class QueueRows:
    """A rank's `RowSource`: its connection to the queue and the batch it fetched last."""

    def __init__(self, address: str, patience: float) -> None:
        """`address` comes from `address_of`. A fetch that takes longer than `patience` seconds fails."""
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.plane")
        told = json.loads(address)
        self._reader = queue.QueueReader(queue.QueueAddress.load(told["queue"]), prefix=told["prefix"])
        self._patience = patience
        self._last: tuple[BatchMeta, Batch] | None = None

    @property
    def bytes_got(self) -> int:
        return int(self._reader.bytes_got)

    def fetch(self, meta: BatchMeta) -> Batch:
        """The rows of `meta`. Called on a thread without an event loop. The same `meta` again (another epoch)
        is not read again."""
        if self._last is not None and self._last[0] == meta:
            return self._last[1]
        self._last = None
        try:
            columns = asyncio.run(self._read(meta))
        except Exception as error:
            raise RowsUnreachable(f"{type(error).__name__}: {error}") from error
        batch = _laid_out(meta, columns)
        self._last = (meta, batch)
        return batch

    async def _read(self, meta: BatchMeta) -> Any:
        async with asyncio.timeout(self._patience):
            return await self._reader.get(meta)

    def bring(self, meta: BatchMeta, reason: str) -> Batch:
        raise RowsUnreachable(f"only the trainer's process has the run directory's rows ({reason})")

    def close(self) -> None:
        self._reader.close()


class LeadingRows(QueueRows):
    """Rank 0's `RowSource`, which can also read rows from the run directory (`bring`)."""

    def __init__(self, plane: Any, address: str, patience: float) -> None:
        super().__init__(address, patience)
        self._plane = plane
        self._loop = asyncio.get_running_loop()

    @property
    def lost(self) -> bool:
        return self._plane.shelf.lost is not None

    def bring(self, meta: BatchMeta, reason: str) -> Batch:
        self._loop.call_soon_threadsafe(self._plane.shelf.give_up, reason)
        found = asyncio.run_coroutine_threadsafe(self._plane.get(meta, meta.fields), self._loop)
        return _laid_out(meta, found.result())


def address_of(plane: Any) -> str:
    """The queue address of a plane's columns, as JSON for `QueueRows`."""
    link = plane.shelf.link
    return json.dumps({"queue": link.address.dump(), "prefix": link.partition_id("")})


async def open_far_rows(
    plane: DataPlane, policy: LeadingPolicy, patience: float, on_close: Callable[[Callable[[], None]], Any]
) -> LeadingRows:
    """Connect every rank to the queue of this plane."""
    address = address_of(plane)
    rows = LeadingRows(plane, address, patience)
    on_close(rows.close)
    await asyncio.to_thread(policy.open_rows, address)
    return rows


def _laid_out(meta: BatchMeta, columns: Any) -> Batch:
    return assemble(meta.keys, columns, getattr(torch, meta.extra.get(_HIDDEN_DTYPE, "bfloat16")))
