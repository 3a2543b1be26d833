"""`BatchRef`: what the learning side takes of a batch, whether its columns are in this process or not.

| batch         | its columns | `fetch(rows)` |
|---------------|-------------|---------------|
| `Batch`       | are in this process | is the batch itself |
| `RemoteBatch` | lie in a queue that every rank reaches | reads these rows |

How a step is cut (which rank gets which row, denominators, group advantages) follows from lengths, keys and
rewards. So the trainer needs no columns of a `RemoteBatch` except those of its own rows:

    trainer                                      rank r
    RemoteBatch: names, lengths, teachers  ──>   RemoteBatch.fetch(rows of rank r) ──> Batch of those rows

Columns that the trainer computes itself for every token are in `made`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from understudy.errors import RowsUnreachable
from understudy.types.batch import Batch, BatchMeta
from understudy.types.trajectory import Origin

if TYPE_CHECKING:
    from understudy.types.jagged import Jagged

STREAMS = ("tokens", "loss_mask", "behaviour_logprobs")
"""Columns that a rollout wrote, without those of a teacher."""


class BatchRef(Protocol):
    """A training batch by reference."""

    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def token_lengths(self) -> tuple[int, ...]: ...
    @property
    def loss_lengths(self) -> tuple[int, ...]:
        """Loss-bearing tokens of each row."""
        ...

    @property
    def rewards(self) -> tuple[float, ...]: ...
    @property
    def stop_reasons(self) -> tuple[str, ...]: ...
    @property
    def teachers(self) -> tuple[str, ...]: ...
    @property
    def origins(self) -> tuple[str, ...]:
        """What wrote each row's tokens (`Origin`); empty: the student wrote all rows."""
        ...

    @property
    def has_hidden_states(self) -> bool:
        """Whether rows were scored by hidden states, so that each teacher needs its own head."""
        ...

    @property
    def meta(self) -> BatchMeta | None:
        """The names by which every rank can fetch the rows; None if only this process has them."""
        ...

    @property
    def made(self) -> Mapping[str, Jagged]:
        """By `Batch`'s column names, float32 [P] per row: columns that the trainer computed itself."""
        ...

    @property
    def advantages(self) -> Jagged | None: ...
    @property
    def reference_logprobs(self) -> Jagged | None: ...
    @property
    def values(self) -> Jagged | None: ...
    def __len__(self) -> int: ...
    def with_columns(self, **columns: Jagged) -> BatchRef: ...
    def with_rewards(self, rewards: tuple[float, ...]) -> BatchRef: ...
    def select(self, indexes: Sequence[int]) -> BatchRef:
        """The rows at these indexes, in the order given."""
        ...

    def fetch(self, indexes: Sequence[int]) -> Batch:
        """A batch in this process with at least the rows at these indexes, with all their columns."""
        ...

    def fetch_all(self) -> Batch:
        """Every row with all its columns, in the trainer's process."""
        ...

    def streams(self) -> Batch:
        """Every row in the trainer's process. The teacher's columns may be missing."""
        ...

    def from_disk(self, reason: str) -> Batch:
        """Every row with all its columns, in the trainer's process, after ranks could not fetch them for this
        `reason`."""
        ...


class RowSource(Protocol):
    """Where columns are fetched from, by name of the row. Called by ranks (`fetch`) and by the trainer's
    process (`from_disk`)."""

    def fetch(self, meta: BatchMeta) -> Batch:
        """The columns `meta.fields` of these rows, in this order; raises `RowsUnreachable` if it cannot get
        them."""
        ...

    def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
        """The same from the run directory, in the trainer's process, after a fetch failed for this `reason`."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """A batch whose columns lie in a `RowSource`; every rank fetches only its own rows."""

    meta: BatchMeta
    """The rows, and the columns a rank needs of them."""
    token_lengths: tuple[int, ...]
    loss_lengths: tuple[int, ...]
    source: RowSource = field(repr=False, compare=False)
    rewards: tuple[float, ...] = ()
    stop_reasons: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    made: Mapping[str, Jagged] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.meta.keys

    @property
    def has_hidden_states(self) -> bool:
        return "teacher_hidden" in self.meta.fields

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

    def with_columns(self, **columns: Jagged) -> RemoteBatch:
        return replace(self, made={**self.made, **columns})

    def with_rewards(self, rewards: tuple[float, ...]) -> RemoteBatch:
        return replace(self, rewards=rewards)

    def select(self, indexes: Sequence[int]) -> RemoteBatch:
        return replace(
            self,
            meta=self.meta.at(indexes),
            token_lengths=tuple(self.token_lengths[i] for i in indexes),
            loss_lengths=tuple(self.loss_lengths[i] for i in indexes),
            rewards=tuple(self.rewards[i] for i in indexes) if self.rewards else (),
            stop_reasons=tuple(self.stop_reasons[i] for i in indexes) if self.stop_reasons else (),
            teachers=tuple(self.teachers[i] for i in indexes) if self.teachers else (),
            origins=tuple(self.origins[i] for i in indexes) if self.origins else (),
            made={name: column.select(indexes) for name, column in self.made.items()},
        )

    def fetch(self, indexes: Sequence[int]) -> Batch:
        part = self.select(indexes)
        return part._complete(self.source.fetch(part.meta))

    def fetch_all(self) -> Batch:
        """Fetched, or else read from the run directory."""
        try:
            return self.fetch(range(len(self)))
        except RowsUnreachable as error:
            return self.from_disk(str(error))

    def streams(self) -> Batch:
        """Without the teacher's columns, for a model that is whole in the trainer's process."""
        pictures = tuple(name for name in self.meta.fields if name == "media")
        return replace(self, meta=self.meta.but(fields=(*STREAMS, *pictures))).fetch_all()

    def from_disk(self, reason: str) -> Batch:
        return self._complete(self.source.from_disk(self.meta, reason))

    def _complete(self, batch: Batch) -> Batch:
        named = replace(
            batch,
            rewards=self.rewards,
            stop_reasons=self.stop_reasons,
            teachers=self.teachers,
            origins=self.origins,
        )
        return named.with_columns(**self.made)


def student_rows(batch: BatchRef) -> list[int]:
    """The rows that the student wrote."""
    if not batch.origins:
        return list(range(len(batch)))
    return [row for row, origin in enumerate(batch.origins) if origin == Origin.STUDENT]
