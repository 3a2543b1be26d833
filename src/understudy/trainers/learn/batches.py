"""Leased rows as a batch to train on.

    Batches            what the trainers use: a lease becomes a `BatchRef` and the metrics of its rollouts
    ├── LocalBatches   the trainer's process reads every column
    └── RemoteBatches  every rank fetches its own rows from the queue (`remote_rows/batches.py`)

Assembly chooses one of them for a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from understudy.dataplane.base import DataPlane, Lease
from understudy.trainers.row_columns import ALIGNED, alignment_metrics, assemble, rollout_metrics
from understudy.types.batch_ref import BatchRef


class Batches(Protocol):
    """Lays leased rows out. Used on the trainer's event loop."""

    async def of(self, lease: Lease) -> tuple[BatchRef, dict[str, float]]:
        """The rows of a lease, and the metrics of their rollouts."""
        ...

    def metrics(self) -> dict[str, float]:
        """Bytes of rows that rank 0 fetched since the launch."""
        ...


@dataclass(frozen=True, slots=True)
class LocalBatches:
    plane: DataPlane
    fields: tuple[str, ...]
    """The columns that a row must have to be trained on."""
    hidden_dtype: torch.dtype = torch.bfloat16
    """The precision of the teacher's head, for its hidden states."""
    given: bool = False
    """Whether rows may be given answers."""
    aligned: tuple[str, ...] = ()
    """Teachers with another tokenizer."""

    async def of(self, lease: Lease) -> tuple[BatchRef, dict[str, float]]:
        fields = (*self.fields, ALIGNED) if self.aligned else self.fields
        columns = await self.plane.get(lease.meta, fields)
        metrics = rollout_metrics(columns, self.given) | alignment_metrics(columns, self.aligned)
        return assemble(lease.meta.keys, columns, self.hidden_dtype), metrics

    def metrics(self) -> dict[str, float]:
        return {}
