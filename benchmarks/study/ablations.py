"""Ablations of one recipe: every case × seed is a run of `understudy train`, collected and continued over several calls.

    python benchmarks/study/ablations.py --recipe quickstart --out runs/ablations --seconds 1500
    python benchmarks/study/ablations.py --recipe qwen --only topk tail --out runs/ablations-qwen --seconds 1500
    python benchmarks/study/ablations_draw.py --recipe quickstart runs/ablations

ablations.toml lists the recipes and their cases. OUT/collected.jsonl has one line for each run that has ended: held-out accuracy, and at
each evaluation the means of the step's metrics since the one before. OUT/grades.jsonl has the KL to the teacher of its last weights
(`study_grade.py`), on answers of one turn; a table with `graded = false` does without. The same command goes on where the last one ended: collected runs are left out, a run that was interrupted goes on
from its last checkpoint (`understudy resume`), one without a checkpoint from its start. After `--seconds` no run is begun; those under
way go on to their end. Cases with the same settings share their runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from study_jobs import ROOT, read_lines
from understudy.config import load_recipe

HERE = Path(__file__).resolve().parent
KEPT = {
    "length": "response_length/mean",
    "cut": "response_length/clip_ratio",
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "loss": "actor/distillation/loss",
    "student_mass": "actor/distillation/student_mass",
    "teacher_mass": "actor/distillation/teacher_mass",
    "grad_norm": "actor/grad_norm",
    "staleness": "async/staleness/mean",
    "turns": "num_turns/mean",
    "step_seconds": "time/step",
}
"""Metrics of the steps that are collected."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Table:
    """The cases of one recipe (ablations.toml)."""

    recipe: Path
    settings: tuple[str, ...]
    """`key=value` of every run."""
    groups: dict[str, dict[str, tuple[str, ...]]]
    """Group → case → its settings."""
    questions: dict[str, str]
    """Group → what it asks."""
    graded: bool = True
    """Whether the KL to the teacher is measured, on answers of one turn."""


@dataclass(frozen=True)
class Run:
    settings: tuple[str, ...]
    """`key=value` of the recipe's table and of the case, in this order."""
    own: tuple[str, ...]
    """Those of the case."""
    seed: int

    @property
    def name(self) -> str:
        """Readable by the case's settings, unique by all of them."""
        short = [
            setting.partition("=")[0].rpartition(".")[2] + "=" + setting.partition("=")[2]
            for setting in self.own
        ]
        digest = hashlib.sha256("\n".join(self.settings).encode()).hexdigest()[:6]
        return ",".join([*short, f"seed={self.seed}", digest]).replace("/", "_")


def read_table(file: Path, recipe: str, more: Sequence[str] = ()) -> Table:
    """`more` are settings for all runs, which override the table's."""
    tables = tomllib.loads(file.read_text())
    if recipe not in tables:
        raise SystemExit(f"{file} has no recipe {recipe!r}; it has {', '.join(tables)}")
    found = tables[recipe]
    groups = {name: table for name, table in found.items() if isinstance(table, dict)}
    return Table(
        recipe=(file.parent / found["recipe"]).resolve(),
        settings=(*found["settings"], *more),
        groups={
            name: {case: tuple(own) for case, own in table.items() if case != "question"}
            for name, table in groups.items()
        },
        questions={name: table["question"] for name, table in groups.items()},
        graded=found.get("graded", True),
    )


def runs_of(table: Table, only: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """All seeds of a case before the next case; cases with the same settings once."""
    cases = [own for group in only or table.groups for own in table.groups[group].values()]
    return [Run((*table.settings, *own), own, seed) for own in dict.fromkeys(cases) for seed in seeds]


class Process(Protocol):
    """What the driver uses of `subprocess.Popen`."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


def launch(words: Sequence[str], log: Path) -> Process:
    """`understudy` with these arguments; what it says is added to the log."""
    with log.open("ab") as sink:
        command = [sys.executable, "-m", "understudy", *words]
        return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)


class Study:
    """One folder of runs, and what has been collected of them."""

    def __init__(
        self, table: Table, out: Path, launch: Callable[[Sequence[str], Path], Process] = launch
    ) -> None:
        self._table, self._out, self._launch = table, out, launch
        self._collected = out / "collected.jsonl"
        self._kept = out / "kept"
        """RUN/step-*.safetensors: weights for the grader, which removes them."""

    def has(self, run: Run) -> bool:
        return any(line["name"] == run.name for line in read_lines(self._collected))

    def start(self, run: Run) -> Process:
        """A new run, or the rest of one that was interrupted."""
        folder = self._folder(run)
        if (folder / "recipe.json").exists():
            words = ["resume", "--quiet", str(folder)]
        else:
            own = (f"run.dir={folder}", f"run.seed={run.seed}")
            words = ["train", "--quiet", str(self._table.recipe), *run.settings, *own]
        log = self._out / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{words[0]} {run.name}", flush=True)
        return self._launch(words, log)

    def ended(self, run: Run) -> None:
        """Collects a run that took all its steps; its weights stay for the grader, its checkpoints are removed."""
        folder = self._folder(run)
        state = folder / "state.json"
        if not state.exists() or json.loads(state.read_text())["status"] != "finished":
            log = (self._out / "logs" / f"{run.name}.log").read_text(errors="replace")
            print(f"{run.name} did not reach its end; its log ends with\n{log[-1500:]}", flush=True)
            return
        points = points_of(read_lines(folder / "metrics.jsonl"))
        weights = folder / "checkpoints" / f"step-{points[-1]['step']:06d}" / "model.safetensors"
        kept = self._kept / run.name / f"{weights.parent.name}.safetensors"
        if self._table.graded and weights.exists() and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.link(weights, kept)
        record = {
            "name": run.name,
            "settings": run.settings,
            "own": run.own,
            "seed": run.seed,
            "points": points,
        }
        with self._collected.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        print(f"{run.name}: accuracy " + " ".join(f"{point['accuracy']:.3f}" for point in points), flush=True)

    def grader(self) -> subprocess.Popen[bytes] | None:
        """Measures weights as they appear."""
        if not self._table.graded or not load_recipe(self._table.recipe, self._table.settings).teachers:
            return None
        (self._kept / "done").unlink(missing_ok=True)
        self._kept.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, str(HERE / "study_grade.py"), str(self._table.recipe), *self._table.settings,
            "--kept", str(self._kept), "--out", str(self._out / "grades.jsonl"),
        ]  # fmt: skip
        with (self._out / "logs" / "grader.log").open("ab") as sink:
            return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)

    def finish_grading(self, grader: subprocess.Popen[bytes]) -> None:
        (self._kept / "done").touch()
        if grader.wait():
            print((self._out / "logs" / "grader.log").read_text(errors="replace")[-1500:], flush=True)

    def _folder(self, run: Run) -> Path:
        return self._out / "runs" / run.name


def points_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each evaluation: step, accuracy, and the means of metrics since the evaluation before."""
    points: list[dict[str, Any]] = []
    since: list[dict[str, Any]] = []
    for line in lines:
        since.append(line)
        if "val/accuracy" in line:
            known = {name: [one[key] for one in since if key in one] for name, key in KEPT.items()}
            means = {name: round(mean(values), 5) for name, values in known.items() if values}
            sources = {
                key.removeprefix("val/"): value
                for key, value in line.items()
                if key.startswith("val/accuracy/")
            }
            points.append({"step": line["step"], "accuracy": line["val/accuracy"], **sources, **means})
            since = []
    return points


def run_all(study: Study, runs: Sequence[Run], side_by_side: int, seconds: float) -> None:
    """`side_by_side` at a time, in order. Interrupts end the runs under way, which keep their checkpoints."""
    deadline = time.monotonic() + seconds
    waiting = [run for run in runs if not study.has(run)]
    under_way: dict[Run, Process] = {}
    try:
        while waiting or under_way:
            if time.monotonic() > deadline:
                waiting = []
            while waiting and len(under_way) < side_by_side:
                run = waiting.pop(0)
                under_way[run] = study.start(run)
            for run, process in list(under_way.items()):
                if process.poll() is not None:
                    del under_way[run]
                    study.ended(run)
            time.sleep(_LOOK_SECONDS)
    finally:
        for process in under_way.values():
            process.send_signal(signal.SIGTERM)
        for process in under_way.values():
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=Path, default=HERE / "ablations.toml")
    parser.add_argument("--recipe", default="quickstart", help="a table of --cases")
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP", help="all groups when not set")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ablations")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="for every run")
    options = parser.parse_args()
    table = read_table(options.cases, options.recipe, options.set)
    runs = runs_of(table, options.only, options.seeds)
    study = Study(table, options.out.resolve())
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the same command goes on"))
    grader = study.grader()
    try:
        run_all(study, runs, options.side_by_side, options.seconds)
        if grader is not None:
            study.finish_grading(grader)
    finally:
        if grader is not None and grader.poll() is None:
            grader.kill()
            grader.wait()
    left = [run.name for run in runs if not study.has(run)]
    print(
        f"{len(runs) - len(left)} of {len(runs)} runs are collected"
        + (f"; left: {', '.join(left)}" if left else "")
    )


if __name__ == "__main__":
    main()
