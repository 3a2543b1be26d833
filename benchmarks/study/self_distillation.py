"""A student that is its own teacher, in each version of its weights: what it learns, and where it collapses.

    python recipes/self-distillation/brief.py
    python benchmarks/study/self_distillation.py recipes/self-distillation/smollm2.toml [KEY=VALUE …] \\
        --model FOLDER --runs DIR --cases start live ema 4 live,trainer.learning_rate=4e-4

Runs `understudy train` for every case and seed, one after the other; a finished run in DIR is read, not repeated. A case is a version of the teacher,
with settings of its own behind commas. The result file has the held-out reward at the start and at the end, and reward, length, entropy and KL of the
first and of the last steps; the advisories are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", nargs="+", default=["start", "live", "ema", "4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as for understudy train")
    options = parser.parse_args()
    teacher = next(
        line.split(".")[1].rstrip("]\n")
        for line in options.recipe.open(encoding="utf-8")
        if line.startswith("[teachers.")
    )
    rows: list[Row] = []
    for seed in options.seeds:
        for case in options.cases:
            version, *settings = case.split(",")
            run = options.runs / f"{case}-{seed}"
            if not (run / "report.html").exists():
                train(options, teacher, version, seed, run, settings)
            rows += measured(
                run, ", ".join((options.recipe.stem, f"version {version}", *settings, f"seed {seed}"))
            )
            for one in advisories_of(RunDir(run)):
                print(f"{run.name}: {one}")
    save("self_distillation", gpu_name() if torch.cuda.is_available() else cpu_name(), rows, options.out)


def train(
    options: argparse.Namespace, teacher: str, version: str, seed: int, run: Path, settings: list[str]
) -> None:
    given = version if version.isdecimal() else json.dumps(version)
    own = (
        f"student.model={options.model}",
        f"teachers.{teacher}.version={given}",
        f"run.seed={seed}",
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
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    held_out = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    steps = [line for line in lines if "actor/loss" in line]
    rows = [Row(f"{name}: held-out reward", held_out[-1], "share", "before training", held_out[0])]
    for key, unit in SHOWN.items():
        first, last = (mean(line[key] for line in part) for part in (steps[:END], steps[-END:]))
        peer = f"the first {END} of {len(steps)} steps"
        rows.append(Row(f"{name}: {key}, last {END} steps", round(last, 4), unit, peer, round(first, 4)))
    return rows


if __name__ == "__main__":
    main()
