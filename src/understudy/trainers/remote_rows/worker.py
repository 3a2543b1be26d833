"""An agent-loop worker on another machine that writes its rows and sends them to teachers itself.

| on              | the worker                                                               | and answers |
|-----------------|--------------------------------------------------------------------------|-------------|
| end of the loop | runs the reward, writes columns to run directory and queue               | RowReport   |
| ScoreOrder      | sends tokens (in memory or from the queue) to the replica, writes scores | ScoreAnswer |

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
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.engines.base import Sampling
from understudy.errors import RowsUnreachable, TeacherError
from understudy.media.store import MediaStore
from understudy.observability.faults import point
from understudy.rollout.agents.agent import check_ids, check_kinds, check_streams
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.workers import process as worker
from understudy.rollout.workers.messages import Setup
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.native import ScoringClient, connect_native
from understudy.trainers.produce.failures import as_timeout, reason_of
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.row_columns import CANDIDATES, MEDIA, rollout_columns, score_columns, storable
from understudy.types.prompt import Prompt
from understudy.types.scores import ScoreItem, Signal
from understudy.types.trajectory import Trajectory

_UNSCORED_BYTES = 256 * 2**20
"""Memory for the token ids of rows that were not scored yet. Rows beyond it are read from the queue."""


class RemoteRowHandler:
    """Writes rows and has them scored, for one worker process.

    State: the connection to the queue, rows not scored yet, clients of replicas.
    `rollout/workers/process.py` calls it on the worker's event loop.
    """

    def __init__(self, setup: Setup, renderer: Renderer) -> None:
        settings = wire.decode_settings(setup.extra)
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.writer")
        location = json.loads(settings.queue)
        self._writer = queue.RowWriter(
            Path(settings.folder),
            queue.QueueAddress.load(location["queue"]),
            prefix=location["prefix"],
            timeout_s=settings.timeout_s,
            disk_bytes=math.inf if settings.disk_bytes is None else settings.disk_bytes,
        )
        self._partition = settings.partition
        self._rewards = Rewards([load_reward(settings.reward)] if settings.reward else [], renderer)
        self._deadline_seconds = settings.deadline_seconds
        self._context = renderer.context
        self._media = renderer.pictures.store if renderer.pictures is not None else None
        self._unscored = _UnscoredRows()
        self._clients: dict[tuple[str, str], tuple[wire.ReplicaAddress, ScoringClient]] = {}

    @property
    def work(self) -> Mapping[str, Callable[[bytes, int | None], Awaitable[bytes]]]:
        return {wire.SCORE: self.score}

    async def store(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], segment: int, sampling: Sampling
    ) -> bytes:
        rewarded, seconds, failed = {}, {}, {}
        for one in trajectories:
            began = time.perf_counter()
            try:
                check_kinds(one)
                check_streams(one, self._context)
                check_ids(one, sampling)
                rewarded[one.key] = await self._reward(prompt, one)
            except Exception as error:
                failed[one.key] = reason_of(error)
            seconds[one.key] = {**one.extra.get("seconds", {}), "reward": time.perf_counter() - began}
        columns = {key: rollout_columns(one) for key, one in rewarded.items()}
        written = await self._writer.write(self._partition, columns, segment) if columns else {}
        point("row_worker.written")
        for key, one in rewarded.items():
            self._unscored.put(one, written[key].mark)
        return wire.encode(
            [
                wire.RowReport(
                    one.key, 0, 0, 0, 0, None, seconds[one.key], WrittenRow({}), failed=failed[one.key]
                )
                if one.key in failed
                else self._report(rewarded[one.key], seconds[one.key], written[one.key])
                for one in trajectories
            ]
        )

    def _report(self, one: Trajectory, seconds: dict[str, float], written: WrittenRow) -> wire.RowReport:
        return wire.RowReport(
            one.key, one.length, one.loss_length, one.first, one.candidates, one.reward, seconds, written
        )

    async def _reward(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        clock = asyncio.timeout(self._deadline_seconds)
        try:
            async with clock:
                return storable(await self._rewards.score(prompt, trajectory))
        except Exception as error:
            what = f"reward {self._rewards.names} timed out: {trajectory.key}"
            raise as_timeout(error, clock, what, self._deadline_seconds) from error

    async def score(self, body: bytes, segment: int | None) -> bytes:
        order = wire.decode_order(body)
        assert segment is not None
        try:
            items = await self._items(order.items)
            found = await (await self._client(order.address)).score(items, order.seconds)
        except RowsUnreachable as error:
            return wire.encode(wire.ScoreAnswer([], wire.ROWS, str(error)))
        except TeacherError as error:
            return wire.encode(wire.failed(error))
        scores = [await one.fetch() for one in found]
        rows = {
            one.key: score_columns(one)
            for item, one in zip(order.items, scores, strict=True)
            if item.inline is None
        }
        written = await self._writer.write(self._partition, rows, segment) if rows else {}
        point("row_worker.scored")
        for key in rows:
            self._unscored.drop(key)
        item_scores = [
            wire.ItemScores(one.key, one.teacher, written[one.key], version=one.version)
            if item.inline is None
            else wire.inline_answer(one)
            for item, one in zip(order.items, scores, strict=True)
        ]
        return wire.encode(wire.ScoreAnswer(item_scores))

    async def _items(self, wanted: Sequence[wire.OrderItem]) -> list[ScoreItem]:
        """The items with their tokens, in the order of `wanted`."""
        found = {item.key: item.inline for item in wanted if item.inline is not None}
        rows = [item for item in wanted if item.inline is None]
        away = []
        for item in rows:
            streams = self._unscored.get(item.key, item.mark)
            if streams is None:
                away.append(item)
            else:
                found[item.key] = _score_item(item, *streams)
        if away:
            names = ["tokens", "loss_mask"]
            if any(item.signal == Signal.AT_IDS for item in away):
                names.append(CANDIDATES)
            if self._media is not None:
                names.append(MEDIA)
            marks = dict.fromkeys(names, tuple(item.mark for item in away))
            columns = await self._writer.read(self._partition, [item.key for item in away], names, marks)
            for index, item in enumerate(away):
                row = {name: columns[name][index] for name in names}
                ids = np.asarray(row[CANDIDATES]) if CANDIDATES in row else None
                tokens, mask = np.asarray(row["tokens"]), np.asarray(row["loss_mask"])
                found[item.key] = _score_item(item, tokens, mask, ids, tuple(row.get(MEDIA, ())))
        return [wire.as_ordered(found[item.key], item) for item in wanted]

    async def _client(self, address: wire.ReplicaAddress) -> ScoringClient:
        """The client of a replica. It is replaced if the replica's address changed after a restart."""
        place = (address.teacher, address.replica)
        known = self._clients.get(place)
        if known is not None and known[0] == address:
            return known[1]
        client = client_of(address, self._media)
        self._clients[place] = (address, client)
        if known is not None:
            await known[1].close()
        return client

    async def close(self) -> None:
        for _, client in self._clients.values():
            await client.close()
        await self._rewards.close()
        self._writer.close()


def client_of(address: wire.ReplicaAddress, media: MediaStore | None = None) -> ScoringClient:
    """`media`: the run's pictures, if the student reads pictures."""
    endpoint = Endpoint(address.url, address.token)
    if address.external is None:
        return connect_native(address.teacher, address.replica, endpoint, address.usable, media)
    connect = address.external.connect(address.usable, media)
    return connect(address.teacher, address.replica, endpoint)


def _score_item(
    item: wire.OrderItem,
    tokens: np.ndarray,
    mask: np.ndarray,
    candidates: np.ndarray | None,
    media: tuple[str, ...],
) -> ScoreItem:
    positions = np.flatnonzero(mask).astype(np.int32)
    ids = candidates if item.signal is Signal.AT_IDS else None
    return ScoreItem(item.key, tokens, positions, item.signal, item.k, ids, media)


_Streams = tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[str, ...]]
"""Tokens, loss mask, candidates and pictures of a row."""


class _UnscoredRows:
    """Rows that this worker wrote and that have no scores yet. The oldest are dropped beyond
    `_UNSCORED_BYTES`."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, _Streams] = OrderedDict()
        self._marks: dict[str, str] = {}
        self._bytes = 0

    def put(self, one: Trajectory, mark: str) -> None:
        self.drop(one.key)
        self._rows[one.key] = (one.tokens, one.loss_mask, one.candidate_ids, one.media or ())
        self._marks[one.key] = mark
        self._bytes += _size(self._rows[one.key])
        while self._bytes > _UNSCORED_BYTES and len(self._rows) > 1:
            self.drop(next(iter(self._rows)))

    def get(self, key: str, mark: str) -> _Streams | None:
        """The row if it was written under this mark. Another worker may have made it again since, with other
        tokens."""
        return self._rows.get(key) if self._marks.get(key) == mark else None

    def drop(self, key: str) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            del self._marks[key]
            self._bytes -= _size(row)


def _size(row: _Streams) -> int:
    tokens, mask, candidates, media = row
    return sum(part.nbytes for part in (tokens, mask, candidates) if part is not None) + 64 * len(media)


if __name__ == "__main__":
    sys.exit(worker.main(RemoteRowHandler))
