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
from typing import Any

import torch

from understudy.dataplane.base import Lease, Order
from understudy.errors import DataError, DataPlaneError
from understudy.losses.reduce import Reduction, token_weights
from understudy.policy.step import StepResult
from understudy.trainers.critic.local import ValueModel, critic_metrics
from understudy.trainers.learn.minibatches import combine
from understudy.trainers.learn.out_of_memory import within_memory
from understudy.trainers.learn.prepare import Prepared, prepare, rows_of_updates, with_advantages
from understudy.trainers.remote_rows.batches import _HIDDEN_DTYPE
from understudy.trainers.row_columns import (
    SCORED,
    SIZES,
    assemble,
    fact_columns,
    rewards_of,
    rollout_metrics,
    token_columns,
)
from understudy.trainers.system import PARTITION, System
from understudy.types.batch import Batch
from understudy.types.far_batch import AnyBatch, FarBatch
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import Metric, MetricTotal, metric_results


async def far_batch_of(system: System, lease: Lease) -> tuple[FarBatch, dict[str, float]] | None:
    """The rows of a lease by key. Columns missing in the queue are uploaded first. None: no queue, or it is
    lost."""
    rows, loss, judged = system.far_rows, system.recipe.loss, system.router is not None
    if rows is None or rows.lost:
        return None
    facts: dict[str, Any] = dict(await system.plane.get(lease.meta, fact_columns(judged)))
    plane: Any = system.plane
    try:
        meta = await plane.hand_over(lease.meta, token_columns(loss, judged))
    except DataPlaneError:
        if rows.lost:
            return None
        raise
    extra = {}
    if system.teacher_heads:
        head = next(iter(system.teacher_heads.values()))
        extra[_HIDDEN_DTYPE] = str(head.weight_VH.dtype).removeprefix("torch.")
    sizes = facts[SIZES]
    batch = FarBatch(
        meta.but(tags=(), extra=extra),
        tuple(row["tokens"] for row in sizes),
        tuple(row["loss"] for row in sizes),
        rows,
        rewards=rewards_of(facts),
        stop_reasons=tuple(facts["stop_reason"]),
        teachers=tuple(facts.get(SCORED, ())),
    )
    return batch, rollout_metrics(facts)


_SHOWN = 5
__all__ = ["assemble", "claim_batch", "learn", "step_metrics", "update", "with_advantages"]


async def claim_batch(system: System, step: int) -> tuple[Lease, AnyBatch, dict[str, float]]:
    """Lease every row made for this step, in order of key, and lay its columns out for training.

    Called after the step's producers have ended: a row that is incomplete then raises an error.
    """
    fields, mine = training_fields(system), {"step": step}
    depth = await system.plane.depth(PARTITION, fields=fields, where=mine, step=step)
    if depth.ready < depth.rows:
        raise await _never_complete(system, step, fields)
    if depth.ready == 0:
        raise DataError(f"every row of step {step} failed; the reasons are in {system.run.dead_letters}")
    lease = await system.plane.claim(
        PARTITION, depth.ready, fields=fields, where=mine, order=Order.KEY, lease_seconds=None
    )
    batch, metrics = await batch_of(system, lease)
    return lease, batch, metrics


async def _never_complete(system: System, step: int, fields: Sequence[str]) -> DataPlaneError:
    rows = {key: row for key, row in (await system.plane.list(PARTITION)).items() if row.step == step}
    lacking = {key: [name for name in fields if name not in row.columns] for key, row in rows.items()}
    stuck = [f"{key} ({row.status.value}, lacks {', '.join(lacking[key]) or 'nothing'})" for key, row in rows.items()
             if lacking[key] or row.leased]  # fmt: skip
    more = f" and {len(stuck) - _SHOWN} more" if len(stuck) > _SHOWN else ""
    return DataPlaneError(
        f"step {step} cannot be trained: {len(stuck)} of its {len(rows)} rows are in flight and no producer works on them: "
        f"{'; '.join(stuck[:_SHOWN])}{more}. `understudy audit {system.run.path}` counts every row; please report this with the "
        "run directory"
    )


async def batch_of(system: System, lease: Lease) -> tuple[AnyBatch, dict[str, float]]:
    """Leased rows as a batch: by key if every rank fetches its own rows, otherwise with their columns."""
    far = await far_batch_of(system, lease)
    if far is not None:
        return far
    columns = await system.plane.get(lease.meta, training_fields(system))
    heads = system.teacher_heads
    dtype = next(iter(heads.values())).weight_VH.dtype if heads else torch.bfloat16
    return assemble(lease.meta.keys, columns, dtype), rollout_metrics(columns)


_LEARNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="understudy-update")
"""One thread for all updates, because torch caches kernel plans per thread (cuDNN's attention: about 40 ms
per shape)."""


async def update(system: System, batch: AnyBatch) -> StepResult:
    """One trainer step on the update thread, so that health checks and the display continue on the event
    loop."""
    job = partial(contextvars.copy_context().run, learn, system, batch)
    return await asyncio.get_running_loop().run_in_executor(_LEARNER, job)


def learn(system: System, batch: AnyBatch) -> StepResult:
    """All optimizer steps of one batch: `trainer.epochs` times its mini-batches, first the critic's, then the
    student's."""
    recipe, policy, critic = system.recipe, system.policy, system.critic
    parts = rows_of_updates(recipe, batch, policy.step)
    if not parts:
        if critic is not None:
            critic.skip_step()
        return _nothing_to_learn(system, batch)
    ready = prepare(system, batch, len(parts))
    extra: dict[str, Metric] = {name: MetricTotal(value) for name, value in ready.metrics.items()}
    alone = critic is not None and critic.alone
    if critic is not None:
        with ready.timed("critic"):
            here = ready.batch.streams()
            extra |= critic_metrics(here, _teach_critic(system, critic, here, parts))
    result = _nothing_to_learn(system, batch) if alone else _teach_student(system, ready, parts)
    return replace(result, metrics={**result.metrics, **extra}, seconds={**result.seconds, **ready.seconds})


def _teach_critic(system: System, critic: ValueModel, batch: Batch, parts: Sequence[list[int]]) -> StepResult:
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _cut(batch, rows, system.recipe.loss.reduction)
        assert isinstance(part, Batch)
        learn_part = partial(critic.update, part, weights, ends_step=number == len(parts))
        results.append(within_memory(system, critic, part, learn_part))
    return combine(list(zip(parts, results, strict=True)), len(batch))


def _teach_student(system: System, ready: Prepared, parts: Sequence[list[int]]) -> StepResult:
    recipe, every = system.recipe, len(ready.batch)
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _cut(ready.batch, rows, recipe.loss.reduction)
        old = ready.old_logprobs
        learn_part = partial(
            system.policy.update,
            part,
            system.objective,
            weights,
            old_logprobs=old if old is None or len(rows) == every else old.select(rows),
            teacher_heads=system.teacher_heads,
            ends_step=number == len(parts),
        )
        results.append(within_memory(system, system.policy, part, learn_part))
    return combine(list(zip(parts, results, strict=True)), every)


def _cut(batch: AnyBatch, rows: list[int], reduction: Reduction) -> tuple[AnyBatch, Jagged]:
    """Some rows of a batch with their reduction weights, whose denominators cover exactly these rows."""
    part = batch if len(rows) == len(batch) else batch.select(rows)
    lengths: tuple[int, ...] = part.loss_lengths
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return part, Jagged(token_weights(lengths, reduction), offsets)


def _nothing_to_learn(system: System, batch: AnyBatch) -> StepResult:
    """A step without an update of the student."""
    system.policy.skip_step()
    return StepResult(
        step=system.policy.step - 1,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        metrics={},
        tokens=0,
        loss_tokens=0,
        micro_batches=0,
        row_losses=(0.0,) * len(batch),
        row_tokens=(0,) * len(batch),
        seconds={},
        updates=0,
    )


def step_metrics(result: StepResult, batch: AnyBatch) -> dict[str, float]:
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
        metrics[f"teacher/{teacher}/kl"] = sum(result.row_losses[i] for i in rows) / max(tokens, 1)
    return metrics


def training_fields(system: System) -> tuple[str, ...]:
    """The columns that a row must have to be trained on."""
    judged = system.router is not None
    return (*token_columns(system.recipe.loss, judged), *fact_columns(judged))
