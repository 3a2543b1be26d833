"""An agent-loop worker on another machine that writes its rows and sends them to teachers itself.

| on              | the worker                                                               | and answers |
|-----------------|--------------------------------------------------------------------------|-------------|
| Grant           | sends a turn's tokens to an engine process or server, keeps what it writes | Have      |
| end of the loop | runs the reward, writes columns to run directory and queue               | KeptRow     |
| ScoreOrder      | sends tokens (in memory or from the queue) to the replica, writes scores | ScoreAnswer |
| RecallOrder     | writes scores from its cache for another row (`worker_scores.py`)        | ScoreAnswer |
| MixOrder        | mixes several teachers' scores of a row and writes the result            | ScoreAnswer |

`rollout/workers/generations.py` has the messages of a generation (Grant, Have).

The trainer's process sees only a row's key, sizes, reward and the location of its columns. The teacher's pool
in the trainer's process decides which replica is asked, when, and whether a request is repeated. The worker
only carries requests out.

Started as `python -m understudy.trainers.remote_rows.worker` instead of `understudy.rollout.workers.process`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.transfer_queue.segments import Written
from understudy.engines.base import Generation, Sampling
from understudy.engines.hosted.worker_client import Deposits
from understudy.engines.remote_tokens import Grant
from understudy.engines.servers.worker_client import Leg, Visits
from understudy.errors import RowsUnreachable, TeacherError
from understudy.observability.faults import point
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.workers import process as worker
from understudy.rollout.workers.messages import Setup
from understudy.teacher.clients.discover import Backend, connect_external
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.pool.cache import content_digest
from understudy.teacher.pool.keeper import connect_native
from understudy.teacher.pool.launch import Endpoint
from understudy.trainers.produce.failures import reason_of, timed
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.worker_scores import Verdicts
from understudy.trainers.row_columns import CANDIDATES, finite, rollout_columns
from understudy.types.prompt import Prompt
from understudy.types.scores import ScoreItem, Signal
from understudy.types.trajectory import Trajectory

_AT_HAND_BYTES = 256 * 2**20
"""Memory for the token ids of rows that were not scored yet. Rows beyond it are read from the queue."""


class RowKeeper:
    """Writes, scores and mixes rows for one worker process.

    State: the connection to the queue, rows not scored yet, cached scores, clients of engines and replicas.
    `rollout/workers/process.py` calls it on the worker's event loop.
    """

    def __init__(self, setup: Setup, renderer: Renderer) -> None:
        settings = wire.decode_settings(setup.extra)
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.writer")
        told = json.loads(settings.queue)
        self._writer = queue.RowWriter(
            Path(settings.folder),
            queue.QueueAddress.load(told["queue"]),
            prefix=told["prefix"],
            patience=settings.patience,
            disk_bytes=math.inf if settings.disk_bytes is None else settings.disk_bytes,
        )
        self._partition = settings.partition
        self._rewards = Rewards([load_reward(settings.reward)] if settings.reward else [], renderer)
        self._deadline_seconds = settings.deadline_seconds
        self._digests = settings.digests
        self._verdicts = Verdicts(self._writer, settings.partition, digests=settings.digests)
        self._at_hand = _AtHand()
        self._deposits, self._visits = Deposits(), Visits()
        self._clients: dict[tuple[str, str], tuple[wire.Door, ScoringClient]] = {}

    @property
    def errands(self) -> Mapping[str, Callable[[bytes, int | None], Awaitable[bytes]]]:
        return {wire.SCORE: self.score, wire.RECALL: self.recall, wire.MIX: self.mix}

    async def bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling, leg: Leg) -> Generation:
        point("row_worker.bringing")
        if grant.server is None:
            written = await self._deposits.bring(grant, tokens, sampling)
        else:
            written = await self._visits.bring(grant, tokens, sampling, leg)
        point("row_worker.brought")
        return written

    async def keep(self, prompt: Prompt, trajectories: Sequence[Trajectory], ticket: int) -> bytes:
        judged, seconds, failed = {}, {}, {}
        for one in trajectories:
            began = time.perf_counter()
            try:
                judged[one.key] = await self._judge(prompt, one)
            except Exception as error:
                failed[one.key] = reason_of(error)
            seconds[one.key] = {**one.extra.get("seconds", {}), "reward": time.perf_counter() - began}
        columns = {key: rollout_columns(one) for key, one in judged.items()}
        written = await self._writer.write(self._partition, columns, ticket) if columns else {}
        point("row_worker.written")
        for key, one in judged.items():
            self._at_hand.put(one, written[key].mark)
        return wire.encode(
            [
                wire.KeptRow(one.key, 0, 0, 0, None, seconds[one.key], Written({}), failed=failed[one.key])
                if one.key in failed
                else self._kept(judged[one.key], seconds[one.key], written[one.key])
                for one in trajectories
            ]
        )

    def _kept(self, one: Trajectory, seconds: dict[str, float], written: Written) -> wire.KeptRow:
        ids = one.candidate_ids
        return wire.KeptRow(
            one.key,
            len(one.tokens),
            int(one.loss_mask.sum()),
            0 if ids is None else ids.shape[1],
            one.reward,
            seconds,
            written,
            content_digest(one.tokens, one.positions, ids) if self._digests else b"",
        )

    async def _judge(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        clock = asyncio.timeout(self._deadline_seconds)
        try:
            async with clock:
                return finite(await self._rewards.judge(prompt, trajectory))
        except Exception as error:
            what = f"reward timed out: {trajectory.key}"
            raise timed(error, clock, what, self._deadline_seconds) from error

    async def score(self, body: bytes, ticket: int | None) -> bytes:
        order = wire.decode_order(body)
        assert ticket is not None
        try:
            items = await self._items(order.items)
            scores = await (await self._client(order.door)).score(items, order.seconds)
        except RowsUnreachable as error:
            return wire.encode(wire.ScoreAnswer([], wire.ROWS, str(error)))
        except TeacherError as error:
            return wire.encode(wire.ScoreAnswer([], wire.trouble_of(error), str(error)))
        verdicts = await self._verdicts.keep(order, scores, ticket)
        point("row_worker.judged")
        for item in order.items:
            if item.use is wire.Use.VERDICT:
                self._at_hand.drop(item.key)
        return wire.encode(wire.ScoreAnswer(verdicts))

    async def recall(self, body: bytes, ticket: int | None) -> bytes:
        order = wire.decode_recall(body)
        assert ticket is not None
        return await _answered(self._verdicts.recall(order, ticket))

    async def mix(self, body: bytes, ticket: int | None) -> bytes:
        order = wire.decode_mix(body)
        assert ticket is not None
        answer = await _answered(self._verdicts.mix(order, ticket))
        point("row_worker.mixed")
        self._at_hand.drop(order.key)
        return answer

    async def _items(self, wanted: Sequence[wire.OrderItem]) -> list[ScoreItem]:
        """The items with their tokens, in the order of `wanted`."""
        found = {item.key: wire.from_inline(item, item.inline) for item in wanted if item.inline is not None}
        rows = [item for item in wanted if item.inline is None]
        others = {item.key: await self._verdicts.ids(item.ids_at) for item in rows if item.ids_at}
        away = []
        for item in rows:
            streams = self._at_hand.get(item.key, item.mark)
            if streams is None:
                away.append(item)
            else:
                found[item.key] = _score_item(item, *streams, others.get(item.key))
        if away:
            names = ["tokens", "loss_mask"]
            if any(item.signal == Signal.AT_IDS and not item.ids_at for item in away):
                names.append(CANDIDATES)
            marks = dict.fromkeys(names, tuple(item.mark for item in away))
            columns = await self._writer.read(self._partition, [item.key for item in away], names, marks)
            for index, item in enumerate(away):
                tokens, mask, *ids = (np.asarray(columns[name][index]) for name in names)
                own = ids[0] if ids else None
                found[item.key] = _score_item(item, tokens, mask, own, others.get(item.key))
        return [found[item.key] for item in wanted]

    async def _client(self, door: wire.Door) -> ScoringClient:
        """The client of a replica. It is replaced if the replica's address changed after a restart."""
        place = (door.teacher, door.replica)
        known = self._clients.get(place)
        if known is not None and known[0] == door:
            return known[1]
        client = client_of(door)
        self._clients[place] = (door, client)
        if known is not None:
            await known[1].close()
        return client

    async def close(self) -> None:
        for _, client in self._clients.values():
            await client.close()
        await self._deposits.close()
        await self._visits.close()
        await self._rewards.close()
        self._writer.close()


def client_of(door: wire.Door) -> ScoringClient:
    endpoint = Endpoint(door.url, door.token)
    if door.external is None:
        return connect_native(door.teacher, door.replica, endpoint, door.usable)
    told = door.external
    connect = connect_external(
        told.vocab_size,
        told.vocab_fingerprint,
        told.model,
        Backend(told.backend),
        usable=door.usable,
        k=told.k,
    )
    return connect(door.teacher, door.replica, endpoint)


async def _answered(work: Coroutine[Any, Any, list[wire.Verdict]]) -> bytes:
    """The encoded answer; trouble `ROWS` if the scores needed could not be read."""
    try:
        return wire.encode(wire.ScoreAnswer(await work))
    except RowsUnreachable as error:
        return wire.encode(wire.ScoreAnswer([], wire.ROWS, str(error)))


def _score_item(
    item: wire.OrderItem,
    tokens: np.ndarray,
    mask: np.ndarray,
    own: np.ndarray | None,
    others: np.ndarray | None,
) -> ScoreItem:
    """`own` are the student's candidate ids, `others` those of other teachers. Only the signal `at_ids` uses
    either."""
    positions = np.flatnonzero(mask).astype(np.int32)
    ids = None
    if item.signal == Signal.AT_IDS:
        ids = own if others is None else others
    return ScoreItem(item.key, tokens, positions, Signal(item.signal), item.k, ids)


class _AtHand:
    """Rows that this worker wrote and that have no final scores yet. The oldest are dropped beyond
    `_AT_HAND_BYTES`."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = OrderedDict()
        self._marks: dict[str, str] = {}
        self._bytes = 0

    def put(self, one: Trajectory, mark: str) -> None:
        self.drop(one.key)
        self._rows[one.key] = (one.tokens, one.loss_mask, one.candidate_ids)
        self._marks[one.key] = mark
        self._bytes += _size(self._rows[one.key])
        while self._bytes > _AT_HAND_BYTES and len(self._rows) > 1:
            self.drop(next(iter(self._rows)))

    def get(self, key: str, mark: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """The row if it was written under this mark. Another worker may have made it again since, with other
        tokens."""
        return self._rows.get(key) if self._marks.get(key) == mark else None

    def drop(self, key: str) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            del self._marks[key]
            self._bytes -= _size(row)


def _size(row: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> int:
    return sum(part.nbytes for part in row if part is not None)


if __name__ == "__main__":
    worker.main(RowKeeper)
