"""Draws a run's curves as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_COLOURS = ("#3465a4", "#cc5500", "#4e9a06", "#75507b", "#c4a000", "#a40000")


def draw_curves(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss, KL and held-out accuracy against steps; the teachers' accuracy as dashed lines."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    _curve(axes[0], metrics, {"loss": "actor/loss"}, "loss")
    keys = sorted(
        {key for line in metrics for key in line if key.startswith("teacher/") and key.endswith("/kl")}
    )
    named = {key.split("/")[1]: key for key in keys} or {"all": "actor/distillation/loss"}
    _curve(axes[1], metrics, named, "KL to the teacher, nats per token")
    sources = sorted(
        {
            key.removeprefix("val/accuracy/")
            for line in metrics
            for key in line
            if key.startswith("val/accuracy/")
        }
    )
    _curve(
        axes[2],
        metrics,
        {source: f"val/accuracy/{source}" for source in sources},
        "held-out accuracy",
        marker="o",
    )
    teachers = metrics[0] if metrics else {}
    for colour, source in zip(_COLOURS, sources, strict=False):
        level = teachers.get(f"val/teacher_accuracy/{source}")
        if level is not None:
            axes[2].axhline(level, color=colour, linestyle="--", linewidth=1, label=f"{source}, teacher")
    if sources:
        axes[2].set_ylim(0, 1.05)
        axes[2].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(
    axis: Axes, metrics: Sequence[dict[str, Any]], named: dict[str, str], title: str, marker: str = ""
) -> None:
    for colour, (name, key) in zip(_COLOURS, named.items(), strict=False):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, color=colour, label=name, marker=marker, markersize=3, linewidth=1.3)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if len(named) > 1:
        axis.legend(frameon=False)
