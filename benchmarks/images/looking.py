"""Whether a vision-language student learns to look: the shapes recipe, with a control that sees no pictures.

    python benchmarks/images/looking.py                minutes on two CPU cores

Makes models and data (`recipes/shapes/make_models.py`), trains the recipe, and trains it again on the same rows with
empty pictures (the control). Held-out accuracy: student before and after, teacher, control; and the trained student on
the held-out rows with empty and with swapped pictures. Chance is one in four.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from understudy.observability.metrics import read_metrics
from understudy.run.evaluate_model import evaluate_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name
from step_problem import Row, save

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
CHANCE = 0.25
NEAR_CHANCE = 0.35
"""At most this is called chance: four standard errors of 300 answers above it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--folder", type=Path, help="keeps models, data and runs here")
    parser.add_argument("--make", default="", help="options of make_models.py, in one word")
    parser.add_argument("--seeds", type=int, default=1, help="runs of the recipe and of the control")
    parser.add_argument("changes", nargs="*", help="keys of the recipe, as in `understudy train`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shapes-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        rows = study(folder, options.make.split(), options.changes, options.seeds)
    for row in rows:
        print(f"{row.name:<60} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    save("shapes", cpu_name(), rows, options.out)


def study(folder: Path, make: list[str], changes: list[str], seeds: int = 1) -> list[Row]:
    began, rows = time.monotonic(), []
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "models" / "student").is_dir():
        _python(str(RECIPE / "make_models.py"), "--out", str(folder), *make)
        rows.append(Row("seconds to make data and models", round(time.monotonic() - began), "s"))
    shutil.copy(RECIPE / "recipe.toml", folder)
    for seed in range(seeds):
        rows += _runs(folder, changes, seed)
    return rows


def _runs(folder: Path, changes: list[str], seed: int) -> list[Row]:
    began = time.monotonic()
    run = _trained(folder, f"seeing-{seed}", f"run.seed={seed}", *changes)
    seconds = time.monotonic() - began
    control = _trained(
        folder,
        f"control-{seed}",
        f"run.seed={seed}",
        f"data.train={folder / 'data' / 'blank.jsonl'}",
        *changes,
    )
    first, last = read_metrics(run / "metrics.jsonl")[0], _measured(run)
    teacher = _mean(first, "val/teacher_accuracy/")
    after, blind = last["val/accuracy"], _measured(control)["val/accuracy"]
    shown = {name: _accuracy(run, folder / "data" / f"test-{name}.jsonl") for name in ("blank", "swapped")}
    told = f"seed {seed}: held-out accuracy"
    return [
        Row(f"{told} of the student before", round(first["val/accuracy"], 4), "share", "chance", CHANCE),
        Row(
            f"{told} of the student after",
            round(after, 4),
            "share",
            "teacher",
            round(teacher, 4),
            round(after / teacher, 4),
            goal=">= 0.9 of the teacher",
            met=after >= 0.9 * teacher,
        ),
        _chance(f"{told} of the control, trained on empty pictures", blind),
        _chance(f"{told} after, shown empty pictures", shown["blank"]),
        _chance(f"{told} after, shown the picture of another row", shown["swapped"]),
        Row(f"seed {seed}: seconds to train, with evaluations", round(seconds), "s"),
        Row(f"seed {seed}: seconds a step", round(_step_seconds(run), 3), "s"),
    ]


def _chance(name: str, value: float) -> Row:
    ratio = round(value / CHANCE, 4)
    return Row(
        name,
        round(value, 4),
        "share",
        "chance",
        CHANCE,
        ratio,
        goal=f"<= {NEAR_CHANCE}",
        met=value <= NEAR_CHANCE,
    )


def _trained(folder: Path, name: str, *changes: str) -> Path:
    run = folder / "runs" / name
    words = ["-m", "understudy.cli.main", "train", str(folder / "recipe.toml"), "--quiet"]
    _python(*words, f"run.dir={run}", *changes)
    return run


def _python(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _measured(run: Path) -> dict[str, Any]:
    """The last line with an evaluation."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "val/accuracy" in line][-1]


def _mean(line: dict[str, Any], start: str) -> float:
    found = [value for name, value in line.items() if name.startswith(start)]
    return sum(found) / len(found)


def _step_seconds(run: Path) -> float:
    seconds = [line["time/step"] for line in read_metrics(run / "metrics.jsonl") if "time/step" in line]
    return sum(seconds) / len(seconds)


def _accuracy(run: Path, data: Path) -> float:
    """Of the run's last student."""
    return asyncio.run(evaluate_model(str(run), data, None, None, None, k=0))["accuracy"]


if __name__ == "__main__":
    main()
