"""The fully async trainer: producers run all the time, and slots bound how old a trained row may be.

    cursor ──> admit ──prompts──> produce ──rows──> plane ──batch──> update ──> publish
                 ▲   waits for      many at once:      rows of a      the trainer     │ every `sync_every`
                 │   a free slot    rollout, journal,  window, as     waits for       │ updates
                 │                  teacher, journal   they finish    enough rows     │
                 └──────────── a whole window's slots are free again ─────────────────┘

| task     | consumes          | produces              | waits for           |
|----------|-------------------|-----------------------|---------------------|
| admit    | slots and prompts | producers             | a free slot         |
| producer | a few prompts     | rows (`produce_step`) | engine and teachers |
| train    | rows              | weights, free slots   | rows                |

There is no deadlock. All rows of the oldest window have their slots. A slot is also a place in
the data plane: there are never more slots than `dataplane.max_rows` has room for, and rows are issued
`reserved`. The prompt that replaces a filtered one keeps the slot. So the trainer's wait for rows always
ends, and then a publish ends the admission's wait.

**No trained row is older than ⌈max_staleness⌉ publishes.** Number the prompts 0, 1, 2, … as they are
admitted. R prompts make a window (batch_size · sync_every), trained between publish w and publish w + 1.
There are C ≤ (1 + max_staleness) · R slots. A prompt takes a slot when it is admitted, and a publish frees
those of the window just trained. Hence

    prompt i, admitted after publish k:   i < k·R + C          only C prompts are in flight, and k·R are done
    its window:                           w = ⌊i / R⌋           windows are trained in order
    its age when it is trained:           w − k ≤ ⌊(C − 1) / R⌋ ≤ ⌈max_staleness⌉

Its tokens are written by weights of publish k or later, so no token is older. A prompt that replaces a
filtered one keeps its slot and window and is written later still. With `max_staleness = 0`, C = R: each
prompt is rolled out by the weights it trains, bit-identical to the sync trainer. `planning/windows.py` has
the arithmetic, fractions included. Every trained row is checked against the bound (`RowAges.check`).

Recovery after a crash works as in the sync trainer. Windows follow the cursor's order, so after a resume the
same prompts belong to the same windows. Rows in the journal are used as they are; all other rows are made
again under the same keys.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.dataplane.base import Count, Lease, Order
from understudy.errors import PolicyError
from understudy.observability.faults import point
from understudy.observability.profile import profiled
from understudy.planning.windows import Windows
from understudy.policy.step import StepResult
from understudy.trainers.call_batching import BatchByArrival, CallBatcher
from understudy.trainers.checkpoints import checkpoint_due, record_step, save_checkpoint
from understudy.trainers.evaluation.evaluate import evaluate_first, evaluated, evaluation_due
from understudy.trainers.keep_rows import update_and_keep
from understudy.trainers.learn.refused_steps import keep_weights
from understudy.trainers.learn.update import claim_batch, no_rows, step_metrics
from understudy.trainers.metrics import teacher_metrics, usage_metrics
from understudy.trainers.pacing.admission import AdmissionController
from understudy.trainers.pacing.idle_meter import ProducerMeters
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.trainers.pacing.staleness import RowAges, ScoredVersions
from understudy.trainers.pacing.staleness_budget import StalenessBudget, WindowProgress
from understudy.trainers.pacing.window_cursor import WindowCursor
from understudy.trainers.produce.dynamic_sampling import (
    install_filters,
    nothing_to_learn,
    prompts_held,
    refill_metrics,
    removal_metrics,
    without_rows,
)
from understudy.trainers.produce.produce import produce_step
from understudy.trainers.row_columns import PARTITION, training_columns
from understudy.trainers.stopping import Abandoned, Interrupts
from understudy.trainers.sync import publish
from understudy.trainers.system import System
from understudy.trainers.wait_graph import PRODUCER
from understudy.types.batch_ref import BatchRef
from understudy.types.prompt import Prompt, split_key

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""The thread switch interval of the interpreter, in seconds. The event loop, the engine's thread and the
trainer's thread share one interpreter. An engine that returns from the GPU has little Python to run before
the GPU works again. With Python's default of 5 ms a busy event loop would delay it at every token."""


async def train_fully_async(system: System, stop: Interrupts) -> int:
    """Run until the recipe's last step or a stop request. Returns the last step taken."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_INTERVAL_S))
    try:
        return await _train(system, stop)
    finally:
        sys.setswitchinterval(before)


async def _train(system: System, stop: Interrupts) -> int:
    install_filters(system.producer)
    run = await _AsyncRun.of(system)
    await evaluate_first(run.system, stop)
    async with asyncio.TaskGroup() as tasks:
        admission = tasks.create_task(run.admit(tasks), name="admit")
        try:
            return await run.train(stop)
        finally:
            # The journal holds what unfinished rows have so far. A resume continues from there.
            admission.cancel()
            run.abandon_producers()


@dataclass(slots=True)
class _AsyncRun:
    """The state that the tasks of one run share. Everything runs on the event loop."""

    system: System
    windows: Windows
    slots: StalenessBudget
    cursor: WindowCursor
    first_step: int
    publish_gate: PublishGate | None
    """None if a publish does not wait for rollouts."""
    controller: AdmissionController | None
    meters: ProducerMeters
    batcher: CallBatcher | None
    """One for the whole run, so that calls of prompts admitted at different times share batches. None:
    batched by key."""
    progresses: dict[int, WindowProgress] = field(default_factory=dict)
    producers: set[asyncio.Task[None]] = field(default_factory=set)

    @staticmethod
    async def of(system: System) -> _AsyncRun:
        trainer = system.learner.settings.trainer
        windows = system.learner.settings.windows
        step = system.learner.policy.step
        trained = step // windows.sync_every
        cursor = WindowCursor(system.producer.cursor, windows, trained, await _assigned(system, windows))
        meters = ProducerMeters()
        publish_gate = None if trainer.partial_rollouts else PublishGate()
        producer = replace(meters.watching(system.producer), cursor=cursor, publish_gate=publish_gate)
        watched = replace(system, producer=producer)
        return _AsyncRun(
            system=watched,
            windows=windows,
            slots=StalenessBudget(windows, admitted=trained * windows.size, published=trained),
            cursor=cursor,
            first_step=step,
            publish_gate=publish_gate,
            controller=AdmissionController(windows) if trainer.adapt_admission else None,
            meters=meters,
            batcher=None if system.learner.settings.deterministic else BatchByArrival(),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have to be trained on."""
        settings = self.system.learner.settings
        return training_columns(settings.loss, settings.scored)

    # --- admit

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start producers for as many prompts as there are free slots, window after window."""
        while not self.slots.exhausted:
            with self.system.state.spans.span("wait for a slot"):
                room = await self.slots.wait_for_room()
            first = self.slots.admitted
            window = self.windows.of_prompt(first)
            count = min(room, self.windows.prompts_of(window).stop - first)
            self.slots.charge(count)
            prompts = self.cursor.take(count)
            producer = tasks.create_task(self._produce(window, prompts), name=f"produce window {window}")
            self.producers.add(producer)
            producer.add_done_callback(self.producers.discard)

    async def _produce(self, window: int, prompts: Sequence[Prompt]) -> None:
        with self.system.state.spans.span(PRODUCER, window=window, prompts=len(prompts)):
            await self._produce_rows(window, prompts)
            if self.system.producer.settings.rollout.filter_groups:
                await self._refill(window, prompts)
        self.progress(window).finish(len(prompts))

    async def _produce_rows(self, window: int, prompts: Sequence[Prompt]) -> None:
        step = self.windows.first_step(window)
        await produce_step(self.system.producer, self.system.learner, prompts, step, batcher=self.batcher)

    async def _refill(self, window: int, prompts: Sequence[Prompt]) -> None:
        """Replaces filtered prompts by other prompts.

        A replacement keeps the slot and the window and is written by weights at least as new, so the
        staleness bound holds. It waits for no slot, so the trainer's wait still ends. Replacements that an
        earlier launch took for these places do not count against `rollout.max_refills`.
        """
        most, refills, progress = self.system.producer.settings.rollout.max_refills, 0, self.progress(window)
        while missing := await without_rows(self.system.producer, prompts):
            progress.filtered += missing
            owed = self.cursor.has_unfilled(window)
            if refills == most and not owed:
                break
            refills += not owed
            prompts = self.cursor.refill(window, missing)
            await self._produce_rows(window, prompts)
        progress.refills = max(progress.refills, refills)

    def progress(self, window: int) -> WindowProgress:
        if window not in self.progresses:
            self.progresses[window] = WindowProgress(len(self.windows.prompts_of(window)))
        return self.progresses[window]

    def abandon_producers(self) -> None:
        for producer in self.producers:
            producer.cancel()

    # --- train

    async def train(self, stop: Interrupts) -> int:
        trainer, step, system = self.system.learner.settings.trainer, self.first_step, self.system
        saved, profile_steps = step, system.learner.settings.profile_steps
        while step < trainer.steps and not stop.requested:
            try:
                async with profiled(system.state.run.path, step + 1, step + 1 in profile_steps):
                    line = await self.take_step(step + 1, stop)
            except Abandoned:
                break
            except PolicyError:
                await keep_weights(system, step, saved)
                raise
            step += 1
            if evaluation_due(system.learner.settings, step):
                line = await evaluated(system, step, line, stop)
            await record_step(system, step, line)
            point("async.after_metrics")
            if checkpoint_due(system, step, line) or stop.requested:
                await save_checkpoint(system, step)
                saved = step
        if saved != step:
            await save_checkpoint(system, step)
        return step

    async def take_step(self, step: int, stop: Interrupts) -> dict[str, Any]:
        """One step; returns its metrics. Raises `Abandoned` before the update only, so the student is
        unchanged."""
        started, spans, system = time.monotonic(), self.system.state.spans, self.system
        with spans.span("wait for rows", step=step, window=self.windows.of_step(step)):
            lease, batch, metrics = await stop.waiting(self._claim(step))
        waited = time.monotonic() - started
        point("async.after_claim")
        depth = await system.state.plane.depth(PARTITION, fields=self.columns)
        ages = await RowAges.of(system.state.plane, lease, self.windows, step)
        ages.check(self.windows.oldest)
        if (lag := system.learner.settings.teacher_lag) is not None:
            versions = await ScoredVersions.of(system.state.plane, lease)
            versions.check(self.windows, step, lag)
            metrics |= versions.metrics
        with spans.span("update", step=step):
            result = await update_and_keep(system, lease, batch, step)
        point("async.after_update")
        await system.state.plane.ack(lease, step)
        removed = removal_metrics(system.producer)
        point("async.after_ack")
        system.state.tally.rows_trained += len(batch)
        if self._publishes_after(step):
            await self._publish(step, waited / (time.monotonic() - started), depth.ready, stop)
        seconds = time.monotonic() - started
        spans.flush()
        metrics |= step_metrics(result, batch) | ages.metrics(result.row_losses, result.row_tokens)
        metrics |= {f"time/{name}": total for name, total in spans.take_totals().items()}
        metrics |= {f"time/update/{name}": value for name, value in result.seconds.items()}
        metrics |= removed | self._pace(result, seconds, waited, depth.rows, depth.ready)
        metrics |= usage_metrics(system, result, seconds)
        return metrics | teacher_metrics(system.producer.teachers.pools) | system.state.timings.take()

    async def _claim(self, step: int) -> tuple[Lease, BatchRef, dict[str, float]]:
        """The rows of this update: the next finished ones of its window. The window's last update gets all
        that are left."""
        window = self.windows.of_step(step)
        first, progress = self.windows.first_step(window), self.progress(window)
        if step == self.windows.last_step(window):
            await progress.complete.wait()
            del self.progresses[window]
            if not self.system.producer.settings.rollout.filter_groups:
                return await claim_batch(self.system.learner, first, self._none_left(step))
            places = self.windows.prompts_of(window)
            if await self._rows_of(first) == 0 and progress.filtered >= len(places):
                raise nothing_to_learn(step, progress.filtered)
            lease, batch, metrics = await claim_batch(self.system.learner, first, self._none_left(step))
            return lease, batch, metrics | refill_metrics(progress.filtered, progress.refills)
        lease = await self._claim_next(first, step, progress)
        batch, metrics = await self.system.learner.batches.of(lease)
        return lease, batch, metrics

    async def _rows_of(self, first: int) -> int:
        depth = await self.system.state.plane.depth(
            PARTITION,
            fields=self.columns,
            where={"step": first},
        )
        return depth.ready

    async def _claim_next(self, first: int, step: int, progress: WindowProgress) -> Lease:
        """A batch of whole prompts in order of arrival.

        If too many rows of the window failed, the rest is divided evenly over the window's remaining
        updates."""
        system, mine = self.system, {"step": first}
        fields = self.columns

        async def claim(prompts: int) -> Lease:
            return await system.state.plane.claim(
                PARTITION, prompts, fields=fields, where=mine, order=Order.ARRIVAL, count=Count.GROUPS,
                lease_seconds=None,
            )  # fmt: skip

        whole = asyncio.create_task(claim(self.windows.batch_size))
        complete = asyncio.create_task(progress.complete.wait())
        try:
            await asyncio.wait({whole, complete}, return_when=asyncio.FIRST_COMPLETED)
            # The rows that finished last may reach the claim in the next iteration of the event loop.
            await asyncio.sleep(0)
        finally:
            complete.cancel()
            if not whole.done():
                whole.cancel()
        try:
            return await whole
        except asyncio.CancelledError:
            if not progress.complete.is_set():
                raise
        updates = self.windows.last_step(self.windows.of_step(step)) - step + 1
        prompts = -(-len(await prompts_held(system.producer, first)) // updates)
        if prompts == 0:
            raise no_rows(system.learner, self._none_left(step))
        return await claim(prompts)

    def _none_left(self, step: int) -> str:
        """What to say if this update has no row. A window's rows belong to all of its updates."""
        window = self.windows.of_step(step)
        first, last = self.windows.first_step(window), self.windows.last_step(window)
        if first == last:
            return f"every row of step {step} failed"
        return (
            f"step {step} has no row: those of steps {first} to {last}, which are one window (trainer.sync_every = "
            f"{self.windows.sync_every}), failed or were trained by the steps before it"
        )

    def _publishes_after(self, step: int) -> bool:
        return step == self.windows.last_step(self.windows.of_step(step))

    async def _publish(self, step: int, trainer_idle: float, rows_ready: int, stop: Interrupts) -> None:
        """Publishes new weights. Running generations continue under them, or are waited for
        (`partial_rollouts = false`).

        If a stopping run cannot wait for them to end, the weights are not published, and no slot is free: a row that
        the engines' weights began would be older than the bound when a resume trains it."""
        published, spans, gate = False, self.system.state.spans, self.publish_gate
        try:
            if gate is not None:
                with spans.span("drain", step=step):
                    await stop.waiting(gate.close())
            with spans.span("publish", step=step):
                published = await publish(self.system.learner, step, stop)
        except Abandoned:
            logger.info("step %d: stopped while rollouts were waited for; not published", step)
        finally:
            if gate is not None:
                gate.open()
        point("async.after_publish")
        self.cursor.window_trained()
        if not published:
            return
        self.slots.publish()
        if self.controller is not None:
            ahead = rows_ready / (self.system.producer.settings.rollout.n * self.windows.size)
            decision = self.controller.observe(trainer_idle, ahead)
            if decision:
                logger.info("step %d: %s", step, decision)
                self.system.state.view.note(f"step {step}: {decision}")
                self.slots.set_ceiling(self.controller.ceiling)

    def _pace(
        self, result: StepResult, seconds: float, waited: float, rows: int, ready: int
    ) -> dict[str, float]:
        return {
            "time/step": seconds,
            "perf/tokens_per_second": result.tokens / seconds,
            "perf/queue_depth": float(rows),
            "perf/async/rows_ready": float(ready),
            "perf/async/slots_in_use": float(self.slots.in_use),
            "perf/async/slots": float(self.slots.ceiling),
            "perf/async/trainer_idle": waited / seconds,
            "perf/async/rollout_idle": self.meters.rollout.take_idle(),
            "perf/async/teacher_idle": self.meters.teacher.take_idle(),
        }


async def _assigned(system: System, windows: Windows) -> dict[str, int]:
    """The window of every prompt with rows in flight from an earlier launch.

    Empty without `rollout.filter_groups`: then the cursor's order determines the windows."""
    if not system.producer.settings.rollout.filter_groups:
        return {}
    rows = await system.state.plane.list(PARTITION)
    return {split_key(key)[0]: windows.of_step(row.step) for key, row in rows.items()}
