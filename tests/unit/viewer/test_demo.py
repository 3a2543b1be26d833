"""The recorded run that ships with the package: it is small and complete, and has no paths of the recording machine."""

import json

import pytest

from understudy.viewer.run_view import RunView
from understudy.viewer.serve import demo_run

RUN = demo_run()


@pytest.fixture(scope="module")
def view() -> RunView:
    view = RunView(RUN)
    while view.look():
        pass
    return view


def test_the_demo_run_is_small_and_has_no_absolute_path_in_its_recipe() -> None:
    files = [path for path in RUN.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert '"/' not in RUN.recipe.read_text() and "checkpoints" not in {path.name for path in files}


def test_the_demo_run_has_data_for_everything_the_page_shows(view: RunView) -> None:
    summary = view.summary()
    assert summary["status"] == "finished" and summary["steps"] == summary["of_steps"] > 50
    assert view.held_out()["table"] and view.worst(None) and view.timeline(None, None)["spans"]
    asked = {
        "labels": {"kind": "kept"},
        "ranges": {},
        "text": "",
        "sort": "kl",
        "descending": True,
        "offset": 0,
        "limit": 9,
    }
    row = view.row(view.rows(**asked)["rows"][0]["id"])
    assert (
        row["has_tokenizer"]
        and row["has_candidates"]
        and "".join(row["pieces"]) == row["prompt"] + row["completion"]
    )
    assert view.candidates(row["id"], 0, 1)[0]["teacher"] and row["facts"]["replica"]
    assert {"kl", "entropy", "ratio", "loss", "weight"} <= row["measures"].keys()


def test_the_demo_run_has_the_present_metric_names(view: RunView) -> None:
    read = {
        "actor/engine_diff",
        "actor/distillation/student_mass",
        "teacher/add/kl",
        "perf/sync/trainer_idle",
    }
    assert read <= set(view.metric_names())


def test_the_demo_run_gets_no_warning(view: RunView) -> None:
    assert [one for one in view.advisories() if one["level"] == "warning"] == []


def test_samples_of_the_demo_run_have_the_accuracies_of_its_table(view: RunView) -> None:
    lines = [json.loads(line) for line in RUN.samples.read_text().splitlines()]
    for entry in view.held_out()["table"]:
        expected = {"student": entry["after"], f"teacher {entry['source']}": entry["teacher"]}
        for model, measured in expected.items():
            mine = [one for one in lines if one["model"] == model and one["source"] == entry["source"]]
            last = [one["reward"] for one in mine if one["step"] == max(one["step"] for one in mine)]
            assert sum(last) / len(last) == pytest.approx(measured, abs=1e-4)
