"""Rows by name (`BatchMeta`), and rows with their data (`Batch`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from understudy.types.jagged import Jagged


class BatchMeta(msgspec.Struct, frozen=True):
    """The names of rows in a data plane, without their data: small enough to send anywhere.

    A `Struct`, because every call of the data plane makes one, and a frozen dataclass takes five times as
    long to make.
    """

    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...] = ()
    """Columns present on every one of these rows."""
    tags: tuple[Mapping[str, Any], ...] = ()
    """One small dict per key, or empty."""
    extra: Mapping[str, Any] = {}
    marks: Mapping[str, tuple[str, ...]] = {}
    """By column, one per key: which write of the column is meant, if a queue may hold several
    (`dataplane/transfer_queue/write_ids.py`)."""

    def __post_init__(self) -> None:
        if len(self.keys) > 1 and len(set(self.keys)) != len(self.keys):
            seen: set[str] = set()
            twice = sorted({key for key in self.keys if key in seen or seen.add(key)})  # type: ignore[func-returns-value]
            raise ValueError(f"duplicate keys in a batch: {twice[:5]}; every row may appear once")
        if self.tags and len(self.tags) != len(self.keys):
            raise ValueError(f"{len(self.tags)} tags for {len(self.keys)} keys; give one per key, or none")

    def __len__(self) -> int:
        return len(self.keys)

    def but(self, **changes: Any) -> BatchMeta:
        """A copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)

    def at(self, indexes: Sequence[int]) -> BatchMeta:
        tags = tuple(self.tags[i] for i in indexes) if self.tags else ()
        marks = {name: tuple(own[i] for i in indexes) for name, own in self.marks.items()}
        return self.but(keys=tuple(self.keys[i] for i in indexes), tags=tags, marks=marks)

    def select(self, keys: Iterable[str]) -> BatchMeta:
        """Only these keys, in the order given."""
        place = {key: i for i, key in enumerate(self.keys)}
        missing = [key for key in keys if key not in place]
        if missing:
            raise KeyError(f"not in this batch: {missing[:5]}")
        return self.at([place[key] for key in keys])

    def chunk(self, parts: int) -> list[BatchMeta]:
        """`parts` contiguous pieces whose sizes differ by at most one; short batches give empty pieces."""
        size, rest = divmod(len(self), parts)
        bounds = [0]
        for i in range(parts):
            bounds.append(bounds[-1] + size + (1 if i < rest else 0))
        return [self.at(range(a, b)) for a, b in pairwise(bounds)]

    @staticmethod
    def concat(parts: Sequence[BatchMeta]) -> BatchMeta:
        """The rows of several metas of one partition, concatenated."""
        if not parts:
            raise ValueError("concat needs at least one batch")
        if len({part.partition for part in parts}) != 1:
            raise ValueError(f"one partition per batch, got {sorted({part.partition for part in parts})}")
        fields = tuple(name for name in parts[0].fields if all(name in part.fields for part in parts))
        tagged = all(len(part.tags) == len(part) for part in parts)
        return BatchMeta(
            partition=parts[0].partition,
            keys=tuple(key for part in parts for key in part.keys),
            fields=fields,
            tags=tuple(tag for part in parts for tag in part.tags) if tagged else (),
            extra={name: value for part in parts for name, value in part.extra.items()},
            marks={
                name: tuple(mark for part in parts for mark in part.marks.get(name, ("",) * len(part)))
                for name in dict.fromkeys(name for part in parts for name in part.marks)
            },
        )

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows with the columns of both."""
        if set(self.keys) != set(other.keys) or self.partition != other.partition:
            raise ValueError("union needs the same keys in the same partition")
        other = other.select(self.keys)
        tags = (
            tuple({**a, **b} for a, b in zip(self.tags, other.tags, strict=False))
            if self.tags and other.tags
            else self.tags
        )
        fields = self.fields + tuple(name for name in other.fields if name not in self.fields)
        marks = {**other.marks, **self.marks}
        return self.but(fields=fields, tags=tags, extra={**self.extra, **other.extra}, marks=marks)


_MADE = ("advantages", "importance", "reference_logprobs", "values", "returns")
"""Columns that the trainer computes itself."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready to train on.

    Per-token columns are aligned to `tokens` (index t belongs to token t) or, where the field says [P], to
    the loss-bearing positions of the row. Every column is a `Jagged` over the same rows, or one scalar a
    row.
    """

    keys: tuple[str, ...]
    tokens: Jagged
    """int64 [T]."""
    loss_mask: Jagged
    """bool [T]."""
    behaviour_logprobs: Jagged
    """float32 [T]; NaN where nothing was sampled."""
    rewards: tuple[float, ...] = ()
    """NaN where a row has none."""
    stop_reasons: tuple[str, ...] = ()
    """Why each row ended (`StopReason`); empty if the reader did not ask for it."""
    teachers: tuple[str, ...] = ()
    """Which teacher scored each row; empty without teachers."""
    media: tuple[tuple[str, ...], ...] = ()
    """Hashes of each row's pictures, in the order of their placeholders; empty if no row has any."""
    origins: tuple[str, ...] = ()
    """What wrote each row's tokens (`Origin`); empty: the student wrote all rows."""
    teacher_logprobs: Jagged | None = None
    """float32 [P], per loss-bearing position."""
    teacher_ids: Jagged | None = None
    """int64 [P, K]."""
    teacher_topk_logprobs: Jagged | None = None
    """float32 [P, K]."""
    teacher_hidden: Jagged | None = None
    """bfloat16 [P, H]."""
    advantages: Jagged | None = None
    """float32 [P]: advantages of the task reward, already normalised."""
    importance: Jagged | None = None
    """float32 [P]: importance weight of the policy loss, for the difference between engine and trainer
    probabilities; 0 drops the token."""
    reference_logprobs: Jagged | None = None
    """float32 [P]: logprobs of the written tokens under the frozen reference."""
    values: Jagged | None = None
    """float32 [P]: the critic's values, before the step."""
    returns: Jagged | None = None
    """float32 [P]: the critic's targets."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def token_lengths(self) -> tuple[int, ...]:
        return tuple(self.tokens.lengths.tolist())

    @property
    def loss_lengths(self) -> tuple[int, ...]:
        """Loss-bearing tokens of each row."""
        return self.loss_mask.count_true()

    @property
    def has_hidden_states(self) -> bool:
        return self.teacher_hidden is not None

    @property
    def made(self) -> dict[str, Jagged]:
        columns = {name: getattr(self, name) for name in _MADE}
        return {name: column for name, column in columns.items() if column is not None}

    def with_columns(self, **columns: Jagged) -> Batch:
        return replace(self, **columns)  # type: ignore[arg-type]

    def with_rewards(self, rewards: tuple[float, ...]) -> Batch:
        return replace(self, rewards=rewards)

    # A batch is its own reference (`batch_ref.py`): what is asked for is here already.

    @property
    def meta(self) -> None:
        return None

    def fetch(self, indexes: Sequence[int]) -> Batch:
        return self

    def fetch_all(self) -> Batch:
        return self

    def streams(self) -> Batch:
        return self

    def from_disk(self, reason: str) -> Batch:
        return self

    def select(self, indexes: Sequence[int]) -> Batch:
        """The rows at these indexes, in the order given."""

        def pick(column: Jagged | None) -> Jagged | None:
            return None if column is None else column.select(indexes)

        tokens, loss_mask, behaviour = pick(self.tokens), pick(self.loss_mask), pick(self.behaviour_logprobs)
        assert tokens is not None and loss_mask is not None and behaviour is not None
        return Batch(
            keys=tuple(self.keys[i] for i in indexes),
            tokens=tokens,
            loss_mask=loss_mask,
            behaviour_logprobs=behaviour,
            rewards=tuple(self.rewards[i] for i in indexes) if self.rewards else (),
            stop_reasons=tuple(self.stop_reasons[i] for i in indexes) if self.stop_reasons else (),
            teachers=tuple(self.teachers[i] for i in indexes) if self.teachers else (),
            media=tuple(self.media[i] for i in indexes) if self.media else (),
            origins=tuple(self.origins[i] for i in indexes) if self.origins else (),
            teacher_logprobs=pick(self.teacher_logprobs),
            teacher_ids=pick(self.teacher_ids),
            teacher_topk_logprobs=pick(self.teacher_topk_logprobs),
            teacher_hidden=pick(self.teacher_hidden),
            advantages=pick(self.advantages),
            importance=pick(self.importance),
            reference_logprobs=pick(self.reference_logprobs),
            values=pick(self.values),
            returns=pick(self.returns),
        )
