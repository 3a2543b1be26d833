"""The second verb: rows become one optimizer step.

    lease ──columns──> Batch ──advantages, reduction weights──> policy.update(objective) ──> metrics

Reduction weights and advantages are computed here once for the whole batch, so that nothing below depends on how
the batch is split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from understudy.dataplane.base import Lease, Order, split_key
from understudy.errors import DataError
from understudy.losses.advantages import SEQUENCE_ADVANTAGES, reinforce_plus_plus, reward_at_end, to_tokens
from understudy.losses.reduce import token_weights
from understudy.policy.policy import StepResult
from understudy.trainers.produce import SCORED
from understudy.trainers.system import PARTITION, System
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import metric_results

_STREAMS = ("tokens", "loss_mask", "behaviour_logprobs", "weight_versions", "reward", "stop_reason")


async def claim_batch(system: System, step: int) -> tuple[Lease, Batch, dict[str, float]]:
    """Lease every row made for this step, in order of key, and lay its columns out for training."""
    fields, mine = _fields(system), {"step": step}
    ready = (await system.plane.depth(PARTITION, fields=fields, where=mine)).ready
    if ready == 0:
        raise DataError(f"every row of step {step} failed; the reasons are in {system.run.dead_letters}")
    lease = await system.plane.claim(
        PARTITION, ready, fields=fields, where=mine, order=Order.KEY, lease_seconds=None
    )
    columns = await system.plane.get(lease.meta, fields)
    batch = assemble(lease.meta.keys, columns)
    if batch.teacher_hidden is not None:
        # Hidden states travel as bfloat16; they meet the head in the head's own precision.
        dtype = next(iter(system.teacher_heads.values())).weight_VH.dtype
        batch = replace(batch, teacher_hidden=_cast(batch.teacher_hidden, dtype))
    return lease, batch, rollout_metrics(columns)


async def update(system: System, batch: Batch) -> StepResult:
    """One optimizer step, on a worker thread so that health checks and the display go on meanwhile."""
    recipe = system.recipe
    batch = with_advantages(batch, recipe.loss.advantage) if recipe.loss.task_coef > 0 else batch
    lengths = [int(mask.sum()) for mask in batch.loss_mask]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    weights = Jagged(token_weights(lengths, recipe.loss.reduction), offsets)
    return await asyncio.to_thread(
        system.policy.update,
        batch,
        system.objective,
        weights,
        recipe.trainer.micro_batch_tokens,
        teacher_heads=system.teacher_heads,
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
        teachers=tuple(columns.get(SCORED, ())),
        teacher_logprobs=columns.get("teacher_logprobs"),
        teacher_ids=None if ids is None else _cast(ids, torch.int64),
        teacher_topk_logprobs=columns.get("teacher_topk_logprobs"),
        # bfloat16 travels as its bits, because numpy has no bfloat16.
        teacher_hidden=None if hidden is None else Jagged(hidden.values.view(torch.bfloat16), hidden.offsets),
    )


def with_advantages(batch: Batch, kind: str) -> Batch:
    """Task rewards as one advantage per loss-bearing token, normalised within each prompt's group."""
    rewards_B = torch.tensor(batch.rewards)
    lengths_B = [int(mask.sum()) for mask in batch.loss_mask]
    if kind == "reinforce++":
        advantages_N = reinforce_plus_plus(reward_at_end(rewards_B, lengths_B), lengths_B)
    else:
        groups_B = [split_key(key)[0] for key in batch.keys]
        advantages_N = to_tokens(SEQUENCE_ADVANTAGES[kind](rewards_B, groups_B), lengths_B)
    offsets = torch.tensor([0, *lengths_B], dtype=torch.int64).cumsum(0)
    return replace(batch, advantages=Jagged(advantages_N, offsets))


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
    return metrics


def step_metrics(result: StepResult, batch: Batch) -> dict[str, float]:
    metrics = metric_results(dict(result.metrics))
    metrics |= {
        "actor/loss": result.loss,
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.learning_rate,
    }
    for teacher in sorted(set(batch.teachers)):
        rows = [i for i, name in enumerate(batch.teachers) if name == teacher]
        tokens = sum(result.row_tokens[i] for i in rows)
        metrics[f"teacher/{teacher}/rows"] = float(len(rows))
        metrics[f"teacher/{teacher}/kl"] = sum(result.row_losses[i] for i in rows) / max(tokens, 1)
    return metrics


def _fields(system: System) -> tuple[str, ...]:
    if system.router is None:
        return _STREAMS
    scored = (*_STREAMS, SCORED, "teacher_logprobs")
    if system.recipe.loss.signal in ("topk", "at_ids"):
        return (*scored, "teacher_ids", "teacher_topk_logprobs")
    return (*scored, "teacher_hidden") if system.recipe.loss.signal == "hidden" else scored


def _cast(column: Jagged, dtype: torch.dtype) -> Jagged:
    return Jagged(column.values.to(dtype), column.offsets)
