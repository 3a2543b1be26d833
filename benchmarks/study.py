"""Compares six training methods, three seeds each, on a cut-down SmolLM2-135M; one GPU.

    python recipes/word-problems/word_problems.py; python recipes/word-problems/make_models.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/study.py time              each method alone on the device: seconds of a step
    python benchmarks/study.py tune              a short run of each method at two learning rates, graded on `valid`
    python benchmarks/study.py run               every method × seed, several in parallel, graded on `test`
    python benchmarks/study_draw.py              the picture and the table of docs/results.md

Runs share the device, so their own clocks say little. GPU-seconds are therefore steps × the method's median
step when it had the device to itself (`time`), plus, for SFT on the teacher's answers, the time to write
those. Start-up, evaluation and checkpoints are left out for every method alike.

KL to the teacher is KL(student ‖ teacher) per token, exact over the vocabulary, on answers that the student
samples to held-out problems. Figures go to OUT/*.json; `--budget` bounds the seconds of a command and ends
what is still running.
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


def tune(task: Task, methods: Sequence[str], scales: Sequence[float], side: int, deadline: float) -> None:
    """The learning rate with the best final accuracy on `valid`, per method."""
    if "sft-teacher" in methods:
        write_teacher_answers(task)
    rates = {method: [recipe_rate(task, method) * scale for scale in scales] for method in methods}
    jobs = [Job(method, 7, rate) for index in range(len(scales)) for method, rate in _nth(rates, index)]
    grades, _ = study(task, jobs, side, deadline)
    chosen: dict[str, Any] = {}
    for method in methods:
        tried = {job.rate: grades.get(job.name) or [] for job in jobs if job.method == method}
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
    task: Task, jobs: Sequence[Job], side: int, deadline: float
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Runs all jobs with the grader in parallel; returns the points of each run and how it ended."""
    kept, grades = task.out / "kept", task.out / "grades.jsonl"
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "done").unlink(missing_ok=True)
    words = [
        sys.executable, str(HERE / "study_grade.py"), str(task.recipes / "forward-kl.toml"),
        *settings(task, "forward-kl"), "--kept", str(kept), "--out", str(grades),
    ]  # fmt: skip
    with (task.out / "grader.log").open("wb") as log:
        grader = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment(task))
        outcome = run_all(task, jobs, side, deadline)
        (kept / "done").touch()
        try:
            grader.wait(timeout=_GRADER_SECONDS)
        except subprocess.TimeoutExpired:
            grader.kill()
            grader.wait()
    return {job.name: points_of(task, job, read_lines(grades)) for job in jobs}, outcome


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
    task: Task, methods: Sequence[str], seeds: Sequence[int], rates: Path | None, side: int, deadline: float
) -> None:
    chosen = json.loads(rates.read_text()) if rates and rates.exists() else {}
    if "sft-teacher" in methods:
        write_teacher_answers(task)
    jobs = [Job(method, seed, (chosen.get(method) or {}).get("rate")) for seed in seeds for method in methods]
    grades, outcome = study(task, jobs, side, deadline)
    runs = [
        {
            "method": job.method,
            "seed": job.seed,
            "rate": job.rate if job.rate is not None else recipe_rate(task, job.method),
            "outcome": outcome[job.name],
            "points": grades[job.name],
            "steps": [
                {key: line[key] for key in _KEPT if key in line} for line in read_lines(metrics_of(task, job))
            ],
        }
        for job in jobs
    ]
    (task.out / "study.json").write_text(json.dumps({"runs": runs, "steps": task.steps}) + "\n")
    print(f"wrote {task.out / 'study.json'}")


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
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
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
    task = Task(
        recipes=folder,
        models=options.models.resolve() if options.models else None,
        data=options.data.resolve() if options.data else None,
        out=options.out.resolve(),
        held_out="valid" if options.command == "tune" else "test",
        eval_samples=1 if options.command == "time" else options.eval_samples,
        steps=1000 if options.command == "time" else options.steps,
        eval_every=options.eval_every if options.command != "time" else 1000,
        threads=options.threads,
        sft_rate=options.sft_rate,
        more=tuple(options.set),
        answers=_SAMPLES * (TIMED_STEPS if options.command == "time" else options.steps),
        sft_more=tuple(word for pair in options.sft_set for word in f"--{pair}".split("=", 1)),
    )
    task.out.mkdir(parents=True, exist_ok=True)
    if options.command == "time":
        time_methods(task, options.methods, options.budget)
    elif options.command == "tune":
        tune(task, options.methods, options.scales, options.side_by_side, deadline)
    else:
        run(task, options.methods, options.seeds, options.rates, options.side_by_side, deadline)


if __name__ == "__main__":
    main()
