"""What a worker does with a teacher's scores: store, cache, and mix those of several teachers.

| scores              | stored in               | read                                               |
|---------------------|-------------------------|----------------------------------------------------|
| final (`VERDICT`)   | run directory and queue | by the ranks that train on the row                 |
| partial (`OPINION`) | run directory           | by the worker that mixes them, on a `MixOrder`     |
| cross (`REST`)      | run directory           | the same                                           |
| cached              | this worker's memory    | for a row with the same tokens, on a `RecallOrder` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.transfer_queue.segments import Written
from understudy.dataplane.transfer_queue.write_ids import Marking
from understudy.errors import RowsUnreachable
from understudy.teacher.mixture import Opinion, at_all_ids, mix
from understudy.teacher.pool.cache import ScoreCache, content_digest, size_of
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.row_columns import SCORED, score_columns
from understudy.types.scores import ScoreItem, Signal, TeacherScores

LOGPROBS, IDS, TOPK_LOGPROBS = "teacher_logprobs", "teacher_ids", "teacher_topk_logprobs"
_NOTHING = np.zeros(0, np.int32)
_Kept = tuple[TeacherScores, wire.Use]


class Verdicts:
    """Stores scores for one worker and caches them by teacher. Used on the worker's event loop."""

    def __init__(self, writer: Any, partition: str, *, digests: bool) -> None:
        """`writer` is a `RowWriter`. `digests`: whether partial scores carry the digest of their candidate
        ids."""
        self._writer = writer
        self._partition = partition
        self._digests = digests
        self._memories: dict[str, ScoreCache] = {}
        """Cached scores by teacher."""
        self._names = Marking()

    async def keep(
        self, order: wire.ScoreOrder, scores: Sequence[TeacherScores], ticket: int
    ) -> list[wire.Verdict]:
        """Stores the scores of all items of `order`. Answers come in the order of the items."""
        asked = list(zip(order.items, scores, strict=True))
        told = await self._write([(one, item.use) for item, one in asked if item.inline is None], ticket)
        if order.remember_bytes:
            for verdict, one in zip(told, (one for item, one in asked if item.inline is None), strict=True):
                verdict.memory = self._remember(order.door.teacher, one, order.remember_bytes)
                verdict.size = size_of([one])
        rows = iter(told)
        return [next(rows) if item.inline is None else wire.inline_verdict(one) for item, one in asked]

    async def recall(self, order: wire.RecallOrder, ticket: int) -> list[wire.Verdict]:
        """Stores cached scores for other rows with the same tokens. `RowsUnreachable` if an entry was
        evicted."""
        memory, rows = self._memories.get(order.teacher), []
        for item in order.items:
            named = ScoreItem(item.key, _NOTHING, _NOTHING, Signal.SAMPLED)
            found = memory.get(item.memory.encode(), [named]) if memory is not None else None
            if found is None:
                raise RowsUnreachable(f"{item.memory} is not remembered here")
            rows.append((found[0], item.use))
        return await self._write(rows, ticket)

    async def mix(self, order: wire.MixOrder, ticket: int) -> list[wire.Verdict]:
        """Mixes several teachers' partial scores of a row into its final scores and stores them."""
        item = ScoreItem(order.key, _NOTHING, _NOTHING, Signal(order.signal), order.k)
        best = [await self._scores(order, one) for one in order.opinions]
        opinions = []
        for own, one in enumerate(order.opinions):
            scores = best[own]
            if one.rest is not None:
                (others_PC,) = await self._writer.arrays([one.rest.cells[TOPK_LOGPROBS]])
                scores = at_all_ids(own, best, others_PC)
            opinions.append(Opinion(one.weight, scores))
        return await self._write([(mix(opinions, item), wire.Use.VERDICT)], ticket)

    async def ids(self, places: Sequence[SpillRef]) -> np.ndarray:
        """Other teachers' candidate ids, concatenated along the last axis."""
        return np.concatenate(await self._writer.arrays(places), axis=1)

    async def _scores(self, order: wire.MixOrder, one: wire.OpinionAt) -> TeacherScores:
        cells = one.best.cells
        arrays = dict(zip(cells, await self._writer.arrays(list(cells.values())), strict=True))
        return scores_of(order.key, one.teacher, Signal(order.signal), arrays)

    async def _write(self, rows: Sequence[_Kept], ticket: int) -> list[wire.Verdict]:
        written: dict[str, Written] = {}
        for queue in (True, False):
            columns = {one.key: _columns(one, use) for one, use in rows if (use is wire.Use.VERDICT) is queue}
            if columns:
                written |= await self._writer.write(self._partition, columns, ticket, queue=queue)
        return [
            wire.Verdict(one.key, one.teacher, written[one.key], ids_digest=self._digest(one, use))
            for one, use in rows
        ]

    def _digest(self, scores: TeacherScores, use: wire.Use) -> bytes:
        """The digest of partial scores' candidate ids, at which the other teachers are asked next."""
        return content_digest(scores.ids) if self._digests and use is wire.Use.OPINION else b""

    def _remember(self, teacher: str, scores: TeacherScores, most_bytes: int) -> str:
        memory = self._memories.setdefault(teacher, ScoreCache(most_bytes))
        name = self._names.new()
        memory.put(name.encode(), [scores])
        return name


def scores_of(key: str, teacher: str, signal: Signal, cells: dict[str, Any]) -> TeacherScores:
    """Partial or cross scores from the arrays that were stored."""
    sampled_P = cells.get(LOGPROBS, np.zeros(0, np.float32))
    return TeacherScores(key, teacher, signal, sampled_P, cells.get(IDS), cells.get(TOPK_LOGPROBS))


def _columns(scores: TeacherScores, use: wire.Use) -> dict[str, Any]:
    """The columns to store. Only final scores include the teacher's name: for the rest the trainer knows
    it."""
    if use is wire.Use.REST:
        return {TOPK_LOGPROBS: scores.logprobs}
    columns = score_columns(scores)
    if use is wire.Use.OPINION:
        del columns[SCORED]
    return columns
