"""benchmarks/study/ablations.py: its cases, and runs that are resumed after an interruption."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import Command, start_cli

from ablations import HERE, Run, Study, points_of, read_table, run_all, runs_of
from ablations_draw import markdown, of_cases, read_runs, rows_of
from study_jobs import read_lines
from understudy.config import load_recipe

ROOT = Path(__file__).resolve().parents[3]
CASES = HERE / "ablations.toml"
GRPO = ROOT / "recipes" / "quickstart" / "methods" / "grpo.toml"


@pytest.mark.parametrize("recipe", ["quickstart", "calculator", "qwen"])
def test_every_ablation_case_is_a_valid_recipe(recipe: str) -> None:
    table = read_table(CASES, recipe)
    runs = runs_of(table, [], [0, 1])
    assert len({run.name for run in runs}) == len(runs)
    for run in runs[::2]:
        load_recipe(table.recipe, run.settings)
    for group in table.groups:
        assert () in table.groups[group].values() or group == "tail", (
            "the recipe as it stands is the comparison"
        )


def test_cases_with_the_same_settings_share_their_runs(tmp_path: Path) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(
        f"[one]\nrecipe = {str(GRPO)!r}\nsettings = ['trainer.steps=3']\n[one.a]\nquestion = 'a?'\n'as it stands' = []\n"
        "'K = 1' = ['loss.topk=1']\n[one.b]\nquestion = 'b?'\n'as it stands' = []\n"
    )
    table = read_table(file, "one")
    assert [run.name.rpartition(",")[0] for run in runs_of(table, [], [0, 1])] == [
        "seed=0", "seed=1", "topk=1,seed=0", "topk=1,seed=1",
    ]  # fmt: skip
    more = read_table(file, "one", ["run.threads=1"])
    assert [run.settings for run in runs_of(more, ["b"], [4])] == [("trainer.steps=3", "run.threads=1")]


def test_points_have_the_means_since_the_previous_evaluation() -> None:
    lines = [
        {"step": 0, "val/accuracy": 0.1},
        {"step": 1, "actor/entropy": 1.0},
        {"step": 2, "actor/entropy": 2.0, "val/accuracy": 0.2, "val/accuracy/add": 0.4},
        {"step": 3, "actor/entropy": 5.0, "val/accuracy": 0.3},
    ]
    assert points_of(lines) == [
        {"step": 0, "accuracy": 0.1},
        {"step": 2, "accuracy": 0.2, "accuracy/add": 0.4, "entropy": 1.5},
        {"step": 3, "accuracy": 0.3, "entropy": 5.0},
    ]


def small_cases(folder: Path) -> Path:
    """One case of three steps, a checkpoint after each, without a teacher."""
    settings = [
        "trainer.steps=3", "trainer.eval_every=1", "trainer.eval_samples=2", "trainer.checkpoint_every=1", "trainer.batch_size=2",
        "rollout.n=2", "rollout.max_new_tokens=2", "run.threads=1",
    ]  # fmt: skip
    file = folder / "cases.toml"
    file.write_text(
        f"[small]\nrecipe = {str(GRPO)!r}\nsettings = {settings}\n[small.only]\nquestion = 'does it go on?'\n'as it stands' = []\n"
    )
    return file


@pytest.mark.slow  # four launches of a run, for a driver of benchmarks
def test_an_interrupted_run_is_resumed_and_a_collected_run_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first launch is killed at its second checkpoint, as if its machine were lost."""
    table, out = read_table(small_cases(tmp_path), "small"), tmp_path / "out"
    (run,) = runs_of(table, [], [0])
    faults = ["checkpoint.before_rename:2", None]

    def launch(arguments: Sequence[str], log: Path) -> Command:
        log.touch()
        return start_cli(*arguments, fault=faults.pop(0))

    study = Study(table, out, launch)

    run_all(study, [run], side_by_side=1, seconds=60)
    assert not study.has(run) and not (out / "collected.jsonl").exists()
    run_all(study, [run], side_by_side=1, seconds=60)
    (line,) = read_lines(out / "collected.jsonl")
    assert [point["step"] for point in line["points"]] == [0, 1, 2, 3]
    assert (line["seed"], line["settings"]) == (0, list(table.settings))
    started = [
        printed.split()[0] for printed in capsys.readouterr().out.splitlines() if printed.endswith(run.name)
    ]
    assert started == ["train", "resume"]

    run_all(study, [run], side_by_side=1, seconds=60)
    assert len(read_lines(out / "collected.jsonl")) == 1, "a collected run was run again"
    (kept,) = (out / "kept").glob("*/*.safetensors")
    assert kept.parent.name == run.name and kept.stem == "step-000003", "the grader finds the last weights"
    assert not list(out.glob("runs/*/checkpoints/step-*"))


def test_no_run_is_started_after_the_time_limit(tmp_path: Path) -> None:
    study = Study(read_table(small_cases(tmp_path), "small"), tmp_path / "out")
    run_all(study, [Run((), (), seed=0)], side_by_side=1, seconds=-1)
    assert not (tmp_path / "out").exists()


def test_tables_have_means_over_seeds_and_the_graders_kl(tmp_path: Path) -> None:
    table = read_table(CASES, "quickstart")
    accuracies: dict[str, tuple[list[str], float]] = {
        "s0": ([], 0.4), "s1": ([], 0.6), "k1": (["loss.topk=1"], 0.2),
    }  # fmt: skip
    with (tmp_path / "collected.jsonl").open("w") as file:
        for name, (own, accuracy) in accuracies.items():
            points = [{"step": 0, "accuracy": 0.1}, {"step": 60, "accuracy": accuracy, "entropy": 1.0}]
            file.write(json.dumps({"name": name, "own": own, "points": points}) + "\n")
    grades = [("start", 0, 6.0), ("s0", 60, 1.0), ("s1", 60, 3.0)]
    (tmp_path / "grades.jsonl").write_text(
        "".join(json.dumps({"run": run, "step": step, "kl": kl}) + "\n" for run, step, kl in grades)
    )
    runs = read_runs(tmp_path)
    found = of_cases(table, "topk", runs)
    assert list(found) == ["K = 8", "K = 1"], "cases without runs are left out"
    assert of_cases(table, "group", runs) == {}, "a question with a single case has no table"
    assert markdown(table, "topk", found)[-3:] == [
        "| K = 8 | 2 | 50.0 ± 14.1 | 2.000 ± 1.414 | 1.00 |",
        "| K = 1 | 1 | 20.0 |  | 1.00 |",
        "",
    ]
    values = {row.name: row.value for row in rows_of(table, "topk", found)}
    assert values["topk: K = 8: kl after 60 steps, mean of 2 seeds"] == 2.0
