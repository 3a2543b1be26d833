"""Teachers judge rows that the trainer's process has never seen: a worker carries the question and keeps the answer.

    pool (here): which replica, when, how long, again ──ScoreOrder──> worker ──tokens──> replica
    ledger (here) <──where the scores lie── pool: fixed tokens right? <──ScoreAnswer── worker <──scores──┘

To the pool a replica looks as ever (`ScoringClient`): deadlines, retries, ejections and the fixed tokens that ride along are its
own. Requests are composed as without workers, so under `determinism = "full"` the scores are the same to the bit.

The trainer's process asks by itself, reading rows from the run directory, where a worker cannot: the queue is lost, no worker
lives, or an external server is named by this machine's loopback.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from understudy.dataplane.lent import Written
from understudy.errors import ClusterError
from understudy.rollout.workers import WorkersLost
from understudy.teacher.client import ScoringClient
from understudy.teacher.keeper import Connect
from understudy.teacher.launch import Endpoint
from understudy.teacher.manifest import Manifest
from understudy.trainers import row_wire as wire
from understudy.trainers.batches import CANDIDATES
from understudy.trainers.far_writing import FarRow, RowWorkers
from understudy.types.batch import BatchMeta
from understudy.types.scores import ScoreItem, Signal, TeacherScores


@dataclass(frozen=True, slots=True)
class FarScoreItem(ScoreItem):
    """A row to be judged, by name. Its arrays have the right lengths and nothing in them."""

    maker: int | None = None

    @staticmethod
    def of(row: FarRow, signal: Signal, k: int) -> FarScoreItem:
        def blank(*shape: int) -> np.ndarray:
            return np.broadcast_to(np.int32(0), shape)

        ids = blank(row.loss, row.candidates) if signal is Signal.AT_IDS else None
        return FarScoreItem(row.key, blank(row.tokens), blank(row.loss), signal, k, ids, maker=row.maker)


@dataclass(frozen=True, slots=True)
class FarScores(TeacherScores):
    """A verdict that lies where its row does."""

    written: Written = field(default_factory=lambda: Written({}))
    ticket: Any = None
    """Held until the ledger knows it."""


class FarScoring:
    """Between the teachers' pools, which are there first, and the workers."""

    def __init__(self) -> None:
        self._workers: RowWorkers | None = None
        self._teachers: set[str] = set()
        self.rows_judged_here = 0
        """Whose tokens and scores passed the trainer's process after all."""

    def open(self, workers: RowWorkers) -> None:
        self._workers = workers

    def serves(self, teacher: str | None) -> bool:
        """Whether this teacher can be asked about rows by name; a mixture (None) is made here, of scores."""
        return teacher in self._teachers

    def connect(
        self, teacher: str, connect: Connect, external: wire.External | None = None, *, near: bool = False
    ) -> Connect:
        """Clients that know both ways to the teacher's replicas. `near`: its scores are wanted here (a cache of them, or the
        quicker of two answers), so rows are never named to it."""
        if near:
            return connect
        self._teachers.add(teacher)

        def both(teacher: str, replica: str, endpoint: Endpoint) -> ScoringClient:
            direct = connect(teacher, replica, endpoint)
            door = wire.Door(teacher, replica, endpoint.url, endpoint.token, external)
            # A replica of our own told its machine's address; somebody's server may be this machine's alone.
            return FarClient(self, direct, None if external and is_loopback(endpoint.url) else door)

        return both

    async def ask(
        self, door: wire.Door, items: Sequence[ScoreItem], timeout: float | None
    ) -> list[TeacherScores] | None:
        """By a worker; None where none can."""
        workers = self._workers
        if workers is None or workers.plane.shelf.lost is not None:
            return None
        order = wire.ScoreOrder(door, [_order(item) for item in items], timeout)
        makers = Counter(
            item.maker for item in items if isinstance(item, FarScoreItem) and item.maker is not None
        )
        prefer = makers.most_common(1)[0][0] if makers else None
        try:
            told = await workers.workers.errand(wire.SCORE, wire.encode(order), prefer)
        except (WorkersLost, ClusterError):
            return None
        answer = wire.decode_answer(told.body)
        if answer.trouble == wire.ROWS:
            return None
        if answer.trouble is not None:
            raise wire.TROUBLES[answer.trouble](answer.message)
        return [
            wire.inline_scores(verdict, item.signal)
            if verdict.written is None
            else FarScores(
                verdict.key,
                verdict.teacher,
                item.signal,
                _NOTHING,
                written=verdict.written,
                ticket=told.ticket,
            )
            for item, verdict in zip(items, answer.verdicts, strict=True)
        ]

    async def near(self, items: Sequence[ScoreItem]) -> list[ScoreItem]:
        """The items with their tokens, read by this process."""
        assert self._workers is not None
        far = [item for item in items if isinstance(item, FarScoreItem)]
        names = ["tokens", "loss_mask"]
        if any(item.signal is Signal.AT_IDS for item in far):
            names.append(CANDIDATES)
        meta = BatchMeta(self._workers.partition, tuple(item.key for item in far))
        columns = await self._workers.plane.get(meta, names)
        self.rows_judged_here += len(far)
        place = {item.key: index for index, item in enumerate(far)}
        found = []
        for item in items:
            if isinstance(item, FarScoreItem):
                tokens, mask, *ids = (np.asarray(columns[name][place[item.key]]) for name in names)
                positions = np.flatnonzero(mask).astype(np.int32)
                own = ids[0] if item.signal is Signal.AT_IDS else None
                item = ScoreItem(item.key, tokens, positions, item.signal, item.k, own)
            found.append(item)
        return found


class FarClient:
    """One replica (a `ScoringClient`): asked about rows through a worker, about anything else from here."""

    def __init__(self, scoring: FarScoring, near: ScoringClient, door: wire.Door | None) -> None:
        self._scoring = scoring
        self._near = near
        self._door = door

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        if not any(isinstance(item, FarScoreItem) for item in items):
            return await self._near.score(items, timeout)
        if self._door is not None:
            found = await self._scoring.ask(self._door, items, timeout)
            if found is not None:
                return found
        return await self._near.score(await self._scoring.near(items), timeout)

    async def manifest(self) -> Manifest:
        return await self._near.manifest()

    async def health(self) -> bool:
        return await self._near.health()

    async def close(self) -> None:
        await self._near.close()


_NOTHING = np.zeros(0, np.float32)


def _order(item: ScoreItem) -> wire.OrderItem:
    if isinstance(item, FarScoreItem):
        return wire.OrderItem(item.key, str(item.signal), item.k)
    return wire.inline(item)


def is_loopback(url: str) -> bool:
    """Whether an address means the machine it is used on."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
