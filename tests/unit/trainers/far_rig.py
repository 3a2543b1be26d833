"""A worker that has rows and judges them, without its process: what the run and it say goes through the same bytes and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from understudy.dataplane.frame import FIRST_ARRAY, SpillRef, decode
from understudy.dataplane.memory.intake import framed
from understudy.dataplane.transfer_queue.segments import SegmentWriter, Written
from understudy.dataplane.transfer_queue.write_ids import Marking
from understudy.errors import RowsUnreachable
from understudy.rollout.workers.pool import Answer, WorkersLost
from understudy.teacher.pool.cache import content_digest
from understudy.teacher.pool.launch import Endpoint
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.rollouts import FarRow, RowWorkers
from understudy.trainers.remote_rows.scoring import FarScoreItem, FarScoring
from understudy.trainers.remote_rows.worker_scores import Verdicts
from understudy.types.jagged import Jagged
from understudy.types.scores import ScoreItem, Signal, TeacherScores

VOCAB = 50


class DiskWriter:
    """A `RowWriter` without a queue; `queued` says what it would have put there."""

    def __init__(self, folder: Path) -> None:
        self._segments = SegmentWriter(folder)
        self._marking = Marking()
        self.queued: list[str] = []

    async def write(
        self, partition: str, rows: Mapping[str, Any], segment: int, *, queue: bool = True
    ) -> dict[str, Written]:
        frames, mark = framed(rows), self._marking.new()
        told = {}
        for key, cells in frames.items():
            arrays = [name for name in cells if cells[name][0] >= FIRST_ARRAY]
            refs = await self._segments.append(segment, [cells[name] for name in arrays])
            found: dict[str, Any] = {**cells, **dict(zip(arrays, refs, strict=True))}
            told[key] = Written(found, tuple(cells) if queue else (), mark)
            self.queued += [key] if queue else []
        return told

    async def arrays(self, cells: Sequence[bytes | SpillRef]) -> list[Any]:
        return [
            decode((await self._segments.read([cell]))[0] if isinstance(cell, SpillRef) else cell)
            for cell in cells
        ]


class Teacher:
    """A replica whose verdicts are a function of teacher and tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[ScoreItem] = []

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        self.asked += items
        return [self._judge(item) for item in items]

    def _judge(self, item: ScoreItem) -> TeacherScores:
        seed = [*self.name.encode(), *item.tokens.tolist()]
        logits_PV = np.random.default_rng(seed).normal(0, 3, (len(item.positions), VOCAB))
        logprobs_PV = logits_PV - np.log(np.exp(logits_PV).sum(1, keepdims=True))
        ids = None
        if item.signal is Signal.TOPK:
            ids = np.argsort(-logprobs_PV, axis=1, kind="stable")[:, : item.k].astype(np.int32)
        elif item.signal is Signal.AT_IDS:
            ids = item.ids
        logprobs = None if ids is None else np.take_along_axis(logprobs_PV, ids, 1).astype(np.float32)
        sampled_P = logprobs_PV[:, 0].astype(np.float32)
        return TeacherScores(item.key, self.name, item.signal, sampled_P, ids, logprobs)


class Site:
    """The run's side (`scoring`) and a worker's (`verdicts`), with rows that only the worker knows."""

    def __init__(self, folder: Path, teachers: Sequence[str] = ("add", "sort", "swap")) -> None:
        self.writer = DiskWriter(folder)
        self.verdicts = Verdicts(self.writer, "train", digests=True)
        self.teachers = {name: Teacher(name) for name in teachers}
        self.rows: dict[str, ScoreItem] = {}
        self.errands: list[str] = []
        self.carried = 0
        """Bytes between the run and the worker."""
        self.refused: set[str] = set()
        """Errands that no worker can do now."""
        self.life = 7
        self.scoring = FarScoring()
        plane = SimpleNamespace(shelf=SimpleNamespace(lost=None), get=self._get, cells=self._cells)
        self.scoring.open(RowWorkers(self, plane, "train"))  # type: ignore[arg-type]

    def row(self, key: str, signal: Signal, k: int = 0, tokens: int = 12, seed: int = 1) -> FarScoreItem:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, VOCAB, (5, 3)).astype(np.int32) if signal is Signal.AT_IDS else None
        row = ScoreItem(
            key,
            rng.integers(0, VOCAB, tokens).astype(np.int32),
            np.arange(tokens - 5, tokens, dtype=np.int32),
            signal,
            k,
            ids,
        )
        self.rows[key] = row
        digest = content_digest(row.tokens, row.positions, ids)
        return FarScoreItem.of(FarRow(key, tokens, 5, 3, self.life, "m.1", digest), signal, k)

    def client(self, teacher: str, remember_bytes: int = 0, external: Any = None) -> Any:
        near = self.teachers[teacher]
        connect: Callable[..., Any] = self.scoring.connect(lambda *_: near, external, remember_bytes)  # type: ignore[arg-type, return-value]
        return connect(teacher, "0", Endpoint("http://127.0.0.1:1", None))

    async def errand(self, name: str, body: bytes, prefer: int | None = None) -> Answer:
        self.errands.append(name)
        if name in self.refused:
            raise WorkersLost("died three times")
        answer = wire.encode(await self._done(name, body))
        self.carried += len(body) + len(answer)
        return Answer(answer, SimpleNamespace(number=1), self.life)

    async def _done(self, name: str, body: bytes) -> wire.ScoreAnswer:
        try:
            if name == wire.RECALL:
                return wire.ScoreAnswer(await self.verdicts.recall(wire.decode_recall(body), 1))
            if name == wire.MIX:
                return wire.ScoreAnswer(await self.verdicts.mix(wire.decode_mix(body), 1))
            order = wire.decode_order(body)
            items = [await self._item(item) for item in order.items]
            scores = await self.teachers[order.door.teacher].score(items)
            return wire.ScoreAnswer(await self.verdicts.keep(order, scores, 1))
        except RowsUnreachable as error:
            return wire.ScoreAnswer([], wire.ROWS, str(error))

    async def _item(self, item: wire.OrderItem) -> ScoreItem:
        if item.inline is not None:
            return wire.from_inline(item, item.inline)
        row = self.rows[item.key]
        ids = await self.verdicts.ids(item.ids_at) if item.ids_at else row.ids
        return ScoreItem(item.key, row.tokens, row.positions, Signal(item.signal), item.k, ids)

    async def _get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
        rows = [self.rows[key] for key in meta.keys]
        mask = [torch.isin(torch.arange(len(row.tokens)), torch.from_numpy(row.positions)) for row in rows]
        found: dict[str, Any] = {
            "tokens": Jagged.from_rows([torch.from_numpy(row.tokens) for row in rows]),
            "loss_mask": Jagged.from_rows(mask),
        }
        if "candidate_ids" in names:
            found["candidate_ids"] = Jagged.from_rows(
                [torch.from_numpy(row.ids) for row in rows if row.ids is not None]
            )
        return found

    async def _cells(self, written: Written) -> dict[str, Any]:
        return dict(zip(written.cells, await self.writer.arrays(list(written.cells.values())), strict=True))

    async def read(self, scores: Any) -> dict[str, Any]:
        """What was written of a verdict."""
        return await self._cells(scores.written)
