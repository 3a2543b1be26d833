"""References to rows and scores that workers on other machines wrote (`types/references.py`).

The trainer's process holds sizes and places. `fetch` reads the arrays: from the run directory, where the worker
wrote them, or through the data plane if an earlier launch knew the place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import LeaseLost
from understudy.trainers.row_columns import CANDIDATES, MEDIA
from understudy.types.batch import BatchMeta
from understudy.types.references import RowPlace
from understudy.types.scores import ScoreItem, Signal, TeacherScores


@dataclass(slots=True)
class RemotePlane:
    """The data plane that workers write to, and the partition of their rows. Used on the trainer's event
    loop."""

    plane: Any
    """A `TransferQueueDataPlane`."""
    partition: str
    pictures: bool = False
    """Whether rows have the column of their pictures."""
    rows_fetched: int = 0
    """Rows whose tokens the trainer's process read to ask a teacher itself."""

    async def read(self, key: str, written: WrittenRow | None, names: Sequence[str]) -> list[np.ndarray]:
        """Columns of one row. With `written` they are read even if the ledger has removed the row meanwhile: what
        is asked of a teacher must not depend on how fast a row is relative to its siblings."""
        self.rows_fetched += 1
        if written is not None:
            cells = await self.plane.cells(WrittenRow({name: written.cells[name] for name in names}))
            return [np.asarray(cells[name]) for name in names]
        columns = await self.plane.get(BatchMeta(self.partition, (key,)), names)
        return [np.asarray(columns[name][0]) for name in names]

    @property
    def lost(self) -> bool:
        """Whether the queue is lost. The run directory still has every row."""
        return self.plane.uploads.lost is not None


@dataclass(frozen=True, slots=True)
class RemoteRow:
    """A row of the ledger, as the worker that made it reported it."""

    key: str
    length: int
    loss_length: int
    first: int
    """The index of the first loss-bearing token."""
    candidates: int
    place: RowPlace
    rows: RemotePlane
    written: WrittenRow | None = None
    """Where its columns lie; None if an earlier launch took it into the ledger."""

    @property
    def here(self) -> None:
        return None

    def to_score(self, signal: Signal, k: int) -> RemoteItem:
        ids_each = self.candidates if signal is Signal.AT_IDS else 0
        return RemoteItem(
            self.key, signal, k, self.length, self.first, ids_each, self.place, self.rows, self.written
        )


@dataclass(frozen=True, slots=True)
class RemoteItem:
    """A remote row to be scored."""

    key: str
    signal: Signal
    k: int
    length: int
    first: int
    """The index of the first scored token."""
    ids_each: int
    place: RowPlace
    rows: RemotePlane
    written: WrittenRow | None = None
    own_prompt: np.ndarray | None = None

    @property
    def here(self) -> None:
        return None

    def after(self, prompt: np.ndarray) -> RemoteItem:
        length = len(prompt) + self.length - self.first
        return replace(self, length=length, first=len(prompt), own_prompt=prompt)

    async def fetch(self) -> ScoreItem:
        names = ["tokens", "loss_mask"]
        if self.signal is Signal.AT_IDS:
            names.append(CANDIDATES)
        if self.rows.pictures:
            names.append(MEDIA)
        row = dict(zip(names, await self.rows.read(self.key, self.written, names), strict=True))
        positions = np.flatnonzero(row["loss_mask"]).astype(np.int32)
        media = tuple(row[MEDIA].tolist()) if MEDIA in row else ()
        item = ScoreItem(self.key, row["tokens"], positions, self.signal, self.k, row.get(CANDIDATES), media)
        return item if self.own_prompt is None else item.after(self.own_prompt)


@dataclass(frozen=True, slots=True)
class RemoteScores:
    """Scores that a worker stored in the run directory and in the queue."""

    key: str
    teacher: str
    signal: Signal
    written: WrittenRow
    segment: Any
    """Held until the ledger has recorded the scores."""
    rows: RemotePlane
    replica: str = ""
    version: int = -1

    def by(self, replica: str) -> RemoteScores:
        return replace(self, replica=replica)

    async def fetch(self) -> TeacherScores:
        cells = await self.rows.plane.cells(self.written)
        return TeacherScores(
            self.key,
            self.teacher,
            self.signal,
            cells["teacher_logprobs"],
            cells.get("teacher_ids"),
            cells.get("teacher_topk_logprobs"),
            cells.get("teacher_hidden"),
            version=self.version,
        )

    async def record(self, put: Callable[[TeacherScores], Awaitable[None]]) -> None:
        with suppress(LeaseLost):  # its group was removed meanwhile
            await self.rows.plane.adopt(self.rows.partition, {self.key: self.written})
