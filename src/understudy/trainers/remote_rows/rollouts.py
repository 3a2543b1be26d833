"""Rows that workers on other machines write themselves: the trainer's process learns their names, sizes and rewards.

    run ──Begin──> worker: loop, reward, columns into run directory and queue ──KeptRow──> ledger and journal (here)

Where engines are processes of their own, or servers, generations do not pass here either: a worker is told which of them it may bring its
tokens to, and together with whom they are written (docs/decisions/0016-tokens-past-the-trainer.md, 0017-tokens-to-servers.md).

Exactly once as ever: a row counts from the moment `adopt` took it, and a worker that died before is replaced by another that makes
the row again. What the dead one left, or writes late, is in the queue under a name of its own (`dataplane/transfer_queue/write_ids.py`) that is
cleared with its row, and in the run directory in a segment of its own that nobody refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from understudy.config import Recipe
from understudy.dataplane.transfer_queue.segments import Written
from understudy.engines.base import Engine
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.vllm import HostLauncher
from understudy.errors import DataPlaneError, LeaseLost
from understudy.observability.rundir import RunDir
from understudy.rollout.agents.agent import LoopContext
from understudy.serving.bind import is_loopback
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.batches import address_of
from understudy.trainers.row_columns import CANDIDATES, SIZES
from understudy.types.batch import BatchMeta
from understudy.types.prompt import Prompt

if TYPE_CHECKING:
    from understudy.rollout.workers.pool import LoopWorkers

TagsOf = Callable[[str, float | None, str], Mapping[str, Any]]
"""(key, reward, why it failed or "") → the tags of an output."""
FIRST_WORKER = "rollout-worker-0"
MODULE = "understudy.trainers.remote_rows.worker"


def writes_rows(recipe: Recipe, processes: HostLauncher) -> bool:
    """Whether this run's workers write rows themselves: they are on other machines, and so is the queue."""
    return (
        recipe.dataplane.backend == "transfer_queue"
        and recipe.rollout.workers > 0
        and processes.is_elsewhere(FIRST_WORKER)
    )


def brings_tokens(recipe: Recipe, engine: Engine) -> bool:
    """Whether such workers speak to the engine themselves. A trainer that lends its device may write any row by itself, and a
    server that is named by this machine's loopback is this machine's alone."""
    if recipe.trainer.lend_after is not None:
        return False
    near = any(is_loopback(urlsplit(url).hostname or "") for url in recipe.rollout.urls)
    return isinstance(engine, HostedEngine) or (isinstance(engine, RemoteEngine) and not near)


def brings_tokens_to_servers(recipe: Recipe, processes: HostLauncher) -> bool:
    """Whether servers that the run starts are to be reached by workers elsewhere."""
    return writes_rows(recipe, processes) and recipe.trainer.lend_after is None


def settings_of(recipe: Recipe, run: RunDir, plane: Any, partition: str) -> bytes:
    """What each such worker needs."""
    return wire.encode(
        wire.RowSettings(
            str(run.dataplane.absolute()),
            address_of(plane),
            partition,
            recipe.dataplane.queue_timeout_seconds,
            recipe.dataplane.spill_bytes,
            recipe.data.reward,
            recipe.rollout.deadline_seconds,
            any(teacher.cache_bytes for teacher in recipe.teachers.values()),
        )
    )


@dataclass(frozen=True, slots=True)
class FarRow:
    """A row of the ledger as its maker told of it."""

    key: str
    tokens: int
    loss: int
    """Loss-bearing tokens."""
    candidates: int
    maker: int | None = None
    """The life of the worker that has its tokens at hand."""
    mark: str = ""
    """Which write of it the ledger took."""
    digest: bytes = b""
    """Of what a teacher is told of it; empty where nobody knows or asks."""


class RowWorkers:
    def __init__(
        self, workers: LoopWorkers, plane: Any, partition: str, *, bring_tokens: bool = False
    ) -> None:
        self.bring_tokens = bring_tokens
        self.workers = workers
        self.plane = plane
        self.partition = partition

    async def roll_out(
        self,
        prompt: Prompt,
        context: LoopContext,
        tags_of: TagsOf,
        add_seconds: Callable[[str, Mapping[str, float]], None],
    ) -> list[FarRow | wire.KeptRow]:
        """One session, its rows in the ledger afterwards; not where its group was taken out meanwhile. Outputs that failed are
        told as they came."""
        answer = await self.workers.run_kept(prompt, context)
        rows = wire.decode_kept(answer.body)
        for row in rows:
            add_seconds(row.key, row.seconds)
        tags = {row.key: dict(tags_of(row.key, row.reward, row.failed)) for row in rows}
        await self._adopt({row.key: row.written for row in rows}, tags)
        return [
            row
            if row.failed
            else FarRow(
                row.key, row.tokens, row.loss, row.candidates, answer.life, row.written.mark, row.digest
            )
            for row in rows
        ]

    async def _adopt(self, rows: Mapping[str, Written], tags: Mapping[str, Mapping[str, Any]]) -> None:
        """All outputs of a session at once. Where some are settled already, only those that are still in flight: their copies in
        the queue were cleared with the refusal."""
        try:
            await self.plane.adopt(self.partition, rows, tags)
        except LeaseLost:
            held = await self.plane.list(self.partition)
            left = {key: Written(one.cells) for key, one in rows.items() if key in held}
            with suppress(LeaseLost):
                if left:
                    await self.plane.adopt(self.partition, left, {key: tags[key] for key in left})

    async def stored(self, key: str, with_candidates: bool) -> FarRow:
        """A row that an earlier launch wrote and did not get judged; what judging needs of it is put into the queue."""
        meta = BatchMeta(self.partition, (key,))
        sizes = (await self.plane.get(meta, (SIZES,)))[SIZES][0]
        own = (CANDIDATES,) if with_candidates else ()
        width = 0
        if with_candidates:
            width = (await self.plane.get(meta, own))[CANDIDATES].values.shape[1]
        mark = ""
        with suppress(DataPlaneError):  # the queue is lost: the row is judged from the run directory
            there = await self.plane.hand_over(meta, ("tokens", "loss_mask", *own))
            mark = there.marks.get("tokens", ("",))[0]
        return FarRow(key, sizes["tokens"], sizes["loss"], width, mark=mark)
