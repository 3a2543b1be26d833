"""The second verb: rows become one step of the student (and of its critic).

    lease ──columns──> Batch ──prepare──> old logprobs, values, advantages
                                              │
                 epochs × mini-batches ───────┴──reduction weights──> policy.update(objective) ──> metrics

What a step needs to know of the weights before it is computed once for the whole batch (`prepare.py`); reduction weights
once for each mini-batch. So nothing below depends on how a mini-batch is split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from understudy.config import Recipe
from understudy.dataplane.base import Lease, Order
from understudy.errors import DataError
from understudy.losses.reduce import Reduction, token_weights
from understudy.policy.policy import StepResult
from understudy.trainers.critic import Critic, critic_metrics
from understudy.trainers.minibatches import combine, split_rows
from understudy.trainers.prepare import Prepared, prepare, rows_to_train, with_advantages
from understudy.trainers.produce import SCORED
from understudy.trainers.system import PARTITION, System
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import Metric, MetricTotal, metric_results

__all__ = ["assemble", "claim_batch", "learn", "step_metrics", "update", "with_advantages"]

_STREAMS = (
    "tokens", "loss_mask", "behaviour_logprobs", "weight_versions", "reward", "stop_reason", "turns", "metrics",
)  # fmt: skip


async def claim_batch(system: System, step: int) -> tuple[Lease, Batch, dict[str, float]]:
    """Lease every row made for this step, in order of key, and lay its columns out for training."""
    fields, mine = training_fields(system), {"step": step}
    ready = (await system.plane.depth(PARTITION, fields=fields, where=mine)).ready
    if ready == 0:
        raise DataError(f"every row of step {step} failed; the reasons are in {system.run.dead_letters}")
    lease = await system.plane.claim(
        PARTITION, ready, fields=fields, where=mine, order=Order.KEY, lease_seconds=None
    )
    batch, metrics = await batch_of(system, lease)
    return lease, batch, metrics


async def batch_of(system: System, lease: Lease) -> tuple[Batch, dict[str, float]]:
    """The columns of leased rows, laid out for training."""
    columns = await system.plane.get(lease.meta, training_fields(system))
    batch = assemble(lease.meta.keys, columns)
    if batch.teacher_hidden is not None:
        # Hidden states travel as bfloat16; they meet the head in the head's own precision.
        dtype = next(iter(system.teacher_heads.values())).weight_VH.dtype
        batch = replace(batch, teacher_hidden=_cast(batch.teacher_hidden, dtype))
    return batch, rollout_metrics(columns)


async def update(system: System, batch: Batch) -> StepResult:
    """One trainer step, on a worker thread so that health checks and the display go on meanwhile."""
    return await asyncio.to_thread(learn, system, batch)


def learn(system: System, batch: Batch) -> StepResult:
    """Every optimizer step of one batch: `trainer.epochs` times its mini-batches, the critic's first, then the student's."""
    recipe, policy, critic = system.recipe, system.policy, system.critic
    parts = split_rows(
        batch.keys,
        rows_to_train(batch, recipe.rollout.overlong),
        recipe.trainer.mini_batch_size,
        recipe.trainer.epochs,
        recipe.run.seed,
        policy.step,
    )
    if not parts:
        if critic is not None:
            critic.policy.skip_step()
        return _nothing_to_learn(system, batch)
    ready = prepare(system, batch, len(parts))
    extra: dict[str, Metric] = {name: MetricTotal(value) for name, value in ready.metrics.items()}
    alone = critic is not None and critic.alone
    if critic is not None:
        with ready.timed("critic"):
            extra |= critic_metrics(ready.batch, _teach_critic(critic, recipe, ready.batch, parts))
    result = _nothing_to_learn(system, batch) if alone else _teach_student(system, ready, parts)
    return replace(result, metrics={**result.metrics, **extra}, seconds={**result.seconds, **ready.seconds})


def _teach_critic(critic: Critic, recipe: Recipe, batch: Batch, parts: Sequence[list[int]]) -> StepResult:
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _cut(batch, rows, recipe.loss.reduction)
        results.append(
            critic.update(part, weights, recipe.trainer.micro_batch_tokens, ends_step=number == len(parts))
        )
    return combine(list(zip(parts, results, strict=True)), len(batch))


def _teach_student(system: System, ready: Prepared, parts: Sequence[list[int]]) -> StepResult:
    recipe, every = system.recipe, len(ready.batch)
    results = []
    for number, rows in enumerate(parts, start=1):
        part, weights = _cut(ready.batch, rows, recipe.loss.reduction)
        old = ready.old_logprobs
        results.append(
            system.policy.update(
                part,
                system.objective,
                weights,
                recipe.trainer.micro_batch_tokens,
                old_logprobs=old if old is None or len(rows) == every else old.select(rows),
                teacher_heads=system.teacher_heads,
                ends_step=number == len(parts),
            )
        )
    return combine(list(zip(parts, results, strict=True)), every)


def _cut(batch: Batch, rows: list[int], reduction: Reduction) -> tuple[Batch, Jagged]:
    """Some rows of a batch with their reduction weights, whose denominators are those of all of these rows."""
    part = batch if len(rows) == len(batch) else batch.select(rows)
    lengths = [int(mask.sum()) for mask in part.loss_mask]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return part, Jagged(token_weights(lengths, reduction), offsets)


def _nothing_to_learn(system: System, batch: Batch) -> StepResult:
    """A step that leaves the student as it is."""
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


def assemble(keys: Sequence[str], columns: Mapping[str, Any]) -> Batch:
    """Columns of the data plane as one batch."""
    ids = columns.get("teacher_ids")
    hidden = columns.get("teacher_hidden")
    return Batch(
        keys=tuple(keys),
        tokens=_cast(columns["tokens"], torch.int64),
        loss_mask=columns["loss_mask"],
        behaviour_logprobs=columns["behaviour_logprobs"],
        rewards=tuple(float("nan") if reward is None else float(reward) for reward in columns["reward"]),
        stop_reasons=tuple(columns.get("stop_reason", ())),
        teachers=tuple(columns.get(SCORED, ())),
        teacher_logprobs=columns.get("teacher_logprobs"),
        teacher_ids=None if ids is None else _cast(ids, torch.int64),
        teacher_topk_logprobs=columns.get("teacher_topk_logprobs"),
        # bfloat16 travels as its bits, because numpy has no bfloat16.
        teacher_hidden=None if hidden is None else Jagged(hidden.values.view(torch.bfloat16), hidden.offsets),
    )


def rollout_metrics(columns: Mapping[str, Any]) -> dict[str, float]:
    """What the rows of a step look like, under verl's names where it has one."""
    lengths = np.array([int(mask.sum()) for mask in columns["loss_mask"]])
    versions = columns["weight_versions"].values
    stops = columns["stop_reason"]
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": sum(reason == "length" for reason in stops) / len(stops),
        "rollout/weight_version/min": float(versions[versions >= 0].min()),
        "rollout/rows": float(len(stops)),
    }
    rewards = [reward for reward in columns["reward"] if reward is not None]
    if rewards:
        metrics["critic/score/mean"] = float(np.mean(rewards))
    turns = [int(count) for count in columns["turns"]]
    if max(turns) > 1:
        metrics |= {"num_turns/min": float(min(turns)), "num_turns/mean": float(np.mean(turns))}
        metrics["num_turns/max"] = float(max(turns))
    own = [dict(row) for row in columns["metrics"]]
    # What loops and rewards counted: tool calls, parts of a reward.
    for name in sorted({name for row in own for name in row}):
        metrics[f"rollout/{name}"] = float(np.mean([row[name] for row in own if name in row]))
    return metrics


def step_metrics(result: StepResult, batch: Batch) -> dict[str, float]:
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
    if system.router is None:
        return _STREAMS
    scored = (*_STREAMS, SCORED, "teacher_logprobs")
    if system.recipe.loss.signal in ("topk", "at_ids"):
        return (*scored, "teacher_ids", "teacher_topk_logprobs")
    return (*scored, "teacher_hidden") if system.recipe.loss.signal == "hidden" else scored


def _cast(column: Jagged, dtype: torch.dtype) -> Jagged:
    return Jagged(column.values.to(dtype), column.offsets)
