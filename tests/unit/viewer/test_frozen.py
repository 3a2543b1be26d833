"""report.html: the page of a run in one file, also with hostile generated text."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from recorded_run import recorded_run

from understudy.observability.metrics import MetricsWriter
from understudy.observability.report import accuracy_table
from understudy.observability.rundir import RunDir
from understudy.viewer import frozen
from understudy.viewer.frozen import bundle, write_report


def small_run(tmp_path: Path) -> RunDir:
    run = RunDir.create(str(tmp_path / "run"), "run")
    writer = MetricsWriter(run.metrics)
    writer.write(0, {"val/accuracy": 0.2, "val/accuracy/add": 0.2, "val/teacher_accuracy/add": 0.8})
    writer.write(1, {"actor/loss": 2.0, "teacher/add/kl": 2.0, "time/step": 0.5})
    writer.write(
        2,
        {
            "actor/loss": 1.0,
            "teacher/add/kl": 1.0,
            "time/step": 0.5,
            "val/accuracy": 0.6,
            "val/accuracy/add": 0.6,
        },
    )
    writer.close()
    lines = [
        {
            "step": step,
            "key": "eval-0",
            "source": "add",
            "prompt": "1+1=",
            "text": text,
            "answer": "2",
            "reward": reward,
        }
        for step, text, reward in ((0, "<script>alert(1)</script>", 0.0), (2, "2", 1.0))
    ]
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_accuracy_table_compares_before_after_and_teacher(tmp_path: Path) -> None:
    from understudy.observability.metrics import read_metrics

    table = accuracy_table(read_metrics(small_run(tmp_path).metrics))
    assert table == [{"source": "add", "before": 0.2, "after": 0.6, "teacher": 0.8, "of_teacher": 0.6 / 0.8}]


def test_the_accuracy_table_of_a_run_with_one_evaluation_has_only_one_of_before_and_after(
    tmp_path: Path,
) -> None:
    start = {"step": 0, "val/accuracy/add": 0.2, "val/teacher_accuracy/add": 0.8}
    assert accuracy_table([start, {"step": 1, "loss": 1.0}]) == [
        {"source": "add", "before": 0.2, "after": None, "teacher": 0.8, "of_teacher": None}
    ]
    only_later = accuracy_table([{"step": 1, "loss": 1.0}, {**start, "step": 5}])
    assert only_later == [{"source": "add", "before": None, "after": 0.2, "teacher": 0.8, "of_teacher": 0.25}]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="frozen">(.*?)</script>', page, re.S)
    assert found
    return dict(json.loads(found[1]))


def test_generated_text_cannot_end_a_script_of_the_report(tmp_path: Path) -> None:
    page = write_report(small_run(tmp_path), "understudy export RUN out").read_text()
    assert page.count("<script") == page.count("</script>") == 2 and "<script>alert" not in page
    data = data_of(page)
    assert data["run"]["commands"]["next"] == "understudy export RUN out"
    assert data["held_out"]["table"][0]["of_teacher"] == pytest.approx(0.75)
    (answer,) = data["held_out"]["answers"]
    assert answer["before"]["text"] == "<script>alert(1)</script>" and answer["after"]["reward"] == 1.0
    assert data["curves"]["actor/loss"] == [[1, 2], [2.0, 1.0]]


def test_the_report_needs_no_other_file_and_allows_only_its_own_script_and_style(tmp_path: Path) -> None:
    page = write_report(small_run(tmp_path)).read_text()
    assert re.findall(r'<[^>]*(?:src|href)="([^"#]+)"', page.partition("<script")[0]) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        own = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{own}'" in policy[1]
    assert policy[1].startswith("default-src 'none'") and "import " not in bundle().split("uPlot")[0]


def test_the_report_has_rows_with_tokens_and_candidates_within_its_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path / "run", steps=60)
    data = data_of(write_report(run).read_text())
    rows = [one for one in data["rows"] if one["summary"]["kind"] == "kept"]
    assert 0 < len(rows) <= frozen.MOST_ROWS and {
        one["row"] for group in data["worst"] for one in group["tokens"]
    }
    for one in rows:
        assert len(one["candidates"]) == sum(place >= 0 for place in one["detail"]["written"])
        assert all(str(number) in data["texts"] for number, *_ in one["candidates"][0][0])
    shown = {one["summary"]["id"] for one in rows}
    assert {one["row"] for group in data["worst"] for one in group["tokens"]} <= shown
    monkeypatch.setattr(frozen, "MOST_BYTES", 5_000)
    fewer = [
        one for one in data_of(write_report(run).read_text())["rows"] if one["summary"]["kind"] == "kept"
    ]
    assert 0 < len(fewer) < len(rows)
