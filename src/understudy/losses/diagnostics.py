"""Per-token columns → metrics that add up across micro-batches. Nothing here touches the gradient.

Names follow verl's where verl has one. Means run over tokens with a weight above 0; `actor/distillation/loss` and
`actor/pg_loss` are the weighted sums that enter the loss.

Shape legend: N tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from understudy.types.loss import LossInputs
from understudy.types.loss_metrics import Metric, MetricMax, MetricMin, MetricSum, MetricTotal

POSITION_EDGES = (0, 16, 64, 256, 1024, 4096)
"""Buckets of the position within a response; later tokens carry a worse signal, and this shows where it turns."""

MEAN_COLUMNS = {
    "entropy": "actor/entropy",
    "k1": "actor/distillation/k1",
    "student_mass": "actor/distillation/student_mass",
    "teacher_mass": "actor/distillation/teacher_mass",
    "overlap_advantage": "actor/distillation/overlap_token_advantage",
    "clamped": "actor/distillation/clamped_share",
    "distill_clipped": "actor/distillation/pg_clipfrac",
    "distill_clipped_lower": "actor/distillation/pg_clipfrac_lower",
    "distill_importance": "actor/distillation/tis_weight",
    "task_clipped": "actor/pg_clipfrac",
    "task_clipped_lower": "actor/pg_clipfrac_lower",
    "task_importance": "actor/tis_weight",
}

EXTREME_COLUMNS = {
    "distill": "actor/distillation/loss",
    "student_mass": "actor/distillation/student_mass",
    "teacher_mass": "actor/distillation/teacher_mass",
}


def build_metrics(columns: dict[str, Tensor], inputs: LossInputs) -> dict[str, Metric]:
    """Metrics of one micro-batch from its per-token columns."""
    counts_N = (inputs.weights_N > 0).float()
    tokens = counts_N.sum()
    metrics: dict[str, Metric] = {}
    if "distill" in columns:
        weighted = (inputs.weights_N * columns["distill"]).sum()
        metrics["actor/distillation/loss"] = MetricTotal(weighted)
        metrics["actor/distillation/abs_loss"] = MetricSum(
            (counts_N * columns["distill"].abs()).sum(), tokens
        )
        metrics.update(_by_position(columns["distill"], counts_N, inputs.positions_N))
    if "task_pg" in columns:
        metrics["actor/pg_loss"] = MetricTotal((inputs.weights_N * columns["task_pg"]).sum())
        metrics["actor/ppo_kl"] = MetricSum(-(counts_N * columns["task_log_ratio"]).sum(), tokens)
    if "distill_log_ratio" in columns:
        metrics["actor/distillation/ppo_kl"] = MetricSum(
            -(counts_N * columns["distill_log_ratio"]).sum(), tokens
        )
    for column, name in MEAN_COLUMNS.items():
        if column in columns:
            metrics[name] = MetricSum((counts_N * columns[column]).sum(), tokens)
    if "overlap_count" in columns:
        share = columns["overlap_count"] / max(inputs.num_candidates, 1)
        metrics["actor/distillation/overlap_ratio"] = MetricSum((counts_N * share).sum(), tokens)
    for column, name in EXTREME_COLUMNS.items():
        if column in columns:
            metrics[f"{name}_min"], metrics[f"{name}_max"] = _extremes(columns[column], counts_N)
    return metrics


def position_bucket_names() -> list[str]:
    """Names of the position buckets, in order."""
    ends = [f"{low}-{high - 1}" for low, high in pairwise(POSITION_EDGES)]
    return [*ends, f"{POSITION_EDGES[-1]}+"]


def _by_position(values_N: Tensor, counts_N: Tensor, positions_N: Tensor | None) -> dict[str, Metric]:
    if positions_N is None or values_N.numel() == 0:
        return {}
    edges = torch.tensor(POSITION_EDGES[1:], device=values_N.device)
    bucket_N = torch.bucketize(positions_N, edges, right=True)
    zeros = torch.zeros(len(POSITION_EDGES), dtype=torch.float32, device=values_N.device)
    totals = zeros.index_add(0, bucket_N, (counts_N * values_N).float())
    weights = zeros.index_add(0, bucket_N, counts_N)
    return {
        f"actor/distillation/loss_at/{name}": MetricSum(totals[index], weights[index])
        for index, name in enumerate(position_bucket_names())
    }


def _extremes(values_N: Tensor, counts_N: Tensor) -> tuple[MetricMin, MetricMax]:
    infinity = torch.full((1,), float("inf"), dtype=values_N.dtype, device=values_N.device)
    counted = counts_N > 0
    smallest = torch.cat([torch.where(counted, values_N, infinity), infinity]).min()
    largest = torch.cat([torch.where(counted, values_N, -infinity), -infinity]).max()
    return MetricMin(smallest), MetricMax(largest)
