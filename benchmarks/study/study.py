"""Compares six training methods, three seeds each, on a cut-down SmolLM2-135M; one GPU.

    python recipes/word-problems/word_problems.py; python recipes/word-problems/make_models.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/study/study.py time              each method alone on the device: seconds of a step
    python benchmarks/study/study.py tune              a short run of each method at two learning rates, graded on `valid`
    python benchmarks/study/study.py run               every method × seed, several in parallel, graded on `test`
    python benchmarks/study/study_draw.py              the picture and the table of docs/results.md

Runs share the device, so their own clocks say little. GPU-seconds are therefore steps × the method's median
step when it had the device to itself (`time`), plus, for SFT on the teacher's answers, the time to write
those. Start-up, evaluation and checkpoints are left out for every method alike.

KL to the teacher is KL(student ‖ teacher) per token, exact over the vocabulary, on answers that the student
samples to held-out problems. Figures go to OUT/*.json; `--budget` bounds the seconds of a command and ends
what is still running.

A study may be made in pieces, on machines that are taken away in between. `--collected FILE` holds every run
that has ended, of `tune` and of `run`; it is written whenever one ends. A command leaves out what FILE has
whole, so the same command with the same FILE goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from study_jobs import (
    METHODS,
    ROOT,
    SFT_RATE,
    Job,
    Task,
    Turn,
    command,
    environment,
    metrics_of,
    read_lines,
    run_all,
    settings,
)

HERE = Path(__file__).resolve().parent
TIMED_STEPS, TIMED_SKIP = 9, 3
_SAMPLES = 128
"""Samples of a step, in every method."""
_KEPT = (
    "step", "time/step", "response_length/mean", "critic/score/mean",
    "actor/distillation/loss", "actor/grad_norm", "actor/lr",
)  # fmt: skip
"""Metrics of each step that study.json keeps."""
_GRADER_SECONDS = 60.0
"""How long the grader may go on after the last run."""


def recipe_rate(task: Task, method: str) -> float:
    if method.startswith("sft-"):
        return task.sft_rate
    return float(tomllib.loads((task.recipes / f"{method}.toml").read_text())["trainer"]["learning_rate"])


def write_teacher_answers(task: Task) -> None:
    """Written once, before the first SFT on them; the time it took is stored with them."""
    if not task.written.exists():
        words = [*command(task, Job("sft-teacher", 0)), "--write-only"]
        subprocess.run(words, check=True, env=environment(task))


def time_methods(task: Task, methods: Sequence[str], limit: float) -> None:
    """All runs start up together; then each in turn has the device to itself. Both SFTs take the same steps
    and are timed once."""
    deadline, found = time.monotonic() + limit, {}
    turns = [Turn(task, Job(method, 99)) for method in methods if not method.startswith("sft-")]
    while not all(turn.ready for turn in turns) and time.monotonic() < deadline:
        time.sleep(0.2)
    print("all wait for their turn", flush=True)
    for turn in turns:
        found[turn.job.method] = turn.timed(TIMED_STEPS, TIMED_SKIP, deadline - time.monotonic())
    if supervised := [method for method in methods if method.startswith("sft-")]:
        alone = Turn(task, Job("sft-worked", 99)).timed(TIMED_STEPS, TIMED_SKIP, deadline - time.monotonic())
        found |= {method: dict(alone) for method in supervised}
    if "sft-teacher" in methods:
        write_teacher_answers(task)
        cost = json.loads(task.written.with_suffix(".cost.json").read_text())
        found["sft-teacher"]["answer_seconds"] = cost["seconds"] / cost["answers"]
    for method, timing in found.items():
        if timing.get("time/step"):
            timing["step_seconds"] = median(timing["time/step"])
            print(
                f"{method}: {timing['step_seconds']:.3f} s a step alone, {timing['steps']} steps", flush=True
            )
    (task.out / "timing.json").write_text(json.dumps(found, indent=1) + "\n")


class Collected:
    """The file of ended runs: one record for each job and length."""

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._records: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def _same(self, record: dict[str, Any], job: Job) -> bool:
        wanted = (job.name, self._task.steps, self._task.held_out)
        return (record["name"], record["length"], record["held_out"]) == wanted

    def record(self, job: Job) -> dict[str, Any] | None:
        return next((record for record in self._records if self._same(record, job)), None)

    def is_whole(self, job: Job) -> bool:
        return (self.record(job) or {}).get("outcome") == "whole"

    def add(self, job: Job, outcome: str) -> None:
        """Replaces an earlier record of the same job."""
        task = self._task
        lines = read_lines(metrics_of(task, job))
        record = {
            "name": job.name,
            "method": job.method,
            "seed": job.seed,
            "rate": job.rate if job.rate is not None else recipe_rate(task, job.method),
            "length": task.steps,
            "held_out": task.held_out,
            "outcome": outcome,
            "points": points_of(task, job, read_lines(task.out / "grades.jsonl")),
            "steps": [{key: line[key] for key in _KEPT if key in line} for line in lines],
        }
        self._records = [one for one in self._records if not self._same(one, job)] + [record]
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps({"runs": self._records}) + "\n")
        written.replace(self._path)


def tune(
    task: Task, methods: Sequence[str], scales: Sequence[float], side: int, deadline: float, collected: Path
) -> None:
    """The learning rate with the best final accuracy on `valid`, per method."""
    if "sft-teacher" in methods:
        write_teacher_answers(task)
    rates = {method: [recipe_rate(task, method) * scale for scale in scales] for method in methods}
    jobs = [Job(method, 7, rate) for index in range(len(scales)) for method, rate in _nth(rates, index)]
    records = study(task, jobs, side, deadline, collected)
    chosen: dict[str, Any] = {}
    for method in methods:
        tried = {job.rate: records[job]["points"] for job in jobs if job.method == method and job in records}
        ends = {
            rate: points[-1]["accuracy"]
            for rate, points in tried.items()
            if points and points[-1]["step"] == task.steps
        }
        chosen[method] = {"rate": max(ends, key=lambda rate: ends[rate]) if ends else None, "tried": tried}
        print(f"{method}: " + ", ".join(f"{rate:g} → {end:.3f}" for rate, end in ends.items()), flush=True)
    (task.out / "rates.json").write_text(json.dumps(chosen, indent=1) + "\n")


def _nth(rates: dict[str, list[float]], index: int) -> list[tuple[str, float]]:
    return [(method, values[index]) for method, values in rates.items()]


def study(
    task: Task, jobs: Sequence[Job], side: int, deadline: float, collected: Path
) -> dict[Job, dict[str, Any]]:
    """Runs the jobs that are not collected yet, with the grader in parallel; returns the records of all that
    have ended."""
    store = Collected(collected, task)
    missing = [job for job in jobs if not store.is_whole(job)]
    kept, grades = task.out / "kept", task.out / "grades.jsonl"
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "done").unlink(missing_ok=True)
    words = [
        sys.executable, str(HERE / "study_grade.py"), str(task.recipes / "forward-kl.toml"),
        *settings(task, "forward-kl"), "--kept", str(kept), "--out", str(grades),
    ]  # fmt: skip
    with (task.out / "grader.log").open("wb") as log:
        grader = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment(task))
        outcome = run_all(task, missing, side, deadline, store.add)
        (kept / "done").touch()
        try:
            grader.wait(timeout=_GRADER_SECONDS)
        except subprocess.TimeoutExpired:
            grader.kill()
            grader.wait()
    if grader.returncode:
        print(f"the grader ended with {grader.returncode}:", flush=True)
        print((task.out / "grader.log").read_text(errors="replace")[-1500:], flush=True)
    for job in missing:  # with what the grader measured after the run had ended
        if outcome[job.name] != "not begun":
            store.add(job, outcome[job.name])
    return {job: record for job in jobs if (record := store.record(job)) is not None}


def points_of(task: Task, job: Job, grades: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy and KL of one run at each step it was measured."""
    graded = {line["step"]: line for line in grades if line["run"] == job.name}
    graded[0] = next((line for line in grades if line["run"] == "start"), {})
    own = {line["step"]: line for line in read_lines(metrics_of(task, job)) if "val/accuracy" in line}
    points = []
    for step in sorted(graded.keys() | own.keys()):
        line = {**graded.get(step, {}), **own.get(step, {})}
        if "val/accuracy" not in line:
            continue
        sources = {
            key.removeprefix("val/accuracy/"): line[key] for key in line if key.startswith("val/accuracy/")
        }
        points.append(
            {"step": step, "accuracy": line["val/accuracy"], "kl": line.get("kl"), "sources": sources}
        )
    return points


def run(
    task: Task,
    methods: Sequence[str],
    seeds: Sequence[int],
    rates: Path | None,
    side: int,
    deadline: float,
    collected: Path,
) -> None:
    chosen = json.loads(rates.read_text()) if rates and rates.exists() else {}
    if "sft-teacher" in methods:
        write_teacher_answers(task)
    jobs = [Job(method, seed, (chosen.get(method) or {}).get("rate")) for seed in seeds for method in methods]
    records = study(task, jobs, side, deadline, collected)
    study_json = {"runs": list(records.values()), "steps": task.steps}
    (task.out / "study.json").write_text(json.dumps(study_json) + "\n")
    missing = [job.name for job in jobs if records.get(job, {}).get("outcome") != "whole"]
    print(f"wrote {task.out / 'study.json'}: {len(jobs) - len(missing)} of {len(jobs)} runs are whole")
    if missing:
        print("the same command goes on with: " + ", ".join(missing))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["time", "tune", "run"])
    parser.add_argument("--task", default="word-problems", help="a folder of methods under recipes/")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a run")
    parser.add_argument("--sft-rate", type=float, default=SFT_RATE, help="learning rate of SFT")
    parser.add_argument(
        "--models", type=Path, help="has student/ and teacher/; what the recipes name when not set"
    )
    parser.add_argument(
        "--data", type=Path, help="what the recipes name when not set; `tune` needs its valid.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument(
        "--collected", type=Path, help="the runs made so far; OUT/collected.json when not set"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="all that the task has")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--scales",
        nargs="+",
        type=float,
        default=[0.33, 1.0],
        help="`tune`: times the recipe's learning rate",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, help="as --eval-every when not set")
    parser.add_argument("--eval-samples", type=int, default=500)
    parser.add_argument("--side-by-side", type=int, default=6)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument(
        "--rates", type=Path, help="`run`: rates.json of `tune`; the recipes' own when not set"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="for every run of the trainer"
    )
    parser.add_argument(
        "--sft-set", nargs="+", default=[], metavar="flag=value", help="for every SFT, `steps=9`"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    folder = ROOT / "recipes" / options.task
    methods = options.methods or [
        method for method in METHODS if method.startswith("sft-") or (folder / f"{method}.toml").exists()
    ]
    task = Task(
        recipes=folder,
        models=options.models.resolve() if options.models else None,
        data=options.data.resolve() if options.data else None,
        out=options.out.resolve(),
        held_out="valid" if options.command == "tune" else "test",
        eval_samples=1 if options.command == "time" else options.eval_samples,
        steps=1000 if options.command == "time" else options.steps,
        eval_every=options.eval_every if options.command != "time" else 1000,
        checkpoint_every=options.checkpoint_every or options.eval_every,
        threads=options.threads,
        sft_rate=options.sft_rate,
        more=tuple(options.set),
        answers=_SAMPLES * (TIMED_STEPS if options.command == "time" else options.steps),
        sft_more=tuple(word for pair in options.sft_set for word in f"--{pair}".split("=", 1)),
    )
    task.out.mkdir(parents=True, exist_ok=True)
    collected = (options.collected or options.out / "collected.json").resolve()
    if options.command == "time":
        time_methods(task, methods, options.budget)
    elif options.command == "tune":
        tune(task, methods, options.scales, options.side_by_side, deadline, collected)
    else:
        run(task, methods, options.seeds, options.rates, options.side_by_side, deadline, collected)


if __name__ == "__main__":
    main()
