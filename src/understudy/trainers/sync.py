"""The sync trainer: produce a batch, update, publish, repeat.

        ┌───────────────────────────── one step ──────────────────────────────┐
    cursor ──prompts──> produce ──rows──> claim ──batch──> update ──> ack ──> publish ──> next step
                          ▲  every row: rollout → journal → teacher → journal        │
                          └────────────────── weights of version = step ─────────────┘

After a crash at any point, a resume loads the last checkpoint, rewinds the journal and truncates the metrics
to its step, and makes the later steps again from the same seeds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from understudy.errors import PolicyError
from understudy.observability.faults import point
from understudy.observability.profile import profiled
from understudy.trainers.checkpoints import checkpoint_due, record_step, save_checkpoint
from understudy.trainers.evaluation.evaluate import evaluate_first, evaluated, evaluation_due
from understudy.trainers.keep_rows import update_and_keep
from understudy.trainers.learn.refused_steps import keep_weights
from understudy.trainers.learn.update import claim_batch, step_metrics
from understudy.trainers.metrics import teacher_metrics, usage_metrics
from understudy.trainers.pacing.idle_meter import ProducerMeters
from understudy.trainers.pacing.staleness import ScoredVersions
from understudy.trainers.produce.dynamic_sampling import fill_step, install_filters, removal_metrics
from understudy.trainers.stopping import Abandoned, Interrupts
from understudy.trainers.system import Learner, System

logger = logging.getLogger(__name__)


async def train_sync(system: System, stop: Interrupts) -> int:
    """Run until the recipe's last step or a stop request. Returns the last step taken."""
    trainer, meters = system.learner.settings.trainer, ProducerMeters()
    system = replace(system, producer=meters.watching(system.producer))
    install_filters(system.producer)
    step, profile_steps = system.learner.policy.step, system.learner.settings.profile_steps
    await evaluate_first(system, stop)
    saved = step
    while step < trainer.steps and not stop.requested:
        before = system.producer.cursor.state()
        try:
            async with profiled(system.state.run.path, step + 1, step + 1 in profile_steps):
                line = await take_step(system, step + 1, stop, meters)
        except Abandoned:
            system.producer.cursor.restore(before)
            break
        except PolicyError:
            system.producer.cursor.restore(before)
            await keep_weights(system, step, saved)
            raise
        step += 1
        if evaluation_due(system.learner.settings, step):
            line = await evaluated(system, step, line, stop)
        await record_step(system, step, line)
        point("sync.after_metrics")
        if checkpoint_due(system, step, line) or stop.requested:
            await save_checkpoint(system, step)
            saved = step
    if saved != step:
        await save_checkpoint(system, step)
    return step


async def publish(learner: Learner, step: int, stop: Interrupts) -> bool:
    """Publishes new weights. If the engines do not take them before a stopping run's deadline, the step still
    counts, and the result is False."""
    try:
        await stop.waiting(learner.publish(step))
    except Abandoned:
        logger.info("step %d: stopped while its weights were being published", step)
        return False
    return True


async def take_step(system: System, step: int, stop: Interrupts, meters: ProducerMeters) -> dict[str, Any]:
    """One step of the drawing above; returns its metrics. Raises `Abandoned` before the update only, so the
    student is unchanged.

    Every wait for another process is under `stop.waiting`: rows, their claim, the publish. A started update
    always finishes.
    """
    started = time.monotonic()
    for meter in (meters.rollout, meters.teacher):
        meter.take_idle()  # the time of an evaluation or a checkpoint before this step is not counted
    spans = system.state.spans
    with spans.span("produce", step=step):
        filtered = await stop.waiting(fill_step(system.producer, system.learner, step))
    point("sync.after_produce")
    with spans.span("claim", step=step):
        lease, batch, metrics = await stop.waiting(claim_batch(system.learner, step))
    waited = time.monotonic() - started
    if system.learner.settings.teacher_lag is not None:
        metrics |= (await ScoredVersions.of(system.state.plane, lease)).metrics
    queue_depth = (await system.state.plane.depth("train")).rows
    with spans.span("update", step=step):
        result = await update_and_keep(system, lease, batch, step)
    point("sync.after_update")
    await system.state.plane.ack(lease, step)
    point("sync.after_ack")
    with spans.span("publish", step=step):
        await publish(system.learner, step, stop)
    point("sync.after_publish")
    system.state.tally.rows_trained += len(batch)
    seconds = time.monotonic() - started
    spans.flush()
    metrics |= filtered | removal_metrics(system.producer)
    metrics |= step_metrics(result, batch)
    metrics |= {f"time/{name}": total for name, total in spans.take_totals().items()}
    metrics |= {f"time/update/{name}": value for name, value in result.seconds.items()}
    metrics |= {
        "time/step": seconds,
        "perf/tokens_per_second": result.tokens / seconds,
        "perf/queue_depth": float(queue_depth),
        "perf/sync/trainer_idle": waited / seconds,
        "perf/sync/rollout_idle": meters.rollout.take_idle(),
        "perf/sync/teacher_idle": meters.teacher.take_idle(),
    }
    metrics |= usage_metrics(system, result, seconds)
    return metrics | teacher_metrics(system.producer.teachers.pools) | system.state.timings.take()
