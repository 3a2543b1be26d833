"""Teacher scoring of remote rows: a worker sends the request to the replica and stores the scores.

    pool: replica, deadline, retry ────────ScoreOrder──────> worker ──tokens──> replica
    ledger <──location── pool: fixed tokens <──ScoreAnswer── worker <──scores──────┘

The pool sees a replica through the usual protocol (`ScoringClient`). Deadlines, retries, ejections, hedged
requests for stragglers and the fixed tokens of the canary stay in the pool. Requests are composed as without
workers, so under `determinism = "full"` the scores are bit-identical. If two workers answer one request, the
pool keeps one answer and the ledger stores that answer's location; the other worker's scores lie under
another write id. `FarScoreCache` below caches scores; mixtures are in `remote_rows/mixture.py`.

The trainer's process reads rows from the run directory and asks the replica itself where no worker can: the
queue is lost, no worker is alive, or an external server's address is this machine's loopback.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import ClusterError
from understudy.rollout.workers.pool import WorkersLost
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.manifest import Batching, Manifest
from understudy.teacher.pool.cache import ScoreCache, question_digest
from understudy.teacher.pool.canary import KEY as FIXED_TOKENS
from understudy.teacher.pool.keeper import Connect
from understudy.teacher.pool.launch import Endpoint
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.rollouts import FarRow, RowWorkers
from understudy.trainers.remote_rows.worker_scores import IDS, scores_of
from understudy.trainers.row_columns import CANDIDATES
from understudy.types.batch import BatchMeta
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds


@dataclass(frozen=True, slots=True)
class FarScoreItem(ScoreItem):
    """A row to be scored, by key. Its arrays have the right lengths and hold zeros."""

    maker: int | None = None
    mark: str = ""
    digest: bytes = b""
    """The digest of the row's real arrays; empty if unknown."""
    use: wire.Use = wire.Use.VERDICT
    others: tuple[FarScores, ...] = ()
    """The partial scores of other teachers, whose candidates are the ids to score."""

    @staticmethod
    def of(row: FarRow, signal: Signal, k: int) -> FarScoreItem:
        def blank(*shape: int) -> np.ndarray:
            return np.broadcast_to(np.int32(0), shape)

        ids = blank(row.loss, row.candidates) if signal is Signal.AT_IDS else None
        return FarScoreItem(
            row.key,
            blank(row.tokens),
            blank(row.loss),
            signal,
            k,
            ids,
            maker=row.maker,
            mark=row.mark,
            digest=row.digest,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """A reference to scores in a worker's cache."""

    life: int
    name: str
    size: int
    """Bytes of the worker's memory."""


@dataclass(frozen=True, slots=True)
class FarScores(TeacherScores):
    """Scores by location: a worker stored them in the run directory, final scores in the queue too."""

    written: Written = field(default_factory=lambda: Written({}))
    ticket: Any = None
    """Held until the ledger has recorded the scores."""
    memory: Memory | None = None
    ids_digest: bytes = b""
    """The digest of partial scores' candidate ids."""


class FarScoring:
    """Passes requests of the teachers' pools to the workers, on the trainer's event loop.

    The pools are built before the workers start, so `open` adds the workers later.
    """

    def __init__(self) -> None:
        self._workers: RowWorkers | None = None
        self._asked: Counter[str] = Counter()
        """Requests under way, per row key."""
        self.rows_judged_here = 0
        """Rows that were scored by the trainer's process because no worker could."""

    def open(self, workers: RowWorkers) -> None:
        self._workers = workers

    def connect(
        self,
        connect: Connect,
        external: wire.External | None = None,
        remember_bytes: int = 0,
        usable: UsableIds | None = None,
    ) -> Connect:
        """Wraps `connect`: the clients ask a replica through a worker, or directly where no worker can.

        Each worker caches up to `remember_bytes` of the teacher's scores."""

        def both(teacher: str, replica: str, endpoint: Endpoint) -> ScoringClient:
            direct = connect(teacher, replica, endpoint)
            door = wire.Door(teacher, replica, endpoint.url, endpoint.token, external, usable)
            # Our own replicas report an address that other machines reach. An external server may be on the
            # loopback.
            reachable = None if external and is_loopback(endpoint.url) else door
            return FarClient(self, direct, reachable, remember_bytes)

        return both

    async def ask(
        self, door: wire.Door, items: Sequence[ScoreItem], timeout: float | None, remember_bytes: int = 0
    ) -> list[TeacherScores] | None:
        """Scores by way of a worker; None if no worker can."""
        order = wire.ScoreOrder(door, [_order(item) for item in items], timeout, remember_bytes)
        rows = [item for item in items if isinstance(item, FarScoreItem)]
        self._asked.update(item.key for item in rows)
        try:
            return await self._errand(wire.SCORE, wire.encode(order), items, self._preferred(rows))
        finally:
            self._asked.subtract(item.key for item in rows)
            for item in rows:
                if not self._asked[item.key]:
                    del self._asked[item.key]

    def _preferred(self, rows: Sequence[FarScoreItem]) -> int | None:
        """The worker that holds most of these rows in memory.

        None (any worker) if a request for them is under way already: that worker may be the slow part."""
        if any(self._asked[item.key] > 1 for item in rows):
            return None
        makers = Counter(item.maker for item in rows if item.maker is not None)
        return makers.most_common(1)[0][0] if makers else None

    async def recall(
        self, teacher: str, memories: Sequence[Memory], items: Sequence[FarScoreItem]
    ) -> list[TeacherScores] | None:
        """Stores one worker's cached scores as the scores of these rows; None if an entry was evicted."""
        named = [
            wire.RecallItem(item.key, memory.name, item.use)
            for memory, item in zip(memories, items, strict=True)
        ]
        order = wire.encode(wire.RecallOrder(teacher, named))
        return await self._errand(wire.RECALL, order, items, memories[0].life)

    async def mix(self, item: FarScoreItem, opinions: Sequence[wire.OpinionAt]) -> TeacherScores | None:
        """Final scores that a worker mixes from several teachers' partial scores; None if no worker can."""
        order = wire.encode(wire.MixOrder(item.key, str(item.signal), item.k, list(opinions)))
        found = await self._errand(wire.MIX, order, [item], item.maker)
        return None if found is None else found[0]

    async def _errand(
        self, name: str, order: bytes, items: Sequence[ScoreItem], prefer: int | None
    ) -> list[TeacherScores] | None:
        workers = self._workers
        if workers is None or workers.plane.shelf.lost is not None:
            return None
        try:
            told = await workers.workers.errand(name, order, prefer)
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
                memory=Memory(told.life, verdict.memory, verdict.size) if verdict.memory else None,
                ids_digest=verdict.ids_digest,
            )
            for item, verdict in zip(items, answer.verdicts, strict=True)
        ]

    async def brought(self, scores: TeacherScores) -> TeacherScores:
        """The scores with their arrays, read by this process from the run directory."""
        if not isinstance(scores, FarScores):
            return scores
        assert self._workers is not None
        cells = await self._workers.plane.cells(scores.written)
        return scores_of(scores.key, scores.teacher, scores.signal, cells)

    async def near(self, items: Sequence[ScoreItem]) -> list[ScoreItem]:
        """The items with their tokens, read by this process."""
        assert self._workers is not None
        far = [item for item in items if isinstance(item, FarScoreItem)]
        names = ["tokens", "loss_mask"]
        if any(item.signal is Signal.AT_IDS and not item.others for item in far):
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
                own = ids[0] if ids and item.signal is Signal.AT_IDS else None
                if item.others:
                    theirs = [(await self.brought(one)).ids for one in item.others]
                    own = np.concatenate([one for one in theirs if one is not None], axis=1)
                item = ScoreItem(item.key, tokens, positions, item.signal, item.k, own)
            found.append(item)
        return found


class FarClient:
    """A `ScoringClient` of one replica. Remote rows are scored through a worker, everything else directly."""

    def __init__(
        self, scoring: FarScoring, near: ScoringClient, door: wire.Door | None, remember_bytes: int = 0
    ) -> None:
        self._scoring = scoring
        self._near = near
        self._door = door
        self._remember_bytes = remember_bytes

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        if not any(isinstance(item, FarScoreItem) for item in items):
            return await self._near.score(items, timeout)
        # Only the fixed tokens may be sent inline beside remote rows: an inline answer carries no candidates.
        by_name = all(isinstance(item, FarScoreItem) or item.key == FIXED_TOKENS for item in items)
        if self._door is not None and by_name:
            found = await self._scoring.ask(self._door, items, timeout, self._remember_bytes)
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
    if not isinstance(item, FarScoreItem):
        return wire.inline(item)
    places = [one.written.cells[IDS] for one in item.others]
    return wire.OrderItem(
        item.key,
        str(item.signal),
        item.k,
        mark=item.mark,
        use=item.use,
        ids_at=[place for place in places if isinstance(place, SpillRef)],
    )


def is_loopback(url: str) -> bool:
    """Whether a URL names the loopback, which every machine resolves to itself."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_NO_KEY = b""
"""The key of a request with a row of unknown digest: it is sent and not cached."""


class FarScoreCache:
    """A `PoolCache` (LRU) of references to scores that workers cache. `max_bytes` bounds the scores they
    refer to."""

    def __init__(self, scoring: FarScoring, teacher: str, max_bytes: int) -> None:
        self.hits = 0
        self._scoring = scoring
        self._teacher = teacher
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._memories: OrderedDict[bytes, list[Memory]] = OrderedDict()
        self._here = ScoreCache(max_bytes)
        """Scores of requests that no worker could carry out."""

    def parts(self, manifest: Manifest, items: Sequence[ScoreItem]) -> list[tuple[bytes, list[int]]]:
        own = [
            question_digest(manifest, item, item.digest)
            if isinstance(item, FarScoreItem) and item.digest
            else _NO_KEY
            for item in items
        ]
        if manifest.batching is Batching.BY_REQUEST:
            whole = hashlib.sha256(b"".join(own)).digest() if all(own) else _NO_KEY
            return [(whole, list(range(len(items))))]
        return [(digest, [i]) for i, digest in enumerate(own)]

    async def find(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None:
        memories = self._memories.get(key)
        if memories is None:
            found = self._here.get(key, items)
        else:
            self._memories.move_to_end(key)
            rows = [item for item in items if isinstance(item, FarScoreItem)]
            found = await self._scoring.recall(self._teacher, memories, rows)
            if found is None and self._memories.get(key) is memories:
                self._forget(key)
        self.hits += len(found or ())
        return found

    def put(self, key: bytes, scores: Sequence[TeacherScores]) -> None:
        if key == _NO_KEY or key in self._memories:
            return
        memories = [one.memory for one in scores if isinstance(one, FarScores) and one.memory is not None]
        if not any(isinstance(one, FarScores) for one in scores):
            self._here.put(key, scores)
        elif len(memories) == len(scores):
            self._memories[key] = memories
            self._held_bytes += _size(memories)
            while self._held_bytes > self._max_bytes and self._memories:
                self._forget(next(iter(self._memories)))

    def _forget(self, key: bytes) -> None:
        self._held_bytes -= _size(self._memories.pop(key))


def _size(memories: Sequence[Memory]) -> int:
    return sum(memory.size for memory in memories)
