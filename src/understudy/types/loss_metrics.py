"""Metrics that can be merged over micro-batches and ranks: weighted sums, totals, minima, maxima.

A mean of means is wrong if micro-batches differ in size. So a loss returns the sums, and the trainer divides
once, when it logs them (`metric_results`). Values stay on the device until `metrics_to_host`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Number = Tensor | float


@dataclass(frozen=True)
class MetricSum:
    """A weighted mean, kept as its two sums."""

    total: Number
    weight: Number

    def merge(self, other: MetricSum) -> MetricSum:
        return MetricSum(self.total + other.total, self.weight + other.weight)

    def result(self) -> float:
        weight = float(self.weight)
        return float(self.total) / weight if weight else 0.0


@dataclass(frozen=True)
class MetricTotal:
    """A plain sum of parts that are weighted already, such as the loss itself."""

    total: Number

    def merge(self, other: MetricTotal) -> MetricTotal:
        return MetricTotal(self.total + other.total)

    def result(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class MetricMin:
    """The smallest value seen; +inf where no token counted."""

    value: Number

    def merge(self, other: MetricMin) -> MetricMin:
        return MetricMin(torch.minimum(torch.as_tensor(self.value), torch.as_tensor(other.value)))

    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class MetricMax:
    """The largest value seen; −inf where no token counted."""

    value: Number

    def merge(self, other: MetricMax) -> MetricMax:
        return MetricMax(torch.maximum(torch.as_tensor(self.value), torch.as_tensor(other.value)))

    def result(self) -> float:
        return float(self.value)


Metric = MetricSum | MetricTotal | MetricMin | MetricMax
METRIC_KINDS: dict[str, type[Metric]] = {
    kind.__name__: kind for kind in (MetricSum, MetricTotal, MetricMin, MetricMax)
}
"""By name, as messages between processes name them."""


def merge_metrics(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """Merges the metrics of several micro-batches (or ranks); a name may be missing from some of them."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            seen = merged.get(name)
            if seen is None:
                merged[name] = metric
            elif type(seen) is type(metric):
                merged[name] = seen.merge(metric)  # type: ignore[arg-type]
            else:
                raise TypeError(
                    f"metric {name!r} is a {type(seen).__name__} in one part and a {type(metric).__name__} in another"
                )
    return merged


def metrics_to_host(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The same metrics as Python floats, in one device transfer; ranks send each other this form."""
    slots = [(name, part.name) for name, metric in metrics.items() for part in fields(metric)]
    values = [getattr(metrics[name], part) for name, part in slots]
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    stacked = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    numbers = torch.stack(stacked).tolist() if stacked else []
    by_metric: dict[str, dict[str, float]] = {}
    for (name, part), number in zip(slots, numbers, strict=True):
        by_metric.setdefault(name, {})[part] = number
    return {name: type(metrics[name])(**parts) for name, parts in by_metric.items()}


def metric_results(metrics: dict[str, Metric]) -> dict[str, float]:
    """Name → number, for the log. Means, minima and maxima over zero tokens are left out."""
    counted = {
        name: metric
        for name, metric in metrics_to_host(metrics).items()
        if not (isinstance(metric, MetricSum) and metric.weight == 0)
    }
    results = {name: metric.result() for name, metric in counted.items()}
    return {name: value for name, value in results.items() if abs(value) != float("inf")}
