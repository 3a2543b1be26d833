"""Writes recorded_runs.json: metrics of short quickstart runs, healthy ones and ones with one fault each.

    python tests/unit/observability/record_runs.py [NAME …] [live_brief=RUN]

A run takes about half a minute on two cores. "live_brief" is recorded from a run of SmolLM2 that
benchmarks/study/self_distillation.py makes (`live`). Only the metrics that the advisories read are kept, with
three digits, and the free space at the end of the run. The run "small_disk" mounts a tmpfs, which needs root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import psutil

from understudy.observability.advisories.gather import facts_of
from understudy.observability.rundir import RunDir

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))
RECORDED = Path(__file__).with_name("recorded_runs.json")
SHIM = Path(__file__).parents[2] / "nemesis/shim"
STEPS = 24
READ = re.compile(
    r"actor/(loss|entropy|engine_diff|updates|pg_clipfrac)|actor/distillation/(loss|clamped_share|pg_clipfrac|\w+_mass)"
    r"|teacher/\w+/kl|response_length/(mean|clip_ratio)|critic/score/mean|val/(teacher_)?accuracy/\w+"
    r"|rollout/(rows|filtered_prompts|reward/\w+/parsed)|rollout_corr/abs_diff_mean|async/staleness/mean"
    r"|perf/teacher/\w+/latency_mean|perf/teacher/\w+/\d+/restarts|perf/async/(trainer|teacher)_idle"
    r"|rows/dead_letters(/\w+)?|rollout/teacher_version/max|time/(step|checkpoint)"
)
RECIPE = (
    "rollout.max_new_tokens",
    "loss.student_temperature",
    "trainer.batch_size",
    "trainer.checkpoint_every",
    "loss.task_coef",
    "rollout.temperature",
)

SMALL = (
    "trainer.batch_size=32",
    f"trainer.steps={STEPS}",
    "trainer.warmup_steps=5",
    "trainer.learning_rate=1e-3",
    "trainer.eval_samples=40",
)
FOLLOWING = tuple(
    f"teachers.{name}.{setting}"
    for name in ("add", "sort")
    for setting in ("model=student", "version=live", 'prompt="{{ answer }}={{ prompt }}"')
)
GROUPS = ("loss.task_coef=1.0", "rollout.n=4", "trainer.batch_size=16")
ADD, SORT, START = (str(ASSETS / "models" / name) for name in ("teacher-add", "teacher-sort", "student"))


def long_answers(row: dict[str, Any], text: str) -> float:
    return len(text) / 16


def long_to_a_point(row: dict[str, Any], text: str) -> float:
    return 1 - abs(len(text) - 9) / 9


def varied(row: dict[str, Any], text: str) -> float:
    return sum(map(ord, text)) % 11 / 10


def one_letter(row: dict[str, Any], text: str) -> float:
    return text.count("a") / 8


def slow_judge(row: dict[str, Any], text: str) -> float:
    time.sleep(0.4)
    return 0.5 + 0.01 * len(text)


def long_to_a_dozen(row: dict[str, Any], text: str) -> float:
    return 1 - abs(len(text) - 12) / 12


def fails_for_some(row: dict[str, Any], text: str) -> float:
    if sum(map(ord, text)) % 6 == 0:
        raise ValueError("an answer that this reward cannot read")
    return 0.5


def reward(function: Callable[..., float]) -> str:
    return f"data.reward=record_runs:{function.__name__}"


RUNS: dict[str, tuple[str, ...]] = {
    "healthy": ("trainer.batch_size=64", "trainer.steps=60", "trainer.learning_rate=3e-3", "trainer.warmup_steps=20"),
    "healthy_async": ("trainer.mode=fully_async",),
    "no_warmup": ("trainer.learning_rate=3e-3", "trainer.warmup_steps=0"),
    "high_learning_rate": ("trainer.learning_rate=0.3",),
    "few_new_tokens": ("rollout.max_new_tokens=3",),
    "no_marked_number": ("data.reward=understudy.rollout.rewards.builtin:gsm8k", "data.train=ADD_ROWS", "data.eval=ADD_ROWS"),
    "solved_prompts": (f"student.model={ADD}", "data.train=ADD_ROWS", "trainer.learning_rate=1e-6", *GROUPS),
    "filtered_prompts": ("rollout.filter_groups=true", "rollout.max_refills=20", *GROUPS, "trainer.batch_size=8"),
    "paid_for_length": (reward(long_answers), "loss.distill_coef=0.05", "rollout.max_new_tokens=16", *GROUPS),
    "paid_for_some_length": (reward(long_to_a_point), "loss.distill_coef=0.05", "rollout.max_new_tokens=16", *GROUPS),
    "paid_for_more_length": (
        reward(long_to_a_dozen), "loss.distill_coef=0.2", "rollout.max_new_tokens=16", "trainer.steps=48", "trainer.schedule=constant", *GROUPS,
        "trainer.learning_rate=2e-4",
    ),
    "paid_for_one_letter": (reward(one_letter), "loss.distill_coef=0.01", *GROUPS),
    "live_self": (*FOLLOWING, "trainer.learning_rate=3e-3"),
    "small_clamp": ("loss.loss_max_clamp=0.5",),
    "many_epochs": (reward(varied), "loss.distill_coef=1e-9", "trainer.epochs=8", "trainer.learning_rate=3e-3", *GROUPS),
    "narrow_clip": (reward(varied), "loss.clip_low=0.02", "loss.clip_high=0.02", "trainer.epochs=8", *GROUPS),
    "hot_engine": ("rollout.temperature=1.6", "loss.correction.measure=true"),
    "swapped_teachers": (f"teachers.add.model={SORT}", f"teachers.sort.model={ADD}"),
    "weak_teacher": (f"student.model={ADD}", f"teachers.add.model={START}", "data.train=ADD_ROWS", "trainer.learning_rate=1e-6"),
    "slowed_teacher": ("trainer.mode=fully_async",),
    "answers_of_others": (
        f"student.model={SORT}", f"teachers.add.model={SORT}", "data.train=ADD_ROWS", "rollout.off_policy=1.0", "loss.sft_coef=1.0",
        "loss.distill_coef=0.01",
        "trainer.learning_rate=1e-4",
    ),
    "killed_replica": ("trainer.steps=60",),
    "slow_reward": (reward(slow_judge), "trainer.mode=fully_async"),
    "slow_trainer": ("trainer.mode=fully_async", "trainer.epochs=32", "trainer.learning_rate=3e-5"),
    "slow_disk": ("trainer.checkpoint_every=2",),
    "small_disk": (),
    "failing_reward": (reward(fails_for_some), "trainer.max_dead_letters=1.0"),
    "live_brief": (),
}  # fmt: skip


def main(names: Iterable[str]) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in names or [name for name in RUNS if name != "live_brief"]:
        name, _, made = name.partition("=")
        with tempfile.TemporaryDirectory() as place, disk(name, place):
            recorded[name] = summary(RunDir(Path(made))) if made else record(name, Path(place))
        text = ",\n".join(
            f"{json.dumps(one)}: {json.dumps(recorded[one])}" for one in RUNS if one in recorded
        )
        RECORDED.write_text("{\n" + text + "\n}\n")


@contextmanager
def disk(name: str, place: str) -> Iterator[None]:
    """The run "small_disk" has a disk of 200 MB."""
    if name != "small_disk":
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "small", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def record(name: str, place: Path) -> dict[str, Any]:
    rows = [line for line in (ASSETS / "data/train.jsonl").read_text().splitlines() if '"add"' in line]
    (place / "add.jsonl").write_text("\n".join(rows) + "\n")
    arguments = [word.replace("ADD_ROWS", str(place / "add.jsonl")) for word in (*SMALL, *RUNS[name])]
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "train",
        str(ASSETS / "recipe.toml"),
        "--quiet",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    if name == "slow_disk":  # every flush takes a second
        environment["PYTHONPATH"] += os.pathsep + str(SHIM)
        environment["UNDERSTUDY_NEMESIS_SHIM"] = str(place / "shim.json")
        (place / "shim.json").write_text('{"fsync": "slow"}')
    trainer = subprocess.Popen([*command, f"run.dir={place / 'run'}"], env=environment)
    threading.Thread(
        target=DISTURBED.get(name, lambda pid, run: None), args=(trainer.pid, place / "run"), daemon=True
    ).start()
    print(name, "exit code", trainer.wait(), flush=True)
    return summary(RunDir(place / "run"))


def summary(run: RunDir) -> dict[str, Any]:
    """Recipe keys, dead letters, bytes, and per metric its first and last step and its values."""
    facts = facts_of(run, live=True)
    metrics = {
        key: [[one.steps[0], one.steps[-1]], [short(value) for value in one.values]]
        for key, one in sorted(facts.history.series.items())
        if READ.fullmatch(key) and (any(one.values) or key.startswith(("critic/", "val/", "rollout/reward/")))
    }
    recipe = {key: facts.key(key) for key in RECIPE}
    found = {name: getattr(facts, name) for name in ("free_bytes", "checkpoint_bytes")}
    return {"recipe": recipe, "dead_letters": dict(facts.dead_letters), **found, "metrics": metrics}


def short(value: float) -> float | int:
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded == int(rounded) else rounded


def replicas_of(pid: int, teacher: str) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [one for one in children if f"teacher-{teacher}" in " ".join(one.cmdline())]


def slow(pid: int, run: Path) -> None:
    """Stops the sort teacher's replicas for 0.4 s of every half second."""
    while psutil.pid_exists(pid):
        try:
            found = replicas_of(pid, "sort")
            for sent, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                for one in found:
                    one.send_signal(sent)
                time.sleep(seconds)
        except psutil.Error:
            time.sleep(0.1)


def kill(pid: int, run: Path) -> None:
    """Kills a replica of the add teacher every three seconds, from the second step on."""
    metrics = run / "metrics.jsonl"
    while psutil.pid_exists(pid):
        time.sleep(3)
        if not metrics.exists() or metrics.read_text().count("\n") < 3:
            continue
        try:
            replicas_of(pid, "add")[0].kill()
        except (psutil.Error, IndexError):
            continue


DISTURBED: dict[str, Callable[[int, Path], None]] = {"slowed_teacher": slow, "killed_replica": kill}


if __name__ == "__main__":
    main(sys.argv[1:])
