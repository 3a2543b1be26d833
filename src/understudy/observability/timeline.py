"""The last steps of a run as a Gantt chart: the trainer's work, and the number of parallel spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PHASES = {
    "wait for rows": "#d3d7cf", "produce": "#d3d7cf", "claim": "#babdb6", "update": "#3465a4", "drain": "#c4a000",
    "publish": "#cc5500", "evaluate": "#75507b", "checkpoint": "#4e9a06",
}  # fmt: skip
_BESIDE = {"rollout": "#729fcf", "reward": "#ad7fa8", "score": "#73d216"}
_STEPS = 6
_TAIL_BYTES = 16 << 20

Span = dict[str, Any]


def draw_timeline(spans_file: Path, path: Path, steps: int = _STEPS) -> bool:
    """Draws the last `steps` updates; returns False if there is nothing to draw."""
    spans = last_steps(read_last_launch(spans_file), steps)
    if not spans:
        return False
    zero = min(span["start"] for span in spans)
    kinds = [name for name in _BESIDE if any(span["name"] == name for span in spans)]
    figure, axes = plt.subplots(
        1 + len(kinds), 1, figsize=(13, 1.5 + 1.1 * len(kinds)), sharex=True, squeeze=False, layout="constrained"
    )  # fmt: skip
    _phases(axes[0][0], spans, zero)
    for axis, name in zip(axes[1:, 0], kinds, strict=True):
        _under_way(axis, [span for span in spans if span["name"] == name], name, zero)
    axes[-1][0].set_xlabel("seconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def read_last_launch(path: Path) -> list[Span]:
    """The end of a spans file, as far as one process wrote it: lines are in order of their ends."""
    if not path.exists():
        return []
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = handle.read().decode(errors="replace").splitlines()
    spans: list[Span] = []
    for line in lines:
        try:
            span = json.loads(line)
        except json.JSONDecodeError:  # the cut first line of the tail, or the torn last line of a killed run
            continue
        if spans and span["end"] < spans[-1]["end"]:
            spans = []
        spans.append(span)
    return spans


def last_steps(spans: Sequence[Span], steps: int) -> list[Span]:
    """Everything since the update before the last `steps` ones."""
    updates = [span["end"] for span in spans if span["name"] == "update"]
    if not updates:
        return []
    since = updates[-steps - 1] if len(updates) > steps else 0.0
    return [span for span in spans if span["end"] > since]


def _phases(axis: Axes, spans: Sequence[Span], zero: float) -> None:
    shown = set()
    for span in spans:
        name = span["name"]
        if name in _PHASES:
            label = None if name in shown else name
            shown.add(name)
            bar = (span["start"] - zero, span["end"] - span["start"])
            axis.broken_barh(
                [bar], (0, 1), facecolors=_PHASES[name], edgecolor="white", linewidth=0.4, label=label
            )
    axis.set_yticks([0.5], ["trainer"])
    axis.legend(ncols=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _under_way(axis: Axes, spans: Sequence[Span], name: str, zero: float) -> None:
    """Draws how many spans of one name are open at each moment."""
    changes = sorted(
        [(span["start"] - zero, 1) for span in spans] + [(span["end"] - zero, -1) for span in spans]
    )
    moments, counts, now = [], [], 0
    for moment, change in changes:
        now += change
        moments.append(moment)
        counts.append(now)
    axis.fill_between(moments, counts, step="post", color=_BESIDE[name], linewidth=0)
    axis.set_ylabel(f"{name}s\nunder way", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
