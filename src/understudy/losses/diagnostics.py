"""Per-token columns → metrics that add up across micro-batches. Nothing here touches the gradient.

Names follow verl's where verl has one. Means run over tokens with a weight above 0;
`actor/distillation/loss` and `actor/pg_loss` are the weighted sums that enter the loss.

Shape legend: N tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from understudy.types.loss import LossInputs
from understudy.types.loss_metrics import Metric, MetricMax, MetricMin, MetricSum, MetricTotal

POSITION_EDGES = (0, *(4**power for power in range(2, 7)))
"""Buckets 0-15, 16-63, … 4096+ of the position within a response. Later tokens carry a worse signal; the
buckets show from where on."""

MEAN_COLUMNS = {
    "entropy": "actor/entropy",
    "engine_diff": "actor/engine_diff",
    "k1": "actor/distillation/k1",
    "student_mass": "actor/distillation/student_mass",
    "teacher_mass": "actor/distillation/teacher_mass",
    "clamped": "actor/distillation/clamped_share",
    "distill_approx_kl": "actor/distillation/ppo_kl",
    "distill_clipped": "actor/distillation/pg_clipfrac",
    "distill_clipped_lower": "actor/distillation/pg_clipfrac_lower",
    "distill_importance": "actor/distillation/tis_weight",
    "task_approx_kl": "actor/ppo_kl",
    "task_clipped": "actor/pg_clipfrac",
    "task_clipped_lower": "actor/pg_clipfrac_lower",
    "task_importance": "actor/tis_weight",
    "reference_kl": "actor/kl_loss",
}

DRAWN_COLUMNS = {
    "k1",
    "engine_diff",
    *(
        f"{term}_{name}"
        for term in ("distill", "task")
        for name in ("approx_kl", "clipped", "clipped_lower", "importance")
    ),
    "reference_kl",
}
"""Columns that mean something only at tokens that the student drew; their means leave given answers out."""

EXTREME_COLUMNS = {
    "distill": "actor/distillation/loss",
    "student_mass": "actor/distillation/student_mass",
    "teacher_mass": "actor/distillation/teacher_mass",
}


def build_metrics(columns: dict[str, Tensor], inputs: LossInputs) -> dict[str, Metric]:
    """Metrics of one micro-batch from its per-token columns.

    Columns are reduced together, as rows of one matrix: metrics of a step must not cost a kernel launch each.
    """
    weights_N = inputs.weights_N
    counts_N = (weights_N > 0).to(weights_N.dtype)
    drawn_N = counts_N if inputs.given_N is None else counts_N * ~inputs.given_N
    parts: dict[str, Tensor] = {
        name: (drawn_N if name in DRAWN_COLUMNS else counts_N) * columns[name]
        for name in MEAN_COLUMNS
        if name in columns
    }
    if "distill" in columns:
        parts["weighted_distill"] = weights_N * columns["distill"]
        parts["abs_distill"] = counts_N * columns["distill"].abs()
    if "sft" in columns:
        parts["sft"] = counts_N * columns["sft"]
    if "task_pg" in columns:
        parts["weighted_task"] = weights_N * columns["task_pg"]
    sums = dict(zip(parts, torch.stack(list(parts.values())).sum(-1).unbind(0), strict=True)) if parts else {}
    tokens = counts_N.sum()
    drawn = tokens if inputs.given_N is None else drawn_N.sum()
    metrics: dict[str, Metric] = {}
    if "distill" in columns:
        metrics["actor/distillation/loss"] = MetricTotal(sums["weighted_distill"])
        metrics["actor/distillation/abs_loss"] = MetricSum(sums["abs_distill"], tokens)
        metrics.update(_by_position(columns["distill"], counts_N, inputs.positions_N))
    if "sft" in columns:
        metrics["actor/sft_loss"] = MetricSum(sums["sft"], tokens - drawn)
    if "task_pg" in columns:
        metrics["actor/pg_loss"] = MetricTotal(sums["weighted_task"])
    for column, name in MEAN_COLUMNS.items():
        if column in sums:
            metrics[name] = MetricSum(sums[column], drawn if column in DRAWN_COLUMNS else tokens)
    metrics.update(_extremes(columns, counts_N))
    return metrics


def position_bucket_names() -> list[str]:
    """Names of the position buckets, in order."""
    ends = [f"{low}-{high - 1}" for low, high in pairwise(POSITION_EDGES)]
    return [*ends, f"{POSITION_EDGES[-1]}+"]


def _by_position(values_N: Tensor, counts_N: Tensor, positions_N: Tensor | None) -> dict[str, Metric]:
    if positions_N is None or values_N.numel() == 0:
        return {}
    # `POSITION_EDGES[1:]`, computed on the device: copying six numbers there would wait for all work queued before.
    powers = torch.arange(2, len(POSITION_EDGES) + 1, device=values_N.device)
    edges = 4**powers
    bucket_N = torch.bucketize(positions_N, edges, right=True)
    zeros = torch.zeros(len(POSITION_EDGES), dtype=torch.float32, device=values_N.device)
    totals = zeros.index_add(0, bucket_N, (counts_N * values_N).float())
    weights = zeros.index_add(0, bucket_N, counts_N.float())
    return {
        f"actor/distillation/loss_at/{name}": MetricSum(totals[index], weights[index])
        for index, name in enumerate(position_bucket_names())
    }


def _extremes(columns: dict[str, Tensor], counts_N: Tensor) -> dict[str, Metric]:
    names = [column for column in EXTREME_COLUMNS if column in columns]
    if not names:
        return {}
    matrix = torch.stack([columns[column] for column in names])
    # One more column, so that the minimum over zero tokens is defined.
    infinity = matrix.new_full((len(names), 1), float("inf"))
    counted = counts_N > 0
    low = torch.cat([torch.where(counted, matrix, infinity), infinity], 1).amin(1)
    high = torch.cat([torch.where(counted, matrix, -infinity), -infinity], 1).amax(1)
    metrics: dict[str, Metric] = {}
    for index, column in enumerate(names):
        metrics[f"{EXTREME_COLUMNS[column]}_min"] = MetricMin(low[index])
        metrics[f"{EXTREME_COLUMNS[column]}_max"] = MetricMax(high[index])
    return metrics
