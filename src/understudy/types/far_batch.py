"""`FarBatch`: a training batch whose columns are remote; every rank fetches only its own rows.

    trainer                                  rank r
    FarBatch: names, lengths, teachers  ──>  FarBatch.fetch(rows of rank r) ──> Batch of those rows

How a step is cut (which rank gets which row, denominators, group advantages) follows from lengths, keys and
rewards. So the trainer needs no columns except those of its own rows. Columns that it computes itself for
every token are in `made`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from understudy.errors import RowsUnreachable
from understudy.types.batch import Batch, BatchMeta

if TYPE_CHECKING:
    from understudy.types.jagged import Jagged

STREAMS = ("tokens", "loss_mask", "behaviour_logprobs")
"""Columns that a rollout wrote, without those of a teacher."""


class RowSource(Protocol):
    """Where columns are fetched from, by name of the row. Called by ranks (`fetch`) and by the trainer's
    process (`bring`)."""

    def fetch(self, meta: BatchMeta) -> Batch:
        """The columns `meta.fields` of these rows, in this order; raises `RowsUnreachable` if it cannot get
        them."""
        ...

    def bring(self, meta: BatchMeta, reason: str) -> Batch:
        """The same from the run directory, in the trainer's process, after a fetch failed for this `reason`."""
        ...


@dataclass(frozen=True, slots=True)
class FarBatch:
    meta: BatchMeta
    """The rows, and the columns a rank needs of them."""
    token_lengths: tuple[int, ...]
    loss_lengths: tuple[int, ...]
    """Loss-bearing tokens of each row."""
    source: RowSource = field(repr=False, compare=False)
    rewards: tuple[float, ...] = ()
    stop_reasons: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    made: Mapping[str, Jagged] = field(default_factory=dict)
    """By `Batch`'s column names, float32 [P] per row: columns that the trainer computed itself."""

    @property
    def keys(self) -> tuple[str, ...]:
        return self.meta.keys

    @property
    def advantages(self) -> Jagged | None:
        return self.made.get("advantages")

    @property
    def reference_logprobs(self) -> Jagged | None:
        return self.made.get("reference_logprobs")

    @property
    def values(self) -> Jagged | None:
        return self.made.get("values")

    def __len__(self) -> int:
        return len(self.meta)

    def with_columns(self, **columns: Jagged) -> FarBatch:
        return replace(self, made={**self.made, **columns})

    def select(self, indexes: Sequence[int]) -> FarBatch:
        """The rows at these indexes, in the order given."""
        return replace(
            self,
            meta=self.meta.at(indexes),
            token_lengths=tuple(self.token_lengths[i] for i in indexes),
            loss_lengths=tuple(self.loss_lengths[i] for i in indexes),
            rewards=tuple(self.rewards[i] for i in indexes) if self.rewards else (),
            stop_reasons=tuple(self.stop_reasons[i] for i in indexes) if self.stop_reasons else (),
            teachers=tuple(self.teachers[i] for i in indexes) if self.teachers else (),
            made={name: column.select(indexes) for name, column in self.made.items()},
        )

    def fetch(self, indexes: Sequence[int]) -> Batch:
        """The rows at these indexes with all their columns, in this process."""
        part = self.select(indexes)
        return part._complete(self.source.fetch(part.meta))

    def streams(self) -> Batch:
        """Every row with its tokens but without the teacher's columns, for a model that is whole in the
        trainer's process."""
        return replace(self, meta=self.meta.but(fields=STREAMS)).here()

    def here(self) -> Batch:
        """Every row with all its columns, in the trainer's process: fetched, or else read from the run
        directory."""
        try:
            return self.fetch(range(len(self)))
        except RowsUnreachable as error:
            return self.bring(str(error))

    def bring(self, reason: str) -> Batch:
        """Every row with all its columns, from the run directory; `reason` is why ranks could not fetch them."""
        return self._complete(self.source.bring(self.meta, reason))

    def _complete(self, batch: Batch) -> Batch:
        named = replace(batch, rewards=self.rewards, stop_reasons=self.stop_reasons, teachers=self.teachers)
        return named.with_columns(**self.made)


AnyBatch = Batch | FarBatch
