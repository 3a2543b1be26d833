"""The study's bookkeeping: the commands of its runs, the collected runs, and the points of their curves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from study import Collected, points_of
from study_draw import curve, draw, step_seconds, table
from study_jobs import METHODS, Job, Task, command, metrics_of, read_lines
from understudy.config import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ON_CPU = RECIPES / "quickstart" / "methods"


FOLDERS = {
    RECIPES / "word-problems": 5, RECIPES / "gsm8k": 5, RECIPES / "gsm8k" / "qwen": 10, ON_CPU: 5,
}  # fmt: skip
"""Folders of methods, and how many recipes each has."""


@pytest.mark.parametrize(
    ("folder", "method"),
    [(folder, method) for folder in FOLDERS for method in METHODS if (folder / f"{method}.toml").exists()],
)
def test_every_run_of_the_study_is_a_valid_train_command(folder: Path, method: str, tmp_path: Path) -> None:
    models = None if folder == ON_CPU else tmp_path / "models"
    task = Task(folder, tmp_path, models=models, steps=7, more=("rollout.max_batch=3",))
    arguments = command(task, Job(method, seed=5, rate=1e-6))
    assert arguments[1:5] == ["-m", "understudy.cli.main", "train", "--quiet"]
    recipe = load_recipe(Path(arguments[5]), arguments[6:])
    assert (recipe.run.seed, recipe.trainer.steps, recipe.trainer.learning_rate) == (5, 7, 1e-6)
    assert recipe.rollout.max_batch == 3
    assert (method == "grpo") == (not recipe.teachers)
    if models is not None:
        assert recipe.student.model == str(models / "student")


def test_every_folder_has_the_expected_number_of_recipes() -> None:
    assert {folder: len(list(folder.glob("*.toml"))) for folder in FOLDERS} == FOLDERS


def test_a_collected_whole_run_is_not_run_again_and_one_that_was_cut_off_is(tmp_path: Path) -> None:
    task, file = Task(ON_CPU, tmp_path, steps=4), tmp_path / "collected.json"
    whole, cut_off, other = Job("k1", 0), Job("k1", 1), Job("k1", 2)
    path = metrics_of(task, whole)
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 4, "val/accuracy": 0.5, "time/step": 0.1, "unwanted": 1}\n')
    collected = Collected(file, task)
    collected.add(whole, "cut off")
    collected.add(whole, "whole")
    collected.add(cut_off, "cut off")
    later = Collected(file, task)
    assert [later.is_whole(job) for job in (whole, cut_off, other)] == [True, False, False]
    assert not Collected(file, replace(task, steps=5)).is_whole(whole), "a longer run is another run"
    record = later.record(whole)
    assert record is not None and record["steps"] == [{"step": 4, "time/step": 0.1}]
    assert [point["accuracy"] for point in record["points"]] == [0.5]
    assert len(json.loads(file.read_text())["runs"]) == 2


def test_sft_starts_from_the_recipes_student_and_prompts(tmp_path: Path) -> None:
    recipe = load_recipe(ON_CPU / "forward-kl.toml")
    arguments = command(Task(ON_CPU, tmp_path, sft_rate=0.5), Job("sft-worked", seed=1))
    flags = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert flags["--student"] == recipe.student.model and flags["--data"] == recipe.data.train[0]
    assert (flags["--seed"], flags["--learning-rate"], flags["--answers"]) == ("1", "0.5", "worked")


def test_points_join_the_runs_own_accuracy_and_the_graders_kl(tmp_path: Path) -> None:
    task, job = Task(ON_CPU, tmp_path), Job("k1", 0)
    path = metrics_of(task, job)
    path.parent.mkdir(parents=True)
    lines = [
        {"step": 0, "val/accuracy": 0.2},
        {"step": 1},
        {"step": 2, "val/accuracy": 0.5, "val/accuracy/add": 0.6},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "val/acc')
    assert len(read_lines(path)) == 3
    grades = [
        {"run": "start", "step": 0, "kl": 1.0, "val/accuracy": 0.1},
        {"run": "k1-0", "step": 2, "kl": 0.5},
    ]
    grades += [{"run": "k1-1", "step": 2, "kl": 9.0}]
    assert points_of(task, job, grades) == [
        {"step": 0, "accuracy": 0.2, "kl": 1.0, "sources": {}},
        {"step": 2, "accuracy": 0.5, "kl": 0.5, "sources": {"add": 0.6}},
    ]


def test_a_curve_has_only_steps_that_every_seed_reached() -> None:
    runs = [
        {
            "method": "k1",
            "rate": 0.1,
            "points": [{"step": s, "accuracy": s / 10 + seed / 100, "kl": 1.0} for s in steps],
        }
        for seed, steps in enumerate([(0, 5, 10), (0, 5)])
    ]
    assert list(curve(runs, "accuracy")) == [0, 5]
    timing = {"k1": {"step_seconds": 2.0}, "sft-teacher": {"step_seconds": 1.0, "answer_seconds": 0.5}}
    assert step_seconds(timing, runs) == 2.0
    assert step_seconds(timing, [{"method": "sft-teacher", "steps": []}]) == 1.0 + 128 * 0.5
    clocks = [{"time/step": 3.0}, {}, {"time/step": 5.0}, {"time/step": 4.0}]
    assert step_seconds({}, [{"method": "k1", "steps": clocks}]) == 4.0
    (row,) = table({"runs": runs}, timing)[2:]
    assert "| 2 | 640 | 50.5% ± 0.7% | 1.000 ± 0.000 |" in row and row.endswith("| 2.00 | 10 |")
    assert table({"runs": runs}, None)[2].endswith("| 1.000 ± 0.000 |")


@pytest.mark.parametrize("timing", [None, {"k1": {"step_seconds": 2.0}}])
def test_the_study_is_drawn_with_and_without_timings(
    timing: dict[str, dict[str, float]] | None, tmp_path: Path
) -> None:
    points = [{"step": step, "accuracy": step / 10, "kl": 1.0 / (step + 1)} for step in (0, 5)]
    draw({"runs": [{"method": "k1", "points": points}]}, timing, 0.9, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000
