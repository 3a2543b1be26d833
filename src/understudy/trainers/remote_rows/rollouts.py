"""Rollouts by workers on other machines that write their rows themselves.

    trainer ──Begin──> worker: loop, reward, columns into run directory and queue ──KeptRow──> trainer: ledger

The trainer's process gets a row's key, sizes and reward. If engines are separate processes or servers,
generations do not pass through it either: it tells a worker which engine to send its tokens to and which
batch they belong to (docs/decisions/0016-tokens-past-the-trainer.md, 0017-tokens-to-servers.md).

Each row is recorded exactly once: it counts from the moment `adopt` takes it. If a worker dies before that,
another worker makes the row again. What the dead worker wrote, or writes late, has its own write id in the
queue (`dataplane/transfer_queue/write_ids.py`), which is cleared with the row, and its own segment in the run
directory, to which nothing refers.
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
    """Whether this run's workers write rows themselves: they run on other machines and rows go through
    TransferQueue."""
    return (
        recipe.dataplane.backend == "transfer_queue"
        and recipe.rollout.workers > 0
        and processes.is_elsewhere(FIRST_WORKER)
    )


def brings_tokens(recipe: Recipe, engine: Engine) -> bool:
    """Whether such workers send tokens to the engine themselves.

    Not with `trainer.lend_after`, because then the trainer may generate any row. Not for a server on this
    machine's loopback either, because workers on other machines cannot reach it."""
    if recipe.trainer.lend_after is not None:
        return False
    near = any(is_loopback(urlsplit(url).hostname or "") for url in recipe.rollout.urls)
    return isinstance(engine, HostedEngine) or (isinstance(engine, RemoteEngine) and not near)


def brings_tokens_to_servers(recipe: Recipe, processes: HostLauncher) -> bool:
    """Whether servers that the run starts must be reachable from remote workers."""
    return writes_rows(recipe, processes) and recipe.trainer.lend_after is None


def settings_of(recipe: Recipe, run: RunDir, plane: Any, partition: str) -> bytes:
    """The encoded `RowSettings` that every such worker gets."""
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
    """A row of the ledger, as the worker that made it reported it."""

    key: str
    tokens: int
    loss: int
    """Loss-bearing tokens."""
    candidates: int
    maker: int | None = None
    """The life (one process start) of the worker that holds its tokens in memory; None if none does."""
    mark: str = ""
    """The id of the write that the ledger took."""
    digest: bytes = b""
    """The digest of what is sent to a teacher; empty if unknown or not needed."""


class RowWorkers:
    """The workers of a run and the data plane their rows go to. Used on the trainer's event loop."""

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
        """Runs one session and puts its rows into the ledger, unless their group was filtered out meanwhile.

        Failed outputs are returned as `KeptRow`."""
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
        """Puts all outputs of a session into the ledger at once.

        If some are settled already, only those still in flight are taken. They are taken without their copies
        in the queue, which the refused attempt cleared."""
        try:
            await self.plane.adopt(self.partition, rows, tags)
        except LeaseLost:
            held = await self.plane.list(self.partition)
            left = {key: Written(one.cells) for key, one in rows.items() if key in held}
            with suppress(LeaseLost):
                if left:
                    await self.plane.adopt(self.partition, left, {key: tags[key] for key in left})

    async def stored(self, key: str, with_candidates: bool) -> FarRow:
        """A row that an earlier launch wrote without scores. The columns that scoring needs are put into the
        queue."""
        meta = BatchMeta(self.partition, (key,))
        sizes = (await self.plane.get(meta, (SIZES,)))[SIZES][0]
        own = (CANDIDATES,) if with_candidates else ()
        width = 0
        if with_candidates:
            width = (await self.plane.get(meta, own))[CANDIDATES].values.shape[1]
        mark = ""
        with suppress(DataPlaneError):  # the queue is lost: the row is scored from the run directory
            there = await self.plane.hand_over(meta, ("tokens", "loss_mask", *own))
            mark = there.marks.get("tokens", ("",))[0]
        return FarRow(key, sizes["tokens"], sizes["loss"], width, mark=mark)
