"""Teacher scoring of remote rows: a worker sends the request to the replica and stores the scores.

    pool: replica, deadline, retry ────────ScoreOrder──────> worker ──tokens──> replica
    ledger <──location── pool: fixed tokens <──ScoreAnswer── worker <──scores──────┘

The pool sees a replica through the usual protocol (`ScoringClient`). Deadlines, retries, ejections, hedged
requests for stragglers and the fixed tokens of the canary stay in the pool. Requests are composed as without
workers, so under `determinism = "full"` the scores are bit-identical. If two workers answer one request, the
pool keeps one answer and the ledger stores that answer's location; the other worker's scores lie under
another write id.

The trainer's process fetches rows and asks the replica itself where no worker can:

- the queue is lost, no worker is alive, or an external server's address is this machine's loopback;
- the request has a row whose arrays are in the trainer's process already. Those are rows of a mixture, whose
  scores are mixed there, and rows of a teacher with a cache, which is kept there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from understudy.errors import ClusterError
from understudy.rollout.workers.pool import LoopWorkers, WorkersLost
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.discover import ExternalServer
from understudy.teacher.clients.native import Connect, ScoringClient
from understudy.teacher.manifest import Manifest
from understudy.teacher.scoring.probe import CANARY_KEY
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.references import RemotePlane, RemoteScores
from understudy.types.references import ScoreRef, ScoresRef
from understudy.types.usable_ids import UsableIds


class RemoteScoring:
    """Passes requests of the teachers' pools to the workers, on the trainer's event loop.

    The pools are built before the workers start, so `open` adds the workers later.
    """

    def __init__(self) -> None:
        self._workers: LoopWorkers | None = None
        self._rows: RemotePlane | None = None
        self._asked: Counter[str] = Counter()
        """Requests under way, per row key."""

    def open(self, workers: LoopWorkers, rows: RemotePlane) -> None:
        self._workers, self._rows = workers, rows

    def connect(
        self, connect: Connect, external: ExternalServer | None = None, usable: UsableIds | None = None
    ) -> Connect:
        """Wraps `connect`: the clients ask a replica through a worker, or directly where no worker can."""

        def both(teacher: str, replica: str, endpoint: Endpoint) -> ScoringClient:
            direct = connect(teacher, replica, endpoint)
            address = wire.ReplicaAddress(teacher, replica, endpoint.url, endpoint.token, external, usable)
            # Our own replicas report an address that other machines reach. An external server may be on the
            # loopback, and a vLLM server on this machine answers on a Unix socket.
            here = endpoint.socket is not None or (external is not None and endpoint.on_loopback)
            reachable = None if here else address
            return RemoteClient(self, direct, reachable)

        return both

    async def ask(
        self, address: wire.ReplicaAddress, items: Sequence[ScoreRef], timeout: float | None
    ) -> list[ScoresRef] | None:
        """Scores by way of a worker; None if no worker can."""
        workers, rows = self._workers, self._rows
        if workers is None or rows is None or rows.lost:
            return None
        order = wire.encode(wire.ScoreOrder(address, [_order(item) for item in items], timeout))
        keys = [item.key for item in items if item.place is not None]
        self._asked.update(keys)
        try:
            reply = await workers.request_work(wire.SCORE, order, self._preferred(items))
        except (WorkersLost, ClusterError):
            return None
        finally:
            self._asked.subtract(keys)
            for key in keys:
                if not self._asked[key]:
                    del self._asked[key]
        answer = wire.decode_answer(reply.body)
        if answer.trouble == wire.ROWS:
            return None
        if answer.trouble is not None:
            raise wire.as_error(answer)
        found: list[ScoresRef] = []
        for item, one in zip(items, answer.scores, strict=True):
            if one.written is not None:
                found.append(
                    RemoteScores(
                        one.key,
                        one.teacher,
                        item.signal,
                        one.written,
                        reply.segment,
                        rows,
                        version=one.version,
                    )
                )
            else:
                assert one.scores is not None
                found.append(one.scores)
        return found

    def _preferred(self, items: Sequence[ScoreRef]) -> int | None:
        """The worker that holds most of these rows in memory.

        None (any worker) if a request for them is under way already: that worker may be the slow part."""
        if any(self._asked[item.key] > 1 for item in items):
            return None
        places = [item.place for item in items if item.place is not None]
        makers = Counter(place.maker for place in places if place.maker is not None)
        return makers.most_common(1)[0][0] if makers else None


class RemoteClient:
    """A `ScoringClient` of one replica. Remote rows are scored through a worker, everything else directly."""

    def __init__(
        self, scoring: RemoteScoring, direct: ScoringClient, address: wire.ReplicaAddress | None
    ) -> None:
        self._scoring = scoring
        self._direct = direct
        self._address = address

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> Sequence[ScoresRef]:
        remote = sum(item.place is not None for item in items)
        # Only the fixed tokens may be sent inline beside remote rows: an inline answer carries no candidates.
        inline = sum(item.key == CANARY_KEY for item in items)
        if remote and remote + inline == len(items) and self._address is not None:
            found = await self._scoring.ask(self._address, items, timeout)
            if found is not None:
                return found
        return await self._direct.score(items, timeout)

    async def manifest(self) -> Manifest:
        return await self._direct.manifest()

    async def health(self) -> bool:
        return await self._direct.health()

    async def close(self) -> None:
        await self._direct.close()


def _order(item: ScoreRef) -> wire.OrderItem:
    if item.here is not None:
        return wire.OrderItem(item.key, item.signal, item.k, item.here)
    mark = "" if item.place is None else item.place.mark
    return wire.OrderItem(item.key, item.signal, item.k, mark=mark, prompt=item.own_prompt)
