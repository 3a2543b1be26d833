"""Batches whose columns each rank fetches from TransferQueue itself.

    trainer's process                                rank r (rank 0 runs in the trainer's process)
    ledger: keys, lengths ──RemoteBatch──command──>  QueueRows.fetch(its own rows) <──columns── TransferQueue

The trainer's process reads only the columns of rank 0's rows. If the queue is lost, it reads the whole batch
from the run directory and sends it to the other ranks, as it does on one machine.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy.dataplane.base import DataPlane, Lease
from understudy.errors import DataPlaneError, RowsUnreachable
from understudy.trainers.learn.batches import LocalBatches
from understudy.trainers.row_columns import ORIGIN, SCORED, SIZES, assemble, rewards_of, rollout_metrics
from understudy.types.batch import Batch, BatchMeta
from understudy.types.batch_ref import BatchRef, RemoteBatch

if TYPE_CHECKING:
    from understudy.policy.ranks.follow import LeadingPolicy


_HIDDEN_DTYPE = "hidden_dtype"


class QueueRows:
    """A rank's `RowSource`: its connection to the queue and the batch it fetched last."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address` comes from `address_of`. A fetch that takes longer than `timeout_s` seconds fails."""
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.plane")
        location = json.loads(address)
        self._reader = queue.QueueReader(
            queue.QueueAddress.load(location["queue"]), prefix=location["prefix"]
        )
        self._timeout_s = timeout_s
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
        async with asyncio.timeout(self._timeout_s):
            return await self._reader.get(meta)

    def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
        raise RowsUnreachable(f"only the trainer's process has the run directory's rows ({reason})")

    def close(self) -> None:
        self._reader.close()


class LeadingRows(QueueRows):
    """Rank 0's `RowSource`, which can also read rows from the run directory (`from_disk`)."""

    def __init__(self, plane: Any, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._plane = plane
        self._loop = asyncio.get_running_loop()

    @property
    def lost(self) -> bool:
        return self._plane.uploads.lost is not None

    def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
        self._loop.call_soon_threadsafe(self._plane.uploads.give_up, reason)
        found = asyncio.run_coroutine_threadsafe(self._plane.get(meta, meta.fields), self._loop)
        return _laid_out(meta, found.result())


def address_of(plane: Any) -> str:
    """The queue address of a plane's columns, as JSON for `QueueRows`."""
    link = plane.uploads.link
    return json.dumps({"queue": link.address.dump(), "prefix": link.partition_id("")})


@dataclass(frozen=True, slots=True)
class RemoteBatches:
    """`Batches` whose rows every rank fetches itself. From the moment the queue is lost, `local` reads them."""

    plane: Any
    """A `TransferQueueDataPlane`."""
    rows: LeadingRows
    local: LocalBatches
    facts: tuple[str, ...]
    """Columns without per-token data, which the trainer's process reads."""
    tokens: tuple[str, ...]
    """Columns with an entry per token, which ranks fetch."""

    @staticmethod
    async def open(
        plane: DataPlane,
        policy: LeadingPolicy,
        timeout_s: float,
        local: LocalBatches,
        facts: tuple[str, ...],
        tokens: tuple[str, ...],
    ) -> RemoteBatches:
        """Connects every rank to the queue of this plane."""
        address = address_of(plane)
        rows = LeadingRows(plane, address, timeout_s)
        await asyncio.to_thread(policy.open_rows, address)
        return RemoteBatches(plane, rows, local, facts, tokens)

    async def of(self, lease: Lease) -> tuple[BatchRef, dict[str, float]]:
        """Columns missing in the queue are uploaded first."""
        if self.rows.lost:
            return await self.local.of(lease)
        found: dict[str, Any] = dict(await self.plane.get(lease.meta, self.facts))
        try:
            meta = await self.plane.hand_over(lease.meta, self.tokens)
        except DataPlaneError:
            if self.rows.lost:
                return await self.local.of(lease)
            raise
        sizes = found[SIZES]
        extra = {_HIDDEN_DTYPE: str(self.local.hidden_dtype).removeprefix("torch.")}
        batch = RemoteBatch(
            meta.but(tags=(), extra=extra if "teacher_hidden" in self.tokens else {}),
            tuple(row["tokens"] for row in sizes),
            tuple(row["loss"] for row in sizes),
            self.rows,
            rewards=rewards_of(found),
            stop_reasons=tuple(found["stop_reason"]),
            teachers=tuple(found.get(SCORED, ())),
            origins=tuple(found[ORIGIN]),
        )
        return batch, rollout_metrics(found, self.local.given)

    def metrics(self) -> dict[str, float]:
        return {"perf/ranks/bytes_fetched": float(self.rows.bytes_got)}

    def close(self) -> None:
        self.rows.close()


def _laid_out(meta: BatchMeta, columns: Any) -> Batch:
    return assemble(meta.keys, columns, getattr(torch, meta.extra.get(_HIDDEN_DTYPE, "bfloat16")))
