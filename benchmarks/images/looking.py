"""Whether a vision-language student learns to look: the shapes recipe, with a control that sees no pictures.

    python benchmarks/images/looking.py                                      minutes on two CPU cores
    python benchmarks/images/looking.py --grafted smollm2 --seeds 3          minutes on one GPU: SmolLM2-135M

Makes models and data (`recipes/shapes/make_models.py` or `make_grafted.py`), trains the recipe, and trains it again on
the same rows with empty pictures (the control). Held-out accuracy: student before and after, teacher, control; and the
trained student on the held-out rows with empty and with swapped pictures. Chance is one in four.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    parser.add_argument(
        "--grafted", type=Path, help="folder of a language model: make_grafted.py and grafted.toml"
    )
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shapes-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        task = Task(folder, options.grafted and options.grafted.absolute(), options.make.split())
        rows = study(task, options.changes, options.seeds, options.together)
    for row in rows:
        print(f"{row.name:<60} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    name = "shapes-grafted" if options.grafted else "shapes"
    save(name, _hardware(), rows, options.out)


def _hardware() -> str:
    if not torch.cuda.is_available():
        return cpu_name()
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


@dataclass(frozen=True)
class Task:
    """Where models and data of a study are, and how they are made."""

    folder: Path
    language: Path | None
    """Language model of a grafted student; None: the tiny models."""
    make: Sequence[str]

    @property
    def made(self) -> Path:
        return self.folder / "grafted" if self.language else self.folder

    @property
    def recipe(self) -> Path:
        return self.folder / ("grafted.toml" if self.language else "recipe.toml")

    def make_models(self) -> None:
        script = "make_grafted.py" if self.language else "make_models.py"
        words = [str(self.language)] if self.language else []
        _python(str(RECIPE / script), *words, "--out", str(self.made), *self.make)


def study(task: Task, changes: Sequence[str], seeds: int = 1, together: int = 1) -> list[Row]:
    began, rows = time.monotonic(), []
    task.folder.mkdir(parents=True, exist_ok=True)
    if not (task.made / "models" / "student").is_dir():
        task.make_models()
        rows.append(Row("seconds to make data and models", round(time.monotonic() - began), "s"))
    shutil.copy(RECIPE / task.recipe.name, task.folder)
    blank = (f"data.train={task.made / 'data' / 'blank.jsonl'}", "trainer.eval_teachers=false")
    jobs = [
        (task, f"{kind}-{seed}", [f"run.seed={seed}", *more, *changes])
        for seed in range(seeds)
        for kind, more in (("seeing", ()), ("control", blank))
    ]
    with ThreadPoolExecutor(together) as pool:
        seconds = dict(zip((name for _, name, _ in jobs), pool.map(_train, jobs), strict=True))
    for seed in range(seeds):
        rows += _figures(task, seed, seconds[f"seeing-{seed}"])
    return rows


def _figures(task: Task, seed: int, seconds: float) -> list[Row]:
    run, control = (task.folder / "runs" / f"{kind}-{seed}" for kind in ("seeing", "control"))
    first, last = read_metrics(run / "metrics.jsonl")[0], _measured(run)
    teacher = _mean(first, "val/teacher_accuracy/")
    after, blind = last["val/accuracy"], _measured(control)["val/accuracy"]
    shown = {name: _accuracy(run, task.made / "data" / f"test-{name}.jsonl") for name in ("blank", "swapped")}
    told = f"seed {seed}: held-out accuracy"
    return [
        Row(f"{told} of the student before", round(first["val/accuracy"], 4), "share", "chance", CHANCE),
        Row(
            f"{told} of the student after",
            round(after, 4),
            "share",
            "teacher",
            round(teacher, 4),
            round(after / teacher, 4) if teacher else None,
            goal=">= 0.9 of the teacher",
            met=after >= 0.9 * teacher,
        ),
        *(
            Row(f"{told} after, {name}", round(value, 4), "share", "teacher", round(_of(first, name), 4))
            for name, value in _by_question(last).items()
        ),
        _chance(f"{told} of the control, trained on empty pictures", blind),
        _chance(f"{told} after, shown empty pictures", shown["blank"]),
        _chance(f"{told} after, shown the picture of another row", shown["swapped"]),
        Row(f"seed {seed}: seconds to train, with evaluations", round(seconds), "s"),
        Row(f"seed {seed}: seconds a step", round(_step_seconds(run), 3), "s"),
    ]


def _by_question(line: dict[str, Any]) -> dict[str, float]:
    start = "val/accuracy/"
    return {name.removeprefix(start): value for name, value in line.items() if name.startswith(start)}


def _of(line: dict[str, Any], question: str) -> float:
    return float(line[f"val/teacher_accuracy/{question}"])


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


def _train(job: tuple[Task, str, Sequence[str]]) -> float:
    """Seconds of a run."""
    (task, name, changes), began = job, time.monotonic()
    words = ["-m", "understudy.cli.main", "train", str(task.recipe), "--quiet"]
    _python(*words, f"run.dir={task.folder / 'runs' / name}", *changes)
    return time.monotonic() - began


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
