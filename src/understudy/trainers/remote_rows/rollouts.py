"""Rollouts by workers on other machines that write their rows themselves.

    trainer ──Begin──> worker: loop, reward, columns into run directory and queue ──RowReport──> trainer: ledger

The trainer's process gets a row's key, sizes and reward. Generations pass through it, as those of any
worker do (docs/decisions/0021-tokens-through-the-trainer.md); rewards, columns and teachers' scores do not.

Each row is recorded exactly once: it counts from the moment `adopt` takes it. If a worker dies before that,
another worker makes the row again. What the dead worker wrote, or writes late, has its own write id in the
queue (`dataplane/transfer_queue/write_ids.py`), which is cleared with the row, and its own segment in the run
directory, to which nothing refers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.config import DataPlaneConfig
from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import DataPlaneError, LeaseLost
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.rollout.timing import BatchTimings
from understudy.rollout.workers.pool import LoopWorkers
from understudy.trainers.produce.failures import SampleFailed, as_timeout
from understudy.trainers.produce.rollouts import FailedOutput, RolledOut, Session
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.batches import address_of
from understudy.trainers.remote_rows.references import RemotePlane, RemoteRow
from understudy.trainers.row_columns import CANDIDATES, MEDIA, SIZES
from understudy.types.batch import BatchMeta
from understudy.types.references import RowPlace

MODULE = "understudy.trainers.remote_rows.worker"


def settings_of(
    dataplane: DataPlaneConfig, reward: str | None, deadline: float, run: RunDir, plane: Any, partition: str
) -> bytes:
    """The encoded `RowSettings` that every such worker gets."""
    return wire.encode(
        wire.RowSettings(
            str(run.dataplane.absolute()),
            address_of(plane),
            partition,
            dataplane.queue_timeout_seconds,
            dataplane.spill_bytes,
            reward,
            deadline,
        )
    )


@dataclass(slots=True)
class RemoteRollouts:
    """`Rollouts` by workers that run the rewards, write the rows and report where they lie."""

    workers: LoopWorkers
    rows: RemotePlane
    spans: Spans
    timings: BatchTimings
    with_candidates: bool = False
    """Whether rows have the student's candidate ids."""

    async def run(self, session: Session) -> RolledOut:
        """The worker gives each reward `rollout.deadline_seconds`. The clock here is for a worker that does
        not answer."""
        clock, limit, what = session.clock, session.limit, "agent loop"

        def loop_returned(outputs: int) -> None:
            nonlocal what
            what = "reward"
            clock.reschedule(asyncio.get_running_loop().time() + limit * (outputs + 1))

        try:
            async with clock:
                with self.spans.span("rollout", key=session.key):
                    context = replace(session.context, loop_returned=loop_returned)
                    answer = await self.workers.run_and_store(session.prompt, context)
                    reports = wire.decode_reports(answer.body)
                    await self._adopt(reports, session)
        except Exception as error:
            raise as_timeout(error, clock, f"{what} timed out: {session.key}", limit) from error
        return RolledOut([self._output(row, answer.life) for row in reports])

    def _output(self, row: wire.RowReport, maker: int) -> RemoteRow | FailedOutput:
        self.timings.add(row.key, row.seconds)
        if row.failed:
            return FailedOutput(row.key, SampleFailed(row.failed))
        self.timings.lengths(row.key, row.tokens, row.loss)
        place = RowPlace(maker, row.written.mark)
        return RemoteRow(
            row.key, row.tokens, row.loss, row.first, row.candidates, place, self.rows, row.written
        )

    async def _adopt(self, reports: list[wire.RowReport], session: Session) -> None:
        """Puts all outputs of a session into the ledger at once.

        If some are settled already (their group was filtered out meanwhile), only those still in flight are
        taken. They are taken without their copies in the queue, which the refused attempt cleared."""
        rows = {row.key: row.written for row in reports}
        tags = {row.key: dict(session.tags_of(row.reward, row.failed)) for row in reports}
        plane, partition = self.rows.plane, self.rows.partition
        try:
            await plane.adopt(partition, rows, tags)
        except LeaseLost:
            held = await plane.list(partition)
            left = {key: WrittenRow(one.cells) for key, one in rows.items() if key in held}
            with suppress(LeaseLost):
                if left:
                    await plane.adopt(partition, left, {key: tags[key] for key in left})

    async def stored(self, key: str) -> RemoteRow:
        """The columns that scoring needs are put into the queue."""
        plane, meta = self.rows.plane, BatchMeta(self.rows.partition, (key,))
        sizes = (await plane.get(meta, (SIZES,)))[SIZES][0]
        own, width = ["tokens", "loss_mask"], 0
        if self.with_candidates:
            own.append(CANDIDATES)
            width = (await plane.get(meta, (CANDIDATES,)))[CANDIDATES].values.shape[1]
        if self.rows.pictures:
            own.append(MEDIA)
        mark = ""
        with suppress(DataPlaneError):  # the queue is lost: the row is scored from the run directory
            there = await plane.hand_over(meta, own)
            mark = there.marks.get("tokens", ("",))[0]
        mask = np.asarray((await plane.get(meta, ("loss_mask",)))["loss_mask"][0])
        first = int(mask.argmax()) if mask.any() else len(mask)
        return RemoteRow(key, sizes["tokens"], sizes["loss"], first, width, RowPlace(mark=mark), self.rows)

    def metrics(self) -> dict[str, float]:
        traffic, uploads = self.workers.traffic, self.rows.plane.uploads
        return {
            "perf/workers/bytes_sent": float(traffic.sent),
            "perf/workers/bytes_received": float(traffic.received),
            "perf/workers/bytes_of_generation": float(traffic.generation),
            "perf/workers/rows_judged_here": float(self.rows.rows_fetched),
            "perf/queue/bytes_put": float(uploads.bytes_put),
            "perf/queue/bytes_got": float(uploads.bytes_got),
        }
