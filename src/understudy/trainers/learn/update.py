"""Update: leased rows become one step of the student, and of its critic.

    lease ──columns──> Batch ──prepare──> old logprobs, values, advantages
                                              │
                 epochs × mini-batches ───────┴──reduction weights──> policy.update(objective) ──> metrics

Everything that depends on the weights before the step is computed once for the whole batch (`prepare.py`).
Reduction weights are computed once per mini-batch. So results do not depend on how a mini-batch is split.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from understudy.dataplane.base import Lease, Order
from understudy.errors import DataError, DataPlaneError
from understudy.losses.reduce import Reduction, token_weights
from understudy.policy.step import StepResult
from understudy.policy.token_watch import TokenWatch
from understudy.trainers.critic.local import ValueModel, critic_metrics
from understudy.trainers.learn.minibatches import combine
from understudy.trainers.learn.out_of_memory import within_memory
from understudy.trainers.learn.prepare import Prepared, prepare, rows_of_updates
from understudy.trainers.row_columns import PARTITION, training_columns
from understudy.trainers.system import Learner
from understudy.types.batch import Batch
from understudy.types.batch_ref import BatchRef
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import Metric, MetricTotal, metric_results

_MOST_LISTED = 5
"""Incomplete rows that an error names."""


def no_rows(learner: Learner, which: str) -> DataError:
    return DataError(f"{which}; the reasons are in {learner.state.run.dead_letters}")


async def claim_batch(
    learner: Learner, step: int, if_none: str = ""
) -> tuple[Lease, BatchRef, dict[str, float]]:
    """Lease every row made for this step, in order of key, and lay its columns out for training.

    Called after the step's producers have ended: a row that is incomplete then raises an error. `if_none`: what to say if
    there is no row; by default that every row of the step failed.
    """
    fields, mine = training_columns(learner.settings.loss, learner.settings.scored), {"step": step}
    depth = await learner.state.plane.depth(PARTITION, fields=fields, where=mine, step=step)
    if depth.ready < depth.rows:
        raise await _incomplete_rows(learner, step, fields)
    if depth.ready == 0:
        raise no_rows(learner, if_none or f"every row of step {step} failed")
    lease = await learner.state.plane.claim(
        PARTITION, depth.ready, fields=fields, where=mine, order=Order.KEY, lease_seconds=None
    )
    batch, metrics = await learner.batches.of(lease)
    return lease, batch, metrics


async def _incomplete_rows(learner: Learner, step: int, fields: Sequence[str]) -> DataPlaneError:
    rows = {key: row for key, row in (await learner.state.plane.list(PARTITION)).items() if row.step == step}
    lacking = {key: [name for name in fields if name not in row.columns] for key, row in rows.items()}
    stuck = [f"{key} ({row.status.value}, lacks {', '.join(lacking[key]) or 'nothing'})" for key, row in rows.items()
             if lacking[key] or row.leased]  # fmt: skip
    more = f" and {len(stuck) - _MOST_LISTED} more" if len(stuck) > _MOST_LISTED else ""
    return DataPlaneError(
        f"step {step} cannot be trained: {len(stuck)} of its {len(rows)} rows are in flight and no producer works on them: "
        f"{'; '.join(stuck[:_MOST_LISTED])}{more}. `understudy audit {learner.state.run.path}` counts every row; please report this with the "
        "run directory"
    )


_UPDATE_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="understudy-update")
"""One thread for all updates, because torch caches kernel plans per thread (cuDNN's attention: about 40 ms
per shape)."""


async def update(learner: Learner, batch: BatchRef, watch: TokenWatch | None = None) -> StepResult:
    """One trainer step on the update thread, so that health checks and the display continue on the event
    loop. `watch` names rows whose tokens are recorded (`run.keep_rows`)."""
    job = partial(contextvars.copy_context().run, learn, learner, batch, watch)
    return await asyncio.get_running_loop().run_in_executor(_UPDATE_THREAD, job)


def learn(learner: Learner, batch: BatchRef, watch: TokenWatch | None = None) -> StepResult:
    """All optimizer steps of one batch: `trainer.epochs` times its mini-batches, first the critic's, then the
    student's. Blocks; a run calls it on the update thread."""
    settings, policy, critic = learner.settings, learner.policy, learner.critic
    parts = rows_of_updates(settings, batch, policy.step)
    if not parts:
        if critic is not None:
            critic.skip_step()
        return _nothing_to_learn(learner, batch)
    ready = prepare(learner, batch, len(parts))
    extra: dict[str, Metric] = {name: MetricTotal(value) for name, value in ready.metrics.items()}
    # Read before the critic's update, which ends the critic's step.
    critic_only = critic is not None and critic.trains_alone
    if critic is not None:
        with ready.timed("critic"):
            here = ready.batch.streams()
            extra |= critic_metrics(here, _update_critic(learner, critic, here, parts))
    if critic_only:
        result = _nothing_to_learn(learner, batch)
    else:
        result = _update_student(learner, ready, parts, watch)
    return replace(result, metrics={**result.metrics, **extra}, seconds={**result.seconds, **ready.seconds})


def _update_critic(
    learner: Learner, critic: ValueModel, batch: Batch, parts: Sequence[list[int]]
) -> StepResult:
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _select(batch, rows, learner.settings.loss.reduction)
        learn_part = partial(critic.update, part.fetch_all(), weights, ends_step=number == len(parts))
        results.append(within_memory(learner, critic, part, learn_part))
    return combine(list(zip(parts, results, strict=True)), len(batch))


def _update_student(
    learner: Learner, ready: Prepared, parts: Sequence[list[int]], watch: TokenWatch | None
) -> StepResult:
    settings, every = learner.settings, len(ready.batch)
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _select(ready.batch, rows, settings.loss.reduction)
        old = ready.anchor
        learn_part = partial(
            learner.policy.update,
            part,
            learner.objective,
            weights,
            old_logprobs=old if old is None or len(rows) == every else old.select(rows),
            teacher_heads=learner.teacher_heads,
            ends_step=number == len(parts),
            watch=watch,
        )
        results.append(within_memory(learner, learner.policy, part, learn_part))
    return combine(list(zip(parts, results, strict=True)), every)


def _select(batch: BatchRef, rows: list[int], reduction: Reduction) -> tuple[BatchRef, Jagged]:
    """Some rows of a batch with their reduction weights, whose denominators cover exactly these rows."""
    part = batch if len(rows) == len(batch) else batch.select(rows)
    lengths: tuple[int, ...] = part.loss_lengths
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return part, Jagged(token_weights(lengths, reduction), offsets)


def _nothing_to_learn(learner: Learner, batch: BatchRef) -> StepResult:
    """A step without an update of the student."""
    learner.policy.skip_step()
    return StepResult(
        step=learner.policy.step - 1,  # this step: `skip_step` has counted it
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        metrics={},
        tokens=0,
        loss_tokens=0,
        micro_batches=0,
        row_losses=(0.0,) * len(batch),
        row_distill=(0.0,) * len(batch),
        row_tokens=(0,) * len(batch),
        seconds={},
        updates=0,
    )


def step_metrics(result: StepResult, batch: BatchRef) -> dict[str, float]:
    metrics = metric_results(dict(result.metrics))
    if result.updates:
        metrics |= {
            "actor/loss": result.loss,
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.learning_rate,
        }
    if result.updates != 1:
        metrics["actor/updates"] = float(result.updates)
    for teacher in sorted(set(batch.teachers)):
        rows = [i for i, name in enumerate(batch.teachers) if name == teacher]
        tokens = sum(result.row_tokens[i] for i in rows)
        metrics[f"teacher/{teacher}/rows"] = float(len(rows))
        metrics[f"teacher/{teacher}/share"] = len(rows) / len(batch)
        metrics[f"teacher/{teacher}/kl"] = sum(result.row_distill[i] for i in rows) / max(tokens, 1)
    return metrics
