"""Draws the curves of one result file: python benchmarks/study/curves_draw.py RESULT.json --teacher 0.609
[--picture docs/images/study-gsm8k-qwen.png]

For studies whose runs were made one at a time: `curves` of the result file holds, for each run, one record a
step. Left: held-out accuracy of the runs named by `--accuracy`, with the teacher's line. Right: the divergence
that each run minimises, on the student's own samples.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "fwd-long": "forward KL, 3e-5 falling",
    "rkl-1e-5": "reverse KL, 1e-5",
    "jsd-3e-5": "JSD, 3e-5",
    "k1-1e-5": "k1 policy gradient, 1e-5",
    "grpoopd-3e-5": "GRPO + forward KL, 3e-5",
}
COLOURS = ("#c44e52", "#4878a8", "#55a868", "#8172b3", "#937860")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--teacher", type=float, required=True, help="the teacher's accuracy")
    parser.add_argument("--accuracy", nargs="*", default=["fwd-long"], help="runs of the left picture")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "study-gsm8k-qwen.png")
    options = parser.parse_args()
    curves = json.loads(options.result.read_text())["curves"]
    mpl.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for (run, points), colour in zip(curves.items(), COLOURS, strict=False):
        if run in options.accuracy:
            graded = [point for point in points if point["accuracy"] is not None]
            steps, accuracy = zip(*((point["step"], point["accuracy"]) for point in graded), strict=True)
            left.plot(steps, accuracy, "o-", color=colour, label=NAMES.get(run, run))
        known = [(point["step"], point["teacher_kl"]) for point in points if point["teacher_kl"] is not None]
        if known:
            right.plot(*zip(*known, strict=True), color=colour, linewidth=1.2, label=NAMES.get(run, run))
    left.axhline(options.teacher, color="0.4", linestyle="--", label="teacher")
    left.set(xlabel="steps of 128 samples", ylabel="accuracy, greedy, held-out problems", ylim=(0, None))
    right.set(
        xlabel="steps of 128 samples", ylabel="each method's own divergence (nats a token)", yscale="log"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(options.picture, dpi=140)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
