"""Runs of models that bring their own code, and of models whose rotary embedding changes with the sequence length."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_code import write_house_model
from small_runs import ASSETS, call_cli, run_cli, write_toml

import understudy

Make = Callable[..., dict[str, Any]]
ADD = ASSETS / "models" / "teacher-add"


@pytest.fixture
def add_rows(tmp_path: Path) -> str:
    rows = (ASSETS / "data" / "train.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([row for row in rows if '"add"' in row][:16]) + "\n")
    return str(path)


def test_student_and_teacher_with_their_own_code_load_in_every_process_and_export(
    recipe: Make, add_rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer, engine process, worker and teacher process load the code; the exported folder contains it."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    student, teacher = (
        write_house_model(tmp_path / "student"),
        write_house_model(tmp_path / "t", "teacher-add"),
    )
    table = recipe(
        student={"model": str(student), "trust_remote_code": True},
        teachers={"add": {"model": str(teacher), "trust_remote_code": True}},
        data__train=add_rows,
        rollout__processes=1,
        rollout__workers=1,
        trainer__steps=1,
    )
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)))
    assert code == 0, output
    code, output = run_cli("export", table["run"]["dir"], str(tmp_path / "out"))
    assert code == 0, output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "house" and (tmp_path / "out" / "modeling_house.py").is_file()


def phi_like(folder: Path, like: str, threshold: int) -> Path:
    """The quickstart's model (128 tokens) with Phi-3's long rotary embedding, whose factors change at `threshold`."""
    shutil.copytree(ASSETS / "models" / like, folder)
    config = json.loads((folder / "config.json").read_text())
    half = config["head_dim"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": threshold,
        "factor": 1.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_rows_shorter_and_longer_than_a_teacher_s_longrope_threshold_are_scored(
    recipe: Make, add_rows: str, tmp_path: Path
) -> None:
    """Such runs used to fail: the fixed tokens that every request carries were scored with the rotary factors of the
    longest row."""
    teacher = phi_like(tmp_path / "t", "teacher-add", threshold=12)
    table = recipe(teachers={"add": {"model": str(teacher)}}, data__train=add_rows, trainer__steps=2)
    run = understudy.train(table, progress=False)
    assert [line["rows/dead_letters"] for line in run.metrics] == [0, 0]


def test_check_refuses_a_student_whose_context_exceeds_its_longrope_threshold(
    recipe: Make, add_rows: str, tmp_path: Path
) -> None:
    student = phi_like(tmp_path / "s", "student", threshold=40)
    table = recipe(
        student={"model": str(student)}, teachers={"add": {"model": str(ADD)}}, data__train=add_rows
    )
    path = str(write_toml(tmp_path / "r.toml", table))
    code, output = call_cli("check", path)
    assert code == 2 and "changes beyond 40 tokens" in output and "set rollout.context_length = 40" in output
    code, output = call_cli("check", path, "rollout.context_length=40")
    assert code == 0, output
