"""Draws the study: python benchmarks/study/study_draw.py STUDY.json [TIMING.json] [--picture
docs/images/study.png]

Against samples, and with TIMING.json (`study.py time`) against GPU-seconds too. A method that was not timed
alone is drawn by its own clock, dotted: an upper bound, because its runs shared the device. Also prints the
table of docs/results.md. Lines are means over seeds, bands reach from the lowest to the highest seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from study_jobs import METHODS, ROOT

SAMPLES = 128
COLOURS = dict(
    zip(
        METHODS,
        ("#c44e52", "#dd8452", "#da8bc3", "#937860", "#8172b3", "#4878a8", "#55a868", "#64b5cd"),
        strict=True,
    )
)


def curve(runs: Sequence[dict[str, Any]], quantity: str) -> dict[int, list[float]]:
    """Step → the seeds' values; only steps that every seed reached."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for point in run["points"]:
            if point.get(quantity) is not None:
                found.setdefault(point["step"], []).append(point[quantity])
    return {step: values for step, values in sorted(found.items()) if len(values) == len(runs)}


def timed_alone(timing: dict[str, Any], method: str) -> bool:
    return "step_seconds" in timing.get(method, {})


def step_seconds(timing: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float:
    """GPU-seconds of one step of these runs' method."""
    method = runs[0]["method"]
    if timed_alone(timing, method):
        one = timing[method]
        return float(one["step_seconds"]) + SAMPLES * float(one.get("answer_seconds", 0.0))
    clocks = (step.get("time/step") for run in runs for step in run["steps"])
    return median(clock for clock in clocks if clock is not None)


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def draw(study: dict[str, Any], timing: dict[str, Any] | None, teacher: float | None, picture: Path) -> None:
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    timed = timing is not None
    columns = 2 if timed else 1
    layout = (2, 2) if timed else (1, 2)
    figure, found = plt.subplots(*layout, figsize=(10, 7.2 if timed else 4.2), squeeze=False)
    axes = [[found[row][column] if timed else found[0][row] for column in range(columns)] for row in range(2)]
    for method, label in METHODS.items():
        runs = [run for run in study["runs"] if run["method"] == method and run["points"]]
        if not runs:
            continue
        for row, quantity in enumerate(("accuracy", "kl")):
            points = curve(runs, quantity)
            means = [mean(values) for values in points.values()]
            lows, highs = [min(v) for v in points.values()], [max(v) for v in points.values()]
            for column in range(columns):
                unit = SAMPLES if timing is None or not column else step_seconds(timing, runs)
                x = [step * unit for step in points]
                shared = timing is not None and column and not timed_alone(timing, method)
                axes[row][column].plot(
                    x,
                    means,
                    color=COLOURS[method],
                    label=label,
                    marker="o",
                    markersize=3,
                    ls=":" if shared else "-",
                )
                axes[row][column].fill_between(x, lows, highs, color=COLOURS[method], alpha=0.15, linewidth=0)
    for column in range(columns):
        if teacher is not None:
            axes[0][column].axhline(teacher, color="#999999", linestyle="--", linewidth=1)
            axes[0][column].annotate(
                "teacher", (0, teacher), xytext=(2, 3), textcoords="offset points", color="#777777"
            )
        axes[1][column].set_yscale("log")
        for row in range(2):
            axes[row][column].set_xlabel("GPU-seconds" if column else "samples (rollouts, or SFT examples)")
    axes[0][0].set_ylabel("accuracy on held-out problems")
    axes[1][0].set_ylabel("KL(student ‖ teacher) per token")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92 if timed else 0.87))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"wrote {picture}")


def table(study: dict[str, Any], timing: dict[str, Any] | None) -> list[str]:
    """One line per method at the last step that every seed reached."""
    lines = [
        "| method | learning rate | seeds | samples | accuracy | KL to the teacher |",
        "|---|---|---|---|---|---|",
    ]
    if timing is not None:
        lines = [
            line + more for line, more in zip(lines, (" s a step | GPU-seconds |", "---|---|"), strict=True)
        ]
    for method, label in METHODS.items():
        runs = [run for run in study["runs"] if run["method"] == method and run["points"]]
        accuracy, kl = curve(runs, "accuracy"), curve(runs, "kl")
        if not accuracy:
            continue
        step, values = list(accuracy.items())[-1]
        near = list(kl.values())[-1] if kl else None
        distance = f"{mean(near):.3f} ± {spread(near):.3f}" if near else "not kept"
        line = (
            f"| {label} | {runs[0]['rate']:g} | {len(runs)} | {step * SAMPLES:,} | "
            f"{mean(values):.1%} ± {spread(values):.1%} | {distance} |"
        )
        if timing is not None:
            seconds, most = step_seconds(timing, runs), "" if timed_alone(timing, method) else "≤ "
            line += f" {most}{seconds:.2f} | {most}{seconds * step:.0f} |"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("timing", type=Path, nargs="?")
    parser.add_argument(
        "--own-clocks", action="store_true", help="GPU-seconds without TIMING.json, all dotted"
    )
    parser.add_argument("--teacher", type=float, help="the teacher's own accuracy")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "study.png")
    options = parser.parse_args()
    study = json.loads(options.study.read_text())
    timing = json.loads(options.timing.read_text()) if options.timing else {} if options.own_clocks else None
    draw(study, timing, options.teacher, options.picture)
    print("\n".join(table(study, timing)))


if __name__ == "__main__":
    main()
