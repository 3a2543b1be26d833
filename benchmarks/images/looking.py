"""Whether a vision-language student learns to look: the shapes recipe, with a control that sees no pictures.

    python benchmarks/images/looking.py                                      minutes on two CPU cores
    python benchmarks/images/looking.py --grafted smollm2 --seeds 3          minutes on one GPU: SmolLM2-135M

Makes models and data (`recipes/shapes/make_models.py` or `make_grafted.py`), trains the recipe, and trains it again on
the same rows with empty pictures (the control). Held-out accuracy: student before and after, teacher, control; and the
trained student on held-out rows with empty and with swapped pictures. Chance is one in four. A run that was ended early
counts with its last evaluation; the result file says at which step that was.
"""

from __future__ import annotations

import argparse
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
from statistics import mean, median
from typing import Any

import torch

from understudy.observability.metrics import read_metrics

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
    parser.add_argument(
        "--read", metavar="HARDWARE", help="train nothing: read the runs of --folder, made there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shapes-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        task = Task(folder, options.grafted and options.grafted.absolute(), options.make.split())
        rows = [] if options.read else study(task, options.changes, options.seeds, options.together)
        for seed in range(options.seeds):
            rows += figures(folder / "runs", seed)
    for row in rows:
        print(f"{row.name:<60} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    name = "shapes-grafted" if options.grafted else "shapes"
    save(name, options.read or _hardware(), rows, options.out)


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
    data = task.made / "data"
    blank = (f"data.train={data / 'blank.jsonl'}",)
    jobs = [
        (task, f"{kind}-{seed}", [f"run.seed={seed}", f"data.eval={data / 'eval.jsonl'}", *more, *changes])
        for seed in range(seeds)
        for kind, more in (("seeing", ()), ("control", blank))
    ]
    with ThreadPoolExecutor(together) as pool:
        seconds = list(pool.map(_train, jobs))
    rows += [
        Row(f"seconds of the run {name}, with evaluations", round(one), "s")
        for (_, name, _), one in zip(jobs, seconds, strict=True)
    ]
    return rows


def figures(runs: Path, seed: int) -> list[Row]:
    """Of one seed, from the runs' metrics."""
    lines, control = (
        read_metrics(runs / f"{kind}-{seed}" / "metrics.jsonl") for kind in ("seeing", "control")
    )
    first, last, blind = lines[0], _measured(lines), _measured(control)
    own = _mean(last)
    # A study may measure the teacher, the same in all runs, in the first of them only.
    measured = (
        first if _sources(first, "teacher_accuracy") else read_metrics(runs / "seeing-0" / "metrics.jsonl")[0]
    )
    teacher = _mean(measured, "teacher_accuracy")
    title = f"seed {seed}: held-out accuracy"
    return [
        Row(f"{title} of the student before", round(_mean(first), 4), "share", "chance", CHANCE),
        Row(
            f"{title} of the student after",
            round(own, 4),
            "share",
            "teacher",
            round(teacher, 4),
            round(own / teacher, 4) if teacher else None,
            goal=">= 0.9 of the teacher",
            met=own >= 0.9 * teacher,
        ),
        *(
            Row(
                f"{title} after, questions with {name}",
                round(value, 4),
                "share",
                "teacher",
                round(_sources(measured, "teacher_accuracy")[name], 4),
            )
            for name, value in _sources(last).items()
        ),
        _chance(f"{title} of the control, trained on empty pictures", _mean(blind)),
        _chance(f"{title} after, shown empty pictures", _mean(last, shown="blank-")),
        _chance(f"{title} after, shown the picture of another row", _mean(last, shown="swapped-")),
        Row(f"seed {seed}: step of the student's last evaluation", last["step"], "steps"),
        Row(f"seed {seed}: step of the control's last evaluation", blind["step"], "steps"),
        *(
            Row(f"seed {seed}: seconds a step, {name}", round(seconds, 3), "s")
            for name, seconds in (("first", _seconds(lines[1:11])), ("last", _seconds(lines[-10:])))
        ),
    ]


def _sources(line: dict[str, Any], measure: str = "accuracy", shown: str = "") -> dict[str, float]:
    """Accuracy by question: of rows with their own pictures, or `shown` others."""
    start = f"val/{measure}/{shown}"
    found = {name.removeprefix(start): value for name, value in line.items() if name.startswith(start)}
    return {name: value for name, value in found.items() if "-" not in name}


def _mean(line: dict[str, Any], measure: str = "accuracy", shown: str = "") -> float:
    """Of all questions, which have the same number of rows."""
    return mean(_sources(line, measure, shown).values())


def _seconds(lines: Sequence[dict[str, Any]]) -> float:
    return median(line["time/step"] for line in lines if "time/step" in line)


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


def _measured(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line with an evaluation."""
    return [line for line in lines if "val/accuracy" in line][-1]


if __name__ == "__main__":
    main()
