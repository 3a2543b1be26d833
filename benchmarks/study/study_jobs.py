"""The runs of the study: their names, their commands, and running several in parallel.

Every method but SFT is the command a user types, `understudy train RECIPE key=value …`. SFT is
recipes/word-problems/sft.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study_turn import TURN
from understudy.config import load_recipe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SFT_SCRIPT = ROOT / "recipes" / "word-problems" / "sft.py"
METHODS = {
    "forward-kl": "OPD, forward KL (top-k)",
    "reverse-kl": "OPD, reverse KL",
    "jsd": "OPD, Jensen-Shannon",
    "k1": "OPD, k1 policy gradient",
    "grpo-opd": "GRPO + OPD",
    "grpo": "GRPO",
    "sft-worked": "SFT, worked answers",
    "sft-teacher": "SFT, teacher's answers",
}
SFT_RATE = 1e-4
_LOOK_SECONDS = 0.2
_WEIGHTS = "model.safetensors"
_TIMED = ("time/step", "time/produce", "time/update", "time/score", "time/rollout", "response_length/mean")


@dataclass(frozen=True)
class Task:
    """Paths, and the settings that all runs of one study share."""

    recipes: Path
    out: Path
    models: Path | None = None
    """Folder with student/ and teacher/; the recipes' own when not set."""
    data: Path | None = None
    """Folder with train.jsonl, valid.jsonl and test.jsonl; the recipes' own when not set."""
    held_out: str = "test"
    eval_samples: int = 500
    steps: int = 100
    eval_every: int = 20
    checkpoint_every: int = 20
    """Checkpoints are what the grader measures; those of a large student take seconds to write."""
    threads: int = 2
    more: tuple[str, ...] = ()
    """Further `key=value` for every run of the trainer."""
    sft_more: tuple[str, ...] = ()
    """Further arguments for every SFT."""
    sft_rate: float = SFT_RATE
    answers: int = 12_800
    """How many of the prompts the teacher answers for SFT."""

    @property
    def written(self) -> Path:
        """The teacher's answers, for SFT on them."""
        return self.out / "teacher-answers.jsonl"


@dataclass(frozen=True)
class Job:
    method: str
    seed: int
    rate: float | None = None
    """Learning rate; the recipe's own when not set."""

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}" + (f"-{self.rate:g}" if self.rate is not None else "")

    @property
    def supervised(self) -> bool:
        return self.method.startswith("sft-")


def metrics_of(task: Task, job: Job) -> Path:
    return (task.out / "kept" if job.supervised else task.out / "runs") / job.name / "metrics.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: another process may be writing the file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def command(task: Task, job: Job) -> list[str]:
    return _sft_command(task, job) if job.supervised else _train_command(task, job)


def settings(task: Task, method: str) -> list[str]:
    """Settings of every run of a method besides its recipe: paths, length, evaluation."""
    values: dict[str, object] = {
        "trainer.steps": task.steps,
        "trainer.eval_every": task.eval_every,
        "trainer.checkpoint_every": task.checkpoint_every,
        "trainer.eval_samples": task.eval_samples,
        "run.threads": task.threads,
    }
    if task.data is not None:
        values["data.train"] = task.data / "train.jsonl"
        values["data.eval"] = task.data / f"{task.held_out}.jsonl"
    if task.models is not None:
        values["student.model"] = task.models / "student"
        if "teachers" in tomllib.loads((task.recipes / f"{method}.toml").read_text()):
            values["teachers.teacher.model"] = task.models / "teacher"
    return [*(f"{key}={value}" for key, value in values.items()), *task.more]


def _train_command(task: Task, job: Job) -> list[str]:
    words = [*settings(task, job.method), f"run.dir={task.out / 'runs' / job.name}", f"run.seed={job.seed}"]
    words += [f"trainer.learning_rate={job.rate}"] if job.rate is not None else []
    recipe = task.recipes / f"{job.method}.toml"
    return [sys.executable, "-m", "understudy.cli.main", "train", "--quiet", str(recipe), *words]


def _sft_command(task: Task, job: Job) -> list[str]:
    """The SFT command, with the recipes' prompts and student."""
    recipe = load_recipe(task.recipes / "forward-kl.toml", settings(task, "forward-kl"))
    words: dict[str, object] = {
        "--answers": job.method.removeprefix("sft-"),
        "--data": recipe.data.train[0],
        "--student": recipe.student.model,
        "--teacher": next(iter(recipe.teachers.values())).model,
        "--written": task.written,
        "--count": task.answers,
        "--out": task.out / "kept" / job.name,
        "--seed": job.seed,
        "--steps": task.steps,
        "--learning-rate": job.rate if job.rate is not None else task.sft_rate,
        "--save-every": task.eval_every,
        "--max-new-tokens": recipe.rollout.max_new_tokens,
    }
    flat = [str(word) for pair in words.items() for word in pair]
    return [sys.executable, str(SFT_SCRIPT), *flat, *task.sft_more]


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float
    linked: set[str] = field(default_factory=set)

    @classmethod
    def start(
        cls, task: Task, job: Job, words: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> Running:
        log = task.out / "logs" / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(metrics_of(task, job).parent, ignore_errors=True)  # of a run that was cut off
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command(task, job), *words],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(task) | dict(variables or {}),
            )
        return cls(job, process, time.monotonic())

    def drop_checkpoints(self, task: Task) -> None:
        """An ended run is never continued; its weights are linked already. Optimizers fill a disk."""
        shutil.rmtree(task.out / "runs" / self.job.name / "checkpoints", ignore_errors=True)

    def keep_weights(self, task: Task) -> None:
        """Hard-links each new checkpoint's weights, so that they outlive the checkpoint; its optimizer is
        deleted with it."""
        for folder in (task.out / "runs" / self.job.name / "checkpoints").glob("step-*"):
            kept = task.out / "kept" / self.job.name / f"{folder.name}.safetensors"
            if folder.name not in self.linked:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # pruned in the meantime
                    os.link(folder / _WEIGHTS, kept)
                    self.linked.add(folder.name)


def environment(task: Task) -> dict[str, str]:
    """Few threads per process, because many run at once; `study_turn` can be imported."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(task.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path,
    }


def run_all(
    task: Task,
    jobs: Sequence[Job],
    side_by_side: int,
    deadline: float,
    ended_with: Callable[[Job, str], None],
) -> dict[str, str]:
    """Runs jobs in order, `side_by_side` at a time. Jobs still running at the deadline are ended, jobs not
    started are left out. Returns how each job ended, and calls `ended_with` at once when one does."""
    waiting, outcome = list(jobs), {job.name: "not begun" for job in jobs}
    under_way: list[Running] = []
    while waiting or under_way:
        late = time.monotonic() > deadline
        while waiting and len(under_way) < side_by_side and not late:
            under_way.append(Running.start(task, waiting.pop(0)))
        for running in list(under_way):
            ended = running.process.poll() is not None
            if not running.job.supervised:
                running.keep_weights(task)
            if ended or late:
                running.process.kill()
                code = running.process.wait()
                outcome[running.job.name] = (
                    "whole" if code == 0 else "cut off" if late else f"failed ({code})"
                )
                under_way.remove(running)
                running.drop_checkpoints(task)
                _print_status(task, running, outcome[running.job.name])
                ended_with(running.job, outcome[running.job.name])
        if late:
            break
        time.sleep(_LOOK_SECONDS)
    return outcome


def _print_status(task: Task, running: Running, how: str) -> None:
    lines = read_lines(metrics_of(task, running.job))
    accuracy = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    seconds = time.monotonic() - running.started
    text = f"{running.job.name:24s} {how} after {seconds:.0f} s, {len(lines)} lines"
    if accuracy:
        text += ", accuracy " + " ".join(f"{value:.3f}" for value in accuracy)
    print(text, flush=True)
    if how.startswith("failed"):
        log = task.out / "logs" / f"{running.job.name}.log"
        print(log.read_text(errors="replace")[-1500:], flush=True)


class Turn:
    """A run that waits before its first step until it has the device to itself (`study_turn`)."""

    def __init__(self, task: Task, job: Job) -> None:
        self.task, self.job = task, job
        self._file = task.out / "turns" / job.name
        self._file.parent.mkdir(parents=True, exist_ok=True)
        words = [] if job.supervised else ["data.reward=study_turn:gsm8k_in_turn"]
        self.running = Running.start(task, job, words, {TURN: str(self._file)})

    @property
    def ready(self) -> bool:
        return self._file.with_suffix(".waiting").exists() or self.running.process.poll() is not None

    def timed(self, steps: int, skip: int, limit: float) -> dict[str, Any]:
        """Its steps, without the first `skip` ones; then it is ended."""
        self._file.touch()
        deadline = time.monotonic() + limit
        while self.running.process.poll() is None and time.monotonic() < deadline:
            if sum(line["step"] > 0 for line in read_lines(metrics_of(self.task, self.job))) >= steps:
                break
            time.sleep(_LOOK_SECONDS)
        self.running.process.kill()
        self.running.process.wait()
        lines = [line for line in read_lines(metrics_of(self.task, self.job)) if line["step"] > skip]
        if not lines:
            _print_status(self.task, self.running, "failed: no step timed")
        parts = {name: [line[name] for line in lines if name in line] for name in _TIMED}
        return {"steps": len(lines), **{name: values for name, values in parts.items() if values}}
