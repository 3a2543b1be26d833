"""A student that is its own teacher, in each version of its weights: what it learns, and where it collapses.

    python recipes/self-distillation/brief.py
    python benchmarks/study/self_distillation.py recipes/self-distillation/smollm2.toml [KEY=VALUE …] \\
        --model FOLDER --runs DIR --cases start live ema 4 live,trainer.learning_rate=4e-4

Runs `understudy train` for every case, one after the other; a finished run in DIR is read, not repeated. A case is a version of the teacher, with
settings of its own behind commas (`live,run.seed=1`). The result file has the held-out reward and the words of an answer at the start and at the end, and reward, length, entropy and KL of the
first and of the last steps; the advisories are printed. `--picture` draws length, KL and entropy of every step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from understudy.observability.advisories.gather import advisories_of
from understudy.observability.rundir import RunDir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, save

END = 3
"""Steps at each end of a run over which a metric is averaged."""
SHOWN = {
    "critic/score/mean": "share",
    "response_length/mean": "tokens",
    "response_length/clip_ratio": "share",
    "actor/entropy": "nats",
    "actor/distillation/loss": "nats",
}
DRAWN = {
    "response_length/mean": ("tokens of an answer", "linear"),
    "actor/distillation/loss": ("reverse KL to the teacher (nats a token)", "log"),
    "actor/entropy": ("entropy of the student (nats a token)", "linear"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", nargs="+", default=["start", "live", "ema", "4"])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--picture", type=Path, help="a .png file")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as for understudy train")
    options = parser.parse_args()
    teacher = next(
        line.split(".")[1].rstrip("]\n")
        for line in options.recipe.open(encoding="utf-8")
        if line.startswith("[teachers.")
    )
    rows: list[Row] = []
    for case in options.cases:
        version, *settings = case.split(",")
        run = options.runs / case
        if not (run / "report.html").exists():
            train(options, teacher, version, run, settings)
        rows += measured(run, ", ".join((options.recipe.stem, f"version {version}", *settings)))
        for one in advisories_of(RunDir(run)):
            print(f"{case}: {one}")
    save("self_distillation", gpu_name() if torch.cuda.is_available() else cpu_name(), rows, options.out)
    if options.picture:
        draw({case: options.runs / case for case in options.cases}, options.picture)


def train(options: argparse.Namespace, teacher: str, version: str, run: Path, settings: list[str]) -> None:
    given = version if version.isdecimal() else json.dumps(version)
    own = (
        f"student.model={options.model}",
        f"teachers.{teacher}.version={given}",
        f"run.dir={run}",
    )
    command = [
        sys.executable,
        "-m",
        "understudy",
        "train",
        str(options.recipe),
        *own,
        *options.overrides,
        *settings,
    ]
    subprocess.run(command, check=True)


def measured(run: Path, name: str) -> list[Row]:
    lines = metrics_of(run)
    held_out = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    steps = [line for line in lines if "actor/loss" in line]
    before, after = (words_of(run, step) for step in (0, lines[-1]["step"]))
    rows = [
        Row(f"{name}: held-out reward", held_out[-1], "share", "before training", held_out[0]),
        Row(f"{name}: held-out answers", after, "words", "before training", before),
    ]
    for key, unit in SHOWN.items():
        first, last = (mean(line[key] for line in part) for part in (steps[:END], steps[-END:]))
        peer = f"the first {END} of {len(steps)} steps"
        rows.append(Row(f"{name}: {key}, last {END} steps", round(last, 4), unit, peer, round(first, 4)))
    return rows


def words_of(run: Path, step: int) -> float:
    """Words of a greedy answer, mean over the held-out questions."""
    samples = map(json.loads, (run / "samples.jsonl").open(encoding="utf-8"))
    return round(mean(len(one["text"].split()) for one in samples if one["step"] == step), 2)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]


def draw(runs: Mapping[str, Path], picture: Path) -> None:
    mpl.use("Agg")
    figure, panels = plt.subplots(1, len(DRAWN), figsize=(12, 3.6), constrained_layout=True)
    for axes, (key, (label, scale)) in zip(panels, DRAWN.items(), strict=True):
        for case, run in runs.items():
            points = [(line["step"], line[key]) for line in metrics_of(run) if key in line]
            axes.plot(*zip(*points, strict=True), linewidth=1.2, label=case.replace(",trainer.", ", "))
        axes.set(xlabel="step", ylabel=label, yscale=scale)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=140)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
