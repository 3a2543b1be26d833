"""Who gets the threads of a run: operations, or micro-batches side by side."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from understudy.config import Recipe
from understudy.trainers import threads
from understudy.trainers.threads import lanes_of, torch_threads

STUDENT = Path(str(resources.files("understudy.assets") / "quickstart")) / "models" / "student"


def recipe(model: Path = STUDENT, **tables: dict[str, Any]) -> Recipe:
    student = {"model": str(model), "device": "cpu", **tables.pop("student", {})}
    return Recipe.model_validate(
        {
            "student": student,
            "teachers": {"t": {"model": str(STUDENT)}},
            "data": {"train": "prompts.jsonl"},
            "trainer": {"steps": 1, "batch_size": 4, **tables.pop("trainer", {})},
            "run": {"dir": "run", "threads": 3, **tables.pop("run", {})},
        }
    )


def test_small_student_on_a_cpu() -> None:
    assert (lanes_of(recipe()), torch_threads(recipe())) == (3, 1)


@pytest.mark.parametrize(
    "tables", [{"run": {"threads": 1}}, {"trainer": {"ranks": 2}}, {"student": {"compile": True}}]
)
def test_whose_operations_keep_their_threads(tables: dict[str, Any]) -> None:
    one = recipe(**tables)
    assert (lanes_of(one), torch_threads(one)) == (1, one.run.threads)


def test_nothing_said_leaves_the_choice_to_torch() -> None:
    assert torch_threads(recipe(run={"threads": None})) is None


def test_large_students_and_unknown_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "student"
    shutil.copytree(STUDENT, own)
    assert lanes_of(recipe(own)) == 3
    config = json.loads((own / "config.json").read_text())
    for changes in ({"model_type": "mamba"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}):
        (own / "config.json").write_text(json.dumps(config | changes))
        assert lanes_of(recipe(own)) == 1
    (own / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(threads, "SMALL", 1000)
    assert lanes_of(recipe(own)) == 1
    assert lanes_of(recipe(Path("owner/name"))) == 1
